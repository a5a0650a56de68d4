"""Decoding is measured by the programs that serve, beside what a step has to read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfound.cli.bench_decode import measure_peer
from jaxfound.config.schema import ConfigError
from jaxfound.models.build import Arrays, Frame
from jaxfound.models.pages import LatentPages
from jaxfound.models.served import serving_arrays
from jaxfound.serving.decode_floor import expected_share, weight_bytes_read
from jaxfound.serving.decode_point import Load
from jaxfound.serving.measure_decode import batch_at, serve_config
from jaxfound.serving.measure_heads import blocks_of, measure_heads
from jaxfound.serving.open_model import serving_config
from jaxfound.serving.runner import noisy_pages
from tests.models.tiny import model_config, weights_of

LOAD = Load((1, 3), context=32, steps=4, rounds=2)


def test_rows_have_pages_of_their_own():
    serve = serve_config(serving_config({"preset": "tiny-mla-moe"}, []).serve, LOAD)
    batch = batch_at(31, rows=3, serve=serve)
    pages = [page for row in batch.decode for page in row.pages]
    assert len(set(pages)) == len(pages)
    assert max(pages) < serve.num_pages
    assert {row.start for row in batch.decode} == {31}


def test_noise_fills_every_page():
    pool = jnp.zeros((4096 * 2 + 5, 2, 3))
    filled = jax.jit(noisy_pages)(LatentPages(pool), jax.random.key(0)).tokens
    assert np.asarray(jnp.all(filled != 0))


def test_the_weights_of_a_step_are_those_that_its_tokens_touch():
    frame = Frame(model_config("mla_moe_yarn"))
    kept = serving_arrays(frame, weights_of(frame))
    nbytes = lambda leaf: sum(a.nbytes for a in jax.tree.leaves(leaf))
    groups = [{path: nbytes(leaf) for path, leaf in group.items()} for group in kept]
    whole = sum(sum(group.values()) for group in groups)
    experts = sum(n for path, n in groups[0].items() if ".experts." in path)
    table = groups[0]["embedding.table"]
    # 2 of 8 experts for each token.
    for tokens, share in ((1, 0.25), (2, 1 - 0.75**2), (1000, 1.0)):
        assert expected_share(tokens, num_choices=2, num_experts=8) == pytest.approx(share)
        found = weight_bytes_read(frame.cfg, kept, num_tokens=tokens)
        assert found == pytest.approx(whole - table - experts * (1 - share), abs=1)


def test_tied_embeddings_are_read_whole_for_the_logits():
    frame = Frame(model_config("gqa"))
    arrays = weights_of(frame)
    total = sum(a.nbytes for group in Arrays(*arrays) for a in group.values())
    assert weight_bytes_read(frame.cfg, arrays, num_tokens=1) == total


def test_only_latents_have_another_form():
    cfg = serving_config({"preset": "tiny-dense"}, [])
    with pytest.raises(ConfigError, match=r"mixer=gqa.*Leave out --head-rows"):
        next(measure_heads(cfg, LOAD))
    assert blocks_of(None) == []


def test_a_load_longer_than_its_context_is_refused():
    with pytest.raises(ConfigError, match=r"Use a longer context or fewer steps"):
        Load((4,), context=12, steps=8, rounds=1)


def test_a_peer_that_is_not_there_is_named():
    cfg = serving_config({"preset": "smollm2-135m"}, [])
    with pytest.raises(
        ConfigError, match=r"transformers failed with 1 rows.*Leave out --peer-rows"
    ):
        measure_peer(cfg, LOAD)
