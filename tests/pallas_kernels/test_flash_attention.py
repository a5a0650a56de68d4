"""Attention by XLA against the float32 reference, document by document."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import hardware
from pallas_kernels.flash_attention import OP, flash_attention, xla
from pallas_kernels.flash_attention.cases import SIZES, make_case
from pallas_kernels.registry import KernelError, explain
from tests.pallas_kernels.attention_cases import (
    check,
    check_case,
    expected_with_gradients,
    make_operands,
    make_segments,
    quick_jit,
    rows_of,
    with_gradients,
)

# Every size in bfloat16, every other one in float32 too; masks and layouts take turns.
GRID = [
    (name, dtype, (index + turn) % 3 > 0, ("runs", "any", "none")[(index + 2 * turn) % 3])
    for turn, dtype in enumerate(("bfloat16", "float32"))
    for index, name in enumerate(SIZES)
    if index % (turn + 1) == 0
]


@pytest.mark.parametrize(("name", "dtype", "causal", "layout"), GRID)
def test_result_and_gradients_equal_the_reference(name, dtype, causal, layout):
    check_case(SIZES[name], dtype, causal=causal, layout=layout, backend="xla")


def test_float16_is_within_its_own_tolerance():
    check_case(SIZES["grouped"], "float16", causal=True, layout="runs", backend="xla")


@pytest.mark.parametrize(("dtype", "causal"), [("float32", False), ("bfloat16", True)])
def test_some_queries_at_a_time_give_what_all_at_once_give(dtype, causal):
    q, k, v, grad = make_operands((2, 21, 21, 4, 2, 16, 16), dtype)
    ids = make_segments(2, 21, layout="any")

    @quick_jit
    def in_chunks(q, k, v, grad, ids):
        def run(q, k, v):
            keys = xla.Keys(k, v, ids)
            return xla.attend(q, keys, ids, causal=causal, scale=0.25, num_rows=8)

        out, vjp = jax.vjp(run, q, k, v)
        return (out, *vjp(grad)), expected_with_gradients(q, k, v, grad, ids, None, causal=causal)

    check(*in_chunks(q, k, v, grad, ids), dtype)


def test_long_rows_never_hold_all_their_scores():
    shape = jax.ShapeDtypeStruct((1, 4096, 2, 16), jnp.bfloat16)

    def loss(q, k, v):
        out = flash_attention(q, k, v, segment_ids=None, causal=True, scale=0.25, backend="xla")
        return out.astype(jnp.float32).sum()

    text = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(shape, shape, shape).as_text()
    assert "4096x4096" not in text
    assert f"{xla.rows_at_once(4096, 4096)}x4096" in text


# What one document is changed to: large enough to overcome a mask that is added to scores.
SPOILED = {"huge": 1e4, "nan": np.nan, "infinite": np.inf}


@pytest.mark.parametrize("num_rows", [24, 8], ids=["whole", "chunks"])
def test_no_document_changes_a_bit_of_another(num_rows):
    q, k, v, grad = make_operands((2, 24, 24, 4, 2, 16, 16), "bfloat16")
    ids = make_segments(2, 24, layout="runs")

    @quick_jit
    def run(q, k, v, grad):
        def attend(q, k, v):
            keys = xla.Keys(k, v, ids)
            return xla.attend(q, keys, ids, causal=True, scale=0.25, num_rows=num_rows)

        out, vjp = jax.vjp(attend, q, k, v)
        return out, *vjp(grad)

    clean = run(q, k, v, grad)
    there = rows_of(ids, 2)
    for name, value in SPOILED.items():
        spoiled = [jnp.where(there, value, x).astype(x.dtype) for x in (q, k, v)]
        for before, after in zip(clean, run(*spoiled, grad), strict=True):
            same = np.asarray(before == after) | there
            assert same.all(), name
        found = np.asarray(run(*spoiled, grad)[0], np.float32)[there[..., 0, 0]]
        assert np.isfinite(found).all() == (name == "huge"), name


def test_padding_gives_zeros_and_is_ignored_even_if_nan():
    operands = make_operands((2, 20, 20, 2, 1, 16, 16), "float32")
    ids = make_segments(2, 20, layout="runs").at[1].set(0)
    padding = rows_of(ids, 0)
    run = quick_jit(lambda *operands: with_gradients(*operands, ids, None, causal=True))
    clean = run(*operands)
    spoiled = run(*[jnp.where(padding, jnp.nan, x) for x in operands[:3]], operands[3])
    for before, after in zip(clean, spoiled, strict=True):
        assert jnp.array_equal(before, after)
        assert jnp.array_equal(jnp.where(padding, after, 0), jnp.zeros_like(after))


def test_a_query_without_a_key_gives_zeros_and_finite_gradients():
    q, k, v, grad = make_operands((1, 4, 6, 2, 1, 8, 8), "float32")
    ids, kv_ids = jnp.array([[1, 2, 3, 0]]), jnp.array([[2, 2, 0, 1, 1, 0]])
    run = quick_jit(lambda *operands: with_gradients(*operands, ids, kv_ids, causal=False))
    out, *grads = run(q, k, v, grad)
    assert jnp.array_equal(out[0, 2:], jnp.zeros_like(out[0, 2:]))
    assert jnp.abs(out[0, :2]).min() > 0
    assert all(jnp.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("sizes", [(0, 3, 3), (2, 0, 3), (2, 3, 0)], ids=str)
def test_empty_operands_give_zeros_of_the_right_shape(sizes):
    q, k, v, grad = make_operands((*sizes, 4, 2, 8, 16), "bfloat16")
    out, *grads = with_gradients(q, k, v, grad, None, None, causal=True)
    assert jnp.array_equal(out, jnp.zeros_like(grad))
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


def test_mapping_over_rows_is_the_same_as_more_rows():
    q, k, v, _ = make_operands((3, 9, 9, 2, 1, 8, 8), "float32")
    ids = make_segments(3, 9, layout="any")

    def run(q, k, v, ids):
        return flash_attention(q, k, v, segment_ids=ids, causal=True, scale=0.3)

    mapped = quick_jit(jax.vmap(lambda *x: run(*(y[None] for y in x))[0]))(q, k, v, ids)
    expected = quick_jit(run)(q, k, v, ids)
    np.testing.assert_allclose(mapped, expected, rtol=1e-5, atol=1e-6)


HYPOTHESIS_SIZES = (2, 10, 10, 2, 1, 8, 8)
row_of_ids = st.lists(st.integers(0, 4), min_size=10, max_size=10)


@quick_jit
def found_and_expected(q, k, v, grad, ids):
    found = with_gradients(q, k, v, grad, ids, None, causal=True)
    return found, expected_with_gradients(q, k, v, grad, ids, None, causal=True)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(row_of_ids, min_size=2, max_size=2))
def test_any_layout_of_segments_equals_the_reference(rows):
    operands = make_operands(HYPOTHESIS_SIZES, "float32")
    check(*found_and_expected(*operands, jnp.asarray(rows, jnp.int32)), "float32")


BAD_OPERANDS = {
    "do not fit": lambda q, k, v: (q[..., :4], k, v),
    "cannot share": lambda q, k, v: (q[:, :, :3], k, v),
    "must share one of": lambda q, k, v: (q, k.astype(jnp.bfloat16), v),
}


@pytest.mark.parametrize("words", BAD_OPERANDS)
def test_operands_that_do_not_fit_are_refused_with_the_rule(words):
    operands = BAD_OPERANDS[words](*make_operands((1, 4, 4, 4, 2, 8, 8), "float32")[:3])
    with pytest.raises(ValueError, match=words):
        flash_attention(*operands, segment_ids=None, causal=True, scale=1.0)


BAD_SEGMENTS = {
    "give both, or neither": (None, jnp.ones((1, 4), jnp.int32)),
    "Where T and S differ": (jnp.ones((1, 3), jnp.int32), None),
    r"must be \[B T\]": (jnp.ones((1, 4), jnp.int32), jnp.ones((1, 5), jnp.int32)),
}


@pytest.mark.parametrize("words", BAD_SEGMENTS)
def test_segments_that_do_not_fit_are_refused_with_the_rule(words):
    q, k, v, _ = make_operands((1, 4, 4, 4, 2, 8, 8), "float32")
    ids, kv_ids = BAD_SEGMENTS[words]
    with pytest.raises(ValueError, match=words):
        flash_attention(q, k, v, segment_ids=ids, kv_segment_ids=kv_ids, causal=True, scale=1.0)


def test_asking_for_cudnn_on_a_cpu_says_why_not():
    q, k, v, _ = make_operands((1, 4, 4, 4, 2, 8, 8), "bfloat16")
    with pytest.raises(KernelError, match=r"cudnn.*refuses: cpu is host"):
        flash_attention(q, k, v, segment_ids=None, causal=True, scale=1.0, backend="cudnn")


def test_explain_says_what_an_absent_card_would_run_and_what_padding_costs():
    rows = explain(OP, 4096, 4096, 16, 16, 192, 128, device="h200")
    assert [row.chosen for row in rows] == [True, False]
    assert rows[0].padded_flop_ratio == 1.0
    latent = make_case(
        64, 64, 1, 1, 192, 128, hardware=hardware.find("h200"), segments="runs", max_segments=8
    )
    assert latent.padded_flop_ratio == 384 / 320
    assert OP.choose(latent).name == "cudnn"
