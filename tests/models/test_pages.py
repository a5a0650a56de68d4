"""A cache in pages gives the logits of the whole-row forward pass, wherever its pages lie."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfound.config.precision import PrecisionConfig
from jaxfound.models.build import Frame
from jaxfound.models.execution import Execution
from jaxfound.models.layers.paged_attention import attend_pages
from jaxfound.models.pages import LatentPages, empty_pages, page_shapes, paged_view
from jaxfound.models.served import serving_arrays, serving_shapes
from pallas_kernels.formats import Quantized
from pallas_kernels.mla_decode import pack
from tests.models.tiny import (
    forward,
    jit,
    model_config,
    model_of,
    relative_error,
    tokens_of,
    weights_of,
)

# float32 sums in another order: a few units in the last place of logits of size 1 to 10.
CLOSE = {"rtol": 2e-5, "atol": 2e-5}
S20 = Path(__file__).parent.parent / "data" / "S20" / "case.npz"
ROWS, LENGTH, PAGE, MAX_PAGES, NUM_PAGES = 3, 14, 4, 5, 24


@pytest.fixture(scope="module", params=["gqa", "mla", "mla_moe_yarn"])
def model(request):
    return model_of(request.param)


@pytest.fixture(scope="module")
def rows(model):
    tokens = jnp.asarray(tokens_of(ROWS, LENGTH))
    return tokens, forward(model, tokens)


def pool(model, *, fill=0.0, **changes):
    sizes = {"num_pages": NUM_PAGES, "page_size": PAGE, "dtype": model.execution.dtype}
    shapes = page_shapes(model.cfg, **sizes, **changes)
    return jax.tree.map(lambda a: jnp.full_like(a, fill), empty_pages(shapes))


def first_of(kept):
    """An array, or the first layer's of a stack."""
    return kept[0] if isinstance(kept, tuple) else kept


def table(seed=0, *, behind=-1):
    """Pages of each row, scattered over the pool; behind the last one of a row anything."""
    order = np.random.default_rng(seed).permutation(NUM_PAGES)[: ROWS * MAX_PAGES]
    return np.where(np.arange(MAX_PAGES) < 4, order.reshape(ROWS, MAX_PAGES), behind)


@jit(static_argnames="decoding")
def extend(model, tokens, pages, starts, counts, block_table, *, decoding=False):
    view = paged_view(
        starts,
        counts,
        block_table,
        num_tokens=tokens.shape[1],
        page_size=PAGE,
        num_pages=NUM_PAGES,
        decoding=decoding,
    )
    final, pages = model.extend_pages(tokens, pages, view)
    return model.logits(final), pages


def padded(tokens, begins, ends, *, width):
    out = np.full((ROWS, width), 60, np.int32)
    for row, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        out[row, : end - begin] = tokens[row, begin:end]
    return jnp.asarray(out)


def test_chunks_and_single_tokens_give_the_logits_of_the_whole_row(model, rows):
    """Rows of other lengths side by side: 5, 9 and none, then 4, 2 and 9, then one by one."""
    tokens, expected = rows
    pages, block_table = pool(model, fill=jnp.nan), jnp.asarray(table())
    steps = [((0, 0, 0), (5, 9, 0)), ((5, 9, 0), (9, 11, 9))]
    steps += [((9 + i, 11 + i, 9 + i), (10 + i, 12 + i, 10 + i)) for i in range(3)]
    for begins, ends in steps:
        decoding = ends[0] - begins[0] == 1
        logits, pages = extend(
            model,
            padded(tokens, begins, ends, width=1 if decoding else 9),
            pages,
            jnp.asarray(begins),
            jnp.asarray(ends) - jnp.asarray(begins),
            block_table,
            decoding=decoding,
        )
        for row, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            got = logits[row, : end - begin]
            np.testing.assert_allclose(got, expected[row, begin:end], **CLOSE)


@pytest.mark.parametrize("ahead", [2, 3])
def test_several_tokens_of_a_row_are_decoded_at_once(model, rows, ahead):
    """As drafts are checked: each sees those before it, and a row that is none writes nothing."""
    tokens, expected = rows
    pages, block_table = pool(model, fill=jnp.nan), jnp.asarray(table())
    begins, ends = np.array([6, 9, 0]), np.array([6 + ahead, 9 + ahead, 0])
    first = padded(tokens, [0, 0, 0], begins, width=9)
    _, pages = extend(model, first, pages, jnp.zeros(3, int), jnp.asarray(begins), block_table)
    logits, _ = extend(
        model,
        padded(tokens, begins, ends, width=ahead),
        pages,
        jnp.asarray(begins),
        jnp.asarray(ends - begins),
        block_table,
        decoding=True,
    )
    for row in (0, 1):
        got = logits[row]
        np.testing.assert_allclose(got, expected[row, begins[row] : ends[row]], **CLOSE)


