"""The cuDNN backend around its kernel: choice, runs, padding, fallback, shards, vmap.

cuDNN itself is replaced by a stand-in that sees only what cuDNN would see.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding

from pallas_kernels import hardware
from pallas_kernels.flash_attention import OP
from pallas_kernels.flash_attention.cases import make_case
from pallas_kernels.flash_attention.runs import are_whole, find_runs
from tests.pallas_kernels.attention_cases import (
    StandIn,
    check,
    expected_with_gradients,
    make_operands,
    make_segments,
    quick_jit,
    rows_of,
    stand_in_for_cudnn,
    with_gradients,
)

SIZES = (2, 24, 24, 4, 2, 16, 16)
LATENT = (2, 24, 24, 2, 2, 24, 16)
H200 = hardware.find("NVIDIA H200")


@pytest.fixture(autouse=True)
def on_a_card_with_cudnn(monkeypatch):
    stand_in_for_cudnn(monkeypatch)
    with hardware.target("NVIDIA H200"):
        yield


def run_both(operands, ids, *, causal=True, **given):
    given = {"packed": "runs", "backend": "cudnn", **given}

    @quick_jit
    def both(q, k, v, grad, ids):
        found = with_gradients(q, k, v, grad, ids, None, causal=causal, **given)
        return found, expected_with_gradients(q, k, v, grad, ids, None, causal=causal)

    return both(*operands, ids)


PACKED = {
    "several documents": {"max_segments": 8},
    "one document and padding": {"max_segments": 1},
    "no segments": {},
}


@pytest.mark.parametrize("sizes", [SIZES, LATENT], ids=["grouped", "latent"])
@pytest.mark.parametrize("name", PACKED)
def test_the_kernel_is_given_what_it_needs_and_its_garbage_is_dropped(name, sizes):
    ids = make_segments(2, 24, layout="runs")
    if name == "one document and padding":
        ids = (ids < 3).astype(jnp.int32) * (ids > 0)
    if name == "no segments":
        ids = None
    operands = make_operands(sizes, "bfloat16")
    check(*run_both(operands, ids, causal=name != "no segments", **PACKED[name]), "bfloat16")


BROKEN = {
    "more documents than promised": (lambda ids: ids, {"max_segments": 2}),
    "a document in two runs": (lambda ids: ids.at[0, 20].set(1), {"max_segments": 8}),
    "padding in front": (lambda ids: ids.at[1, :3].set(0), {"max_segments": 8}),
}


class Wrecked(StandIn):
    """A kernel whose results are useless."""

    @classmethod
    def _attend(cls, q, k, v, scores):
        out, ids = super()._attend(q, k, v, scores)
        return out * jnp.nan, ids


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_takes_the_xla_path(name, monkeypatch):
    stand_in_for_cudnn(monkeypatch, Wrecked)
    breaks, given = BROKEN[name]
    ids = breaks(make_segments(2, 24, layout="runs"))
    check(*run_both(make_operands(SIZES, "bfloat16"), ids, **given), "bfloat16")


def test_rows_that_keep_the_promise_do_use_the_kernel(monkeypatch):
    stand_in_for_cudnn(monkeypatch, Wrecked)
    ids = make_segments(2, 24, layout="runs")
    found, _ = run_both(make_operands(SIZES, "bfloat16"), ids)
    assert not any(jnp.isfinite(x).all() for x in found)


@pytest.mark.parametrize("sizes", [SIZES, LATENT], ids=["grouped", "latent"])
def test_rows_that_the_caller_has_checked_take_the_kernel_and_nothing_else(sizes):
    ids = make_segments(2, 24, layout="runs").at[1, 15:].set(0)
    operands = make_operands(sizes, "bfloat16")
    given = {"packed": "checked", "max_segments": 8}
    check(*run_both(operands, ids, **given), "bfloat16")
    settings = {"causal": True, "backend": "cudnn", **given}
    text = str(jax.make_jaxpr(lambda *x: with_gradients(*x, None, **settings))(*operands, ids))
    assert "cond[" not in text, "nothing is decided on the device"


def test_a_value_that_is_not_finite_stays_in_its_document():
    ids = make_segments(2, 24, layout="runs")
    q, k, v, grad = make_operands(SIZES, "bfloat16")
    there = rows_of(ids, 2)
    clean, expected = run_both((q, k, v, grad), ids)
    for value in (np.nan, np.inf):
        spoiled = [jnp.where(there, value, x).astype(x.dtype) for x in (q, k, v)]
        found, _ = run_both((*spoiled, grad), ids)
        assert not jnp.isfinite(jnp.where(there, found[0], 0)).all()
        kept = [jnp.where(there, x, y) for x, y in zip(clean, found, strict=True)]
        check(kept, expected, "bfloat16")


def test_a_gradient_that_is_not_finite_does_not_reach_the_kernel(monkeypatch):
    ids = make_segments(2, 24, layout="runs")
    q, k, v, grad = make_operands(SIZES, "bfloat16")
    _, grad_q, *_ = run_both((q, k, v, grad.at[0, 0, 0, 0].set(jnp.nan)), ids)[0]
    assert jnp.isfinite(grad_q[1]).all()


# Rows over data, query heads over tensor; key heads divide over it, or each device holds all.
HEADS = {
    "grouped": (8, 4, True),
    "one key head": (8, 1, False),
    "two key heads": (8, 2, False),
    "three key heads": (12, 3, False),
}


@pytest.mark.multidevice
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if "two" in n else []) for n in HEADS]
)
def test_shards_stay_local_and_give_what_one_device_gives(name):
    num_heads, num_kv_heads, cut = HEADS[name]
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    sizes = (2, 24, 24, num_heads, num_kv_heads, 16, 16)
    operands, ids = make_operands(sizes, "bfloat16"), make_segments(2, 24, layout="runs")
    by_heads = NamedSharding(mesh, jax.P("data", None, "tensor"))
    keys = by_heads if cut else NamedSharding(mesh, jax.P("data"))
    places = (by_heads, keys, keys, by_heads, NamedSharding(mesh, jax.P("data")))

    def run(q, k, v, grad, ids):
        given = {"packed": "runs", "backend": "cudnn", "causal": True}
        return with_gradients(q, k, v, grad, ids, None, **given)

    on_mesh = jax.device_put((*operands, ids), places)
    compiled = quick_jit(run).lower(*on_mesh).compile()
    text = compiled.as_text()
    assert "all-gather" not in text
    # Only what every device holds has a gradient that is summed.
    assert ("all-reduce" in text) != cut
    expected = quick_jit(lambda *x: expected_with_gradients(*x, None, causal=True))
    check(compiled(*on_mesh), expected(*operands, ids), "bfloat16")


def test_mapping_over_rows_is_the_same_as_more_rows():
    ids = np.stack([make_segments(2, 24, layout="runs", seed=seed) for seed in range(3)])
    operands = [np.stack([x, -x, x * 2]) for x in map(np.asarray, make_operands(SIZES, "bfloat16"))]
    given = {"packed": "runs", "backend": "cudnn", "causal": True}

    def run(q, k, v, grad, ids):
        return with_gradients(q, k, v, grad, ids, None, **given)

    mapped = quick_jit(jax.vmap(run))(*operands, ids)
    flat = quick_jit(run)(*[x.reshape(-1, *x.shape[2:]) for x in (*operands, ids)])
    for x, y in zip(mapped, flat, strict=True):
        assert jnp.array_equal(x.reshape(y.shape), y)


def test_a_manual_mesh_calls_the_kernel_on_its_shards():
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    operands, ids = make_operands((2, 24, 24, 8, 4, 16, 16), "bfloat16"), None
    spec = jax.P("data", None, "tensor")
    given = {"backend": "cudnn", "causal": True}

    @quick_jit
    @jax.shard_map(mesh=mesh, in_specs=(spec,) * 4, out_specs=(spec,) * 4)
    def run(q, k, v, grad):
        return with_gradients(q, k, v, grad, None, None, **given)

    expected = quick_jit(lambda *x: expected_with_gradients(*x, ids, None, causal=True))
    check(run(*operands), expected(*operands), "bfloat16")


RUNS = make_case(64, 64, 4, 2, 64, 64, hardware=H200, segments="runs", max_segments=8)
REFUSED = {
    r"takes bfloat16 or float16": replace(RUNS, dtype="float32"),
    r"need 264 channels; cuDNN takes up to 256": replace(RUNS, head_dim=260),
    r"H=192, V=128 need 192 channels; cuDNN takes up to 128 on sm80": replace(
        RUNS, head_dim=192, value_dim=128, hardware=hardware.find("NVIDIA A100")
    ),
    r"one query and one key": replace(RUNS, num_queries=1, num_keys=1),
    r"would leak from one document into another": replace(RUNS, segments="any"),
    r"packed documents need": replace(RUNS, hardware=hardware.find("NVIDIA A100")),
    r"TPU v5p is v5p": replace(RUNS, hardware=hardware.find("TPU v5p")),
    r"cpu is host": replace(RUNS, hardware=hardware.CPU),
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_case_that_cudnn_cannot_serve_is_refused_with_its_reason(words):
    reason = OP.backend("cudnn").refuses(REFUSED[words])
    assert reason is not None
    assert words in reason
    assert OP.choose(REFUSED[words]).name == "xla"


def runs_by_hand(row):
    """Lengths of the documents of a row, or None where it is not rising runs, then padding."""
    real = [number for number in row if number > 0]
    if row[: len(real)] != real or real != sorted(real):
        return None
    return [real.count(number) for number in sorted(set(real))]


find_three = jax.jit(lambda ids: find_runs(ids, max_segments=3))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(
        st.one_of(
            st.lists(st.integers(0, 4), min_size=7, max_size=7),
            st.lists(st.integers(1, 4), min_size=7, max_size=7).map(sorted),
            st.integers(0, 7).map(lambda n: sorted([1, 1, 2, 3, 3, 3, 5][:n]) + [0] * (7 - n)),
        ),
        min_size=2,
        max_size=2,
    )
)
def test_runs_are_complete_exactly_where_they_say_all_of_a_row(rows):
    found = find_three(jnp.asarray(rows, jnp.int32))
    by_hand = [runs_by_hand(row) for row in rows]
    fits = [lengths is not None and len(lengths) <= 3 for lengths in by_hand]
    assert bool(found.complete) == all(fits)
    for index, lengths in enumerate(by_hand):
        if not fits[index]:
            continue
        missing = [-1] * (3 - len(lengths))
        assert found.lengths[index].tolist() == lengths + missing
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        assert found.starts[index].tolist() == starts + missing


@pytest.mark.parametrize(
    ("rows", "whole"),
    [
        ([[1, 1, 1], [7, 7, 7]], True),
        ([[1, 1, 1], [1, 1, 2]], False),
        ([[1, 1, 1], [1, 1, 0]], False),
        ([[1, 1, 1], [0, 0, 0]], False),
        ([[0, 1, 1], [1, 1, 1]], False),
        ([[1, 2, 1], [1, 1, 1]], False),
    ],
)
def test_rows_are_whole_where_each_is_one_document_without_padding(rows, whole):
    assert bool(jax.jit(are_whole)(jnp.array(rows, jnp.int32))) == whole
