"""Attention on the card itself: the grid, leaks, poisoned memory, repeatability."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.flash_attention.cases import CARD_SIZES
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

pytestmark = pytest.mark.gpu

# cuDNN sums the gradient of q in no fixed order unless it is asked to.
REPEATABLE = {"xla_gpu_exclude_nondeterministic_ops": True, "xla_gpu_autotune_level": 0}


def poison_memory():
    """Leave NaN in the memory that the next results are allocated from."""
    jax.block_until_ready(jnp.full((1 << 27,), jnp.nan, jnp.float32)).delete()


def backends_of(name, layout):
    """Backends that take operands of the size called `name`, packed by `layout`."""
    _, num_queries, num_keys, *_ = CARD_SIZES[name]
    square = num_queries == num_keys
    by_cudnn = layout == "none" or (layout == "runs" and square)
    if num_queries == num_keys == 1:
        by_cudnn = False
    return ("cudnn", "xla") if by_cudnn else ("xla",)


# Every size in every layout by every backend; masks take turns.
GRID = [
    (name, "bfloat16", (index + turn) % 3 > 0, layout, backend)
    for index, name in enumerate(CARD_SIZES)
    for turn, layout in enumerate(("none", "runs", "any"))
    for backend in backends_of(name, layout)
]
GRID += [(name, "float16", True, "runs", "cudnn") for name in ("grouped", "latent", "widest")]
GRID += [("grouped", "float32", True, "any", "xla")]


@pytest.mark.parametrize(("name", "dtype", "causal", "layout", "backend"), GRID)
def test_result_and_gradients_equal_the_reference(name, dtype, causal, layout, backend):
    poison_memory()
    check_case(CARD_SIZES[name], dtype, causal=causal, layout=layout, backend=backend)


def compiled(ids, *, causal=True, backend="cudnn", **given):
    def run(q, k, v, grad):
        settings = {"packed": "runs", "backend": backend, "causal": causal, **given}
        return with_gradients(q, k, v, grad, ids, None, **settings)

    return jax.jit(run, compiler_options=REPEATABLE)


def expected_of(operands, ids, *, causal=True):
    return quick_jit(lambda *x: expected_with_gradients(*x, ids, None, causal=causal))(*operands)


LEAK_SIZES = {"grouped": (2, 700, 700, 4, 2, 128, 128), "latent": (2, 700, 700, 2, 2, 192, 128)}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", ["cudnn", "xla"])
@pytest.mark.parametrize("name", LEAK_SIZES)
def test_no_document_changes_a_bit_of_another(name, backend, causal):
    operands, ids = (
        make_operands(LEAK_SIZES[name], "bfloat16"),
        make_segments(2, 700, layout="runs"),
    )
    run = compiled(ids, backend=backend, causal=causal)
    clean = run(*operands)
    for document in (1, 2, 3):
        there = rows_of(ids, document)
        spoiled = [jnp.where(there, 1e4, x).astype(x.dtype) for x in operands[:3]]
        poison_memory()
        for before, after in zip(clean, run(*spoiled, operands[3]), strict=True):
            assert (np.asarray(before == after) | there).all(), document


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_stays_in_its_document(value):
    operands, ids = (
        make_operands(LEAK_SIZES["grouped"], "bfloat16"),
        make_segments(2, 700, layout="runs"),
    )
    there = rows_of(ids, 2)
    run = compiled(ids)
    clean, expected = run(*operands), expected_of(operands, ids)
    spoiled = [jnp.where(there, value, x).astype(x.dtype) for x in operands[:3]]
    found = run(*spoiled, operands[3])
    assert not jnp.isfinite(jnp.where(there, found[0], 0)).all()
    kept = [jnp.where(there, x, y) for x, y in zip(clean, found, strict=True)]
    check(kept, expected, "bfloat16")


def test_padding_gives_zeros_wherever_it_ends():
    operands = make_operands((3, 640, 640, 4, 2, 64, 64), "bfloat16")
    order = jnp.arange(640)[None, :]
    # A row of padding alone, a row without padding, a row that ends inside a tile.
    ids = jnp.where(order < jnp.array([[0], [640], [321]]), 1 + order // 200, 0)
    for max_segments in (4, 1):
        given = ids if max_segments > 1 else (ids > 0).astype(jnp.int32)
        poison_memory()
        found = compiled(given, max_segments=max_segments)(*operands)
        check(found, expected_of(operands, given), "bfloat16")
        for x in found:
            assert not np.asarray(x)[np.asarray(ids) == 0].any()


LENGTHS = {
    "halves of tiles": (64, 192, 320, 64, 128),
    "single tokens": (1,) * 40,
    "one token more than a tile": (129, 257, 65, 1),
}


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("level", [0.0, -150.0])
def test_documents_of_every_length_are_right_even_where_all_scores_are_low(name, level):
    # A known fault of cuDNN's mask on Hopper: lengths 64 mod 128 with log-sum-exp under -88.
    ids = jnp.asarray(np.repeat(1 + np.arange(len(LENGTHS[name])), LENGTHS[name])[None], jnp.int32)
    q, k, v, grad = make_operands((1, ids.shape[1], ids.shape[1], 4, 2, 64, 64), "bfloat16")
    # One channel adds `level` to every score; its own gradient is a sum that cancels.
    q = q.at[..., 0].set(8 * math.sqrt(-level))
    k = k.at[..., 0].set(-math.sqrt(-level))
    found = compiled(ids, max_segments=64)(q, k, v, grad)
    expected = expected_of((q, k, v, grad), ids)
    assert all(jnp.isfinite(x).all() for x in found)
    check([x[..., 1:] for x in found], [x[..., 1:] for x in expected], "bfloat16")


@pytest.mark.parametrize("max_segments", [2, 64])
def test_more_documents_than_promised_are_right(max_segments):
    operands, ids = (
        make_operands((2, 500, 500, 4, 2, 64, 64), "bfloat16"),
        make_segments(2, 500, layout="runs"),
    )
    found = compiled(ids, max_segments=max_segments)(*operands)
    check(found, expected_of(operands, ids), "bfloat16")


def test_repeated_runs_give_the_same_bits():
    operands, ids = (
        make_operands((2, 900, 900, 8, 2, 128, 128), "bfloat16"),
        make_segments(2, 900, layout="runs"),
    )
    run = compiled(ids)
    first = run(*operands)
    for _ in range(5):
        poison_memory()
        assert all(jnp.array_equal(x, y) for x, y in zip(first, run(*operands), strict=True))


@pytest.mark.parametrize("num_kv_heads", [4, 1])
def test_a_call_in_a_scan_under_remat_has_the_same_gradients(num_kv_heads):
    sizes = (2, 256, 256, 4, num_kv_heads, 64, 64)
    (q, k, v, grad), ids = make_operands(sizes, "bfloat16"), make_segments(2, 256, layout="runs")
    twice, grads = jnp.stack([q, -q]), jnp.stack([grad, grad])

    @quick_jit
    def scanned(twice, k, v, grads):
        @jax.checkpoint
        def attend(q, k, v):
            given = {"packed": "runs", "causal": True, "backend": "cudnn"}
            return flash_attention(q, k, v, segment_ids=ids, scale=0.125, **given)

        def run(twice, k, v):
            return jax.lax.scan(lambda _, q: (None, attend(q, k, v)), None, twice)[1]

        out, vjp = jax.vjp(run, twice, k, v)
        return out, *vjp(grads)

    first, second = (expected_of((x, k, v, grad), ids) for x in (q, -q))
    expected = [jnp.stack(pair) for pair in zip(first[:2], second[:2], strict=True)]
    expected += [x + y for x, y in zip(first[2:], second[2:], strict=True)]
    check(scanned(twice, k, v, grads), expected, "bfloat16")