@pytest.mark.parametrize("seed", [0, 1])
def test_lengths_from_none_to_whole_tables_over_pages_of_nan(seed):
    """Case S20 of public reports: dead slots and pages NaN, tables padded with -1; any order."""
    case = np.load(S20)
    order = np.random.default_rng(seed).permutation(len(case["lengths"])) if seed else slice(None)
    q = np.concatenate([case["q_lat"], case["q_rope"]], axis=-1)[order][:, None]
    lengths, block_table = case["lengths"][order], case["block_table"][order]
    view = paged_view(
        jnp.asarray(lengths - 1),
        jnp.asarray(lengths > 0, jnp.int32),
        jnp.asarray(block_table),
        num_tokens=1,
        page_size=4,
        num_pages=12,
        decoding=False,
    )
    pages = jnp.asarray(case["pages"])

    def read(ids):
        token_BS1W = pages[ids].reshape(len(q), -1, 1, 48)
        return token_BS1W, token_BS1W[..., :32]

    sizes = {"page_size": 4, "kv_heads": 1, "value_dim": 32, "scale": float(case["scale"])}
    out = attend_pages(jnp.asarray(q), read, view=view, **sizes)
    np.testing.assert_allclose(out[:, 0], case["out"][order], rtol=1e-5, atol=1e-5)


def form_of(array):
    return array.shape, array.dtype


@pytest.mark.parametrize("precision", ["float32", "fp8", "fp8_weights"])
def test_weights_as_serving_keeps_them_give_the_same_logits(precision):
    """Layers apart, and kernels quantised before instead of in every step."""
    rules = [{"pattern": "*", "format": precision}]
    policy = PrecisionConfig.model_validate({"compute": "float32", "rules": rules}, strict=False)
    frame = Frame(model_config("mla_moe_yarn"), execution=Execution(precision=policy))
    stored = weights_of(frame)
    kept = serving_arrays(frame, stored)
    assert jax.tree.map(form_of, kept) == jax.tree.map(form_of, serving_shapes(frame))
    quantised = {path for path, a in kept.params.items() if isinstance(first_of(a), Quantized)}
    assert bool(quantised) == (precision != "float32")
    assert any("experts" in path for path in quantised) == (precision != "float32")
    assert not any("key_up" in path or "value_up" in path for path in quantised)
    cached = np.random.default_rng(0).normal(size=pool(frame).tokens.shape)
    step = (
        jnp.asarray(tokens_of(ROWS, 1)),
        LatentPages(jnp.asarray(cached, jnp.float32)),
        jnp.array([9, 4, 0]),
        jnp.array([1, 1, 0]),
        jnp.asarray(table()),
    )
    expected, found = (
        extend(frame.bind(*arrays), *step, decoding=True)[0][:2] for arrays in (stored, kept)
    )
    np.testing.assert_allclose(found, expected, **CLOSE)


def test_weights_can_be_released_as_they_are_read():
    frame = Frame(model_config("mla_moe_yarn"))
    stored, kept = weights_of(frame), serving_arrays(frame, weights_of(frame))
    released = serving_arrays(frame, stored, release=True)
    jax.tree.map(np.testing.assert_array_equal, released, kept)
    assert stored.params["layers.ffn.experts.gate"].is_deleted()


def test_an_8_bit_cache_holds_packed_tokens_and_both_ways_of_reading_agree():
    """One layer, so that both caches are given the same tokens."""
    mla = {"q_lora_rank": 0, "kv_lora_rank": 512, "qk_nope_head_dim": 8}
    model = model_of("mla", num_layers=1, mla={**mla, "qk_rope_head_dim": 64, "v_head_dim": 8})
    tokens, block_table = jnp.asarray(tokens_of(ROWS, 10)), jnp.asarray(table())
    counts, one = jnp.array([9, 4, 0]), jnp.array([1, 1, 0])
    begin = (tokens[:, :9], 0 * counts, counts)
    pools = {name: pool(model, cache_format=name) for name in ("compute", "fp8")}
    filled = {
        name: extend(model, begin[0], pages, *begin[1:], block_table)[1]
        for name, pages in pools.items()
    }
    written = np.asarray(filled["compute"].tokens).any(axis=-1)
    assert written.sum() == 9 + 4
    expected = np.asarray(pack(filled["compute"].tokens))[written]
    np.testing.assert_array_equal(np.asarray(filled["fp8"].tokens)[written], expected)
    step = (model, tokens[:, 9:], filled["fp8"], counts, one, block_table)
    by_kernel, by_blocks = (extend(*step, decoding=d)[0][:2] for d in (True, False))
    np.testing.assert_allclose(by_kernel, by_blocks, **CLOSE)
    exact = extend(model, tokens[:, 9:], filled["compute"], counts, one, block_table)[0][:2]
    # Three bits of mantissa: a latent is off by up to 1/16 of itself, a mean of them by less.
    assert 0 < relative_error(by_blocks[..., :61], exact[..., :61]) < 1 / 16
