"""What the plan says is kept between I and W is what a cut backward pass of real layers keeps."""

from operator import itemgetter

import jax
import jax.numpy as jnp
import pytest

from jaxfound.config.parallel import AXES
from jaxfound.models.build import Frame, describe
from jaxfound.models.execution import Execution
from jaxfound.parallelism.activations import weight_grad_bytes
from jaxfound.parallelism.legal import layout_of
from jaxfound.parallelism.pipeline.split import split_backward
from jaxfound.parallelism.remat import rematerialize
from pallas_kernels import hardware
from tests.models.test_kept_for_backward import LENGTH, MODELS, ROWS, SIZES, config

CASES = [("gqa", "none"), ("gqa", "full"), ("mla", "none"), ("gqa_moe", "none")]


def of_one_layer(group):
    """The main stack's arrays of one layer."""
    return {p: jax.ShapeDtypeStruct((1, *s.shape[1:]), s.dtype)
            for p, s in group.items() if p.startswith("layers.")}  # fmt: skip


def kept_bytes(cfg):
    """Bytes between I and W of a layer, of which nothing is compiled."""
    execution = Execution(precision=cfg.precision, remat=cfg.parallel.remat)
    frame = Frame(cfg.model, execution=execution)
    params, buffers = frame.shapes()
    shared = {p: s for p, s in params.items() if not p.startswith("layers.")}

    def backward(layers, x, of_y, shared, buffers, ids):
        row = frame.bind(shared, layers, buffers).row(ids, ids, ids)

        def run(layers, x):
            block = jax.tree.map(itemgetter(0), frame.bind(shared, layers, buffers).layers)
            one = rematerialize(
                lambda x, block: block(x, row)[0], execution.remat, in_loop=False, drops_moves=True
            )
            return one(x, block)

        return jax.vjp(run, layers, x)[1](of_y)

    x = jax.ShapeDtypeStruct((ROWS, LENGTH, cfg.model.embed_dim), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
    with hardware.target("NVIDIA H200"):
        cut = split_backward(
            backward, of_one_layer(params), x, x, shared, of_one_layer(buffers), ids
        )
    assert cut.is_cut
    return cut.kept_bytes


@pytest.mark.parametrize(("name", "policy"), CASES)
def test_the_plan_counts_the_bytes_between_a_layers_two_backward_passes(name, policy):
    cfg = config({**SIZES, **MODELS[name]}, policy)
    layout, _ = layout_of(cfg, dict.fromkeys(AXES, 1), describe(cfg.model))
    # Norms' scales and positions of tiles are not counted.
    assert weight_grad_bytes(layout, "moe" in name) == pytest.approx(kept_bytes(cfg), rel=1e-3)
