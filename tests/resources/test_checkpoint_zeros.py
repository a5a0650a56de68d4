"""What is all zeros is stored like any other array: whoever reads it can tell it from a loss."""

import jax.numpy as jnp
import tensorstore

from jaxfound.resources.checkpoint import database
from jaxfound.resources.checkpoint.shards import Piece


def test_boxes_of_zeros_are_in_the_database(tmp_path):
    part = tmp_path / f"{database.PROCESS}0"
    zeros = Piece(((0, 4),), jnp.zeros(4), owned=True)
    database.write_boxes(part, {("rng",): [zeros]}, shapes={("rng",): (4,)})
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{part}/"}).result()
    assert sorted(store.list().result()) == [b"rng/c/0", b"rng/zarr.json"]
