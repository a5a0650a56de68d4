"""Two backends of an op side by side: equal results are used, others are not, and are told."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.accuracy import cosine_difference
from pallas_kernels.mla_decode import mla_decode, xla
from pallas_kernels.mla_decode.op import OP
from pallas_kernels.registry import Backend, KernelError, replacing
from pallas_kernels.trial import comparing, difference, preferring

CANDIDATES = {
    "equal": lambda x: x * (1 + 1e-6),
    "wrong": lambda x: x * 1.01,
    "broken": lambda x: x * jnp.nan,
}


def candidate(change):
    def run(*args, **keys):
        return jax.tree.map(change, xla.run(*args, **keys))

    return run


@pytest.fixture(autouse=True)
def candidates(monkeypatch):
    """Three more backends, behind the one that serves everything: only asked by name."""
    more = [Backend(name, xla.refuses, candidate(change)) for name, change in CANDIDATES.items()]
    refusing = Backend("refusing", lambda case: "it never does", xla.run)
    op = replace(OP, backends=(*OP.backends, *more, refusing))
    monkeypatch.setattr("pallas_kernels.mla_decode.op.OP", op)


def decode():
    q = jax.random.normal(jax.random.key(0), (3, 1, 4, 24))
    cache = jax.random.normal(jax.random.key(1), (6, 4, 24))
    table = jnp.arange(6, dtype=jnp.int32).reshape(3, 2)
    # A finished row among them: it has no tokens, and the logarithm of no sum is infinite.
    lengths = jnp.asarray([5, 8, 0], jnp.int32)

    @jax.jit
    def run(q, cache, table, lengths):
        return mla_decode(
            q, cache, block_table=table, lengths=lengths, latent=16, sm_scale=0.2, split_len=8
        )

    return jax.block_until_ready(run(q, cache, table, lengths))


@pytest.mark.parametrize(
    ("name", "is_used"), [("equal", True), ("wrong", False), ("broken", False)]
)
def test_a_candidate_is_used_within_the_tolerance_alone(name, is_used):
    plain, told = decode(), []
    with replacing({"mla_decode": comparing(name, lambda *figures: told.append(figures))}):
        both = decode()
    jax.effects_barrier()
    ((_, row, within),) = told
    assert bool(within) is is_used
    assert (row <= 2e-6) == is_used or np.isnan(row)
    expected = jax.tree.map(CANDIDATES[name], plain) if is_used else plain
    jax.tree.map(np.testing.assert_array_equal, both, expected)
    # Behind it, programs are traced as before.
    jax.tree.map(np.testing.assert_array_equal, decode(), plain)


def test_a_preferred_backend_serves_alone():
    plain = decode()
    with replacing({"mla_decode": preferring("wrong")}):
        found = decode()
    np.testing.assert_array_equal(found.out, plain.out * 1.01)


def test_what_cannot_be_tried_is_refused():
    told = lambda *figures: None
    for name, reason in (("refusing", "it never does"), ("xla", "serves already"), ("no", "no")):
        with replacing({"mla_decode": comparing(name, told)}), pytest.raises(KernelError) as said:
            decode()
        assert reason in str(said.value)
    with pytest.raises(KernelError, match="no op 'attention'"), replacing({"attention": told}):
        pass


def test_the_difference_is_the_measure_of_the_field():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, 32)).astype(np.float32)
    y = x + 0.01 * rng.standard_normal((6, 32)).astype(np.float32)
    total, row, within = difference((jnp.asarray(x),), (jnp.asarray(y),), op="mla_decode")
    assert float(total) == pytest.approx(cosine_difference(x, y), rel=1e-3)
    rows = [cosine_difference(a, b) for a, b in zip(x, y, strict=True)]
    assert float(row) == pytest.approx(max(rows), rel=1e-3)
    assert not within
