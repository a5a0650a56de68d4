"""SwiGLU and its gradients, rounded to 8 bits both ways by the kernel that makes them."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hardware, triton
from pallas_kernels.formats import WEIGHT
from pallas_kernels.linear import Swiglu, linear_of_quantized, swiglu_of_quantized
from pallas_kernels.quantize import quantize, serves_swiglu, swiglu_both, swiglu_gradients_both
from pallas_kernels.quantize.reference import swiglu, swiglu_gradients
from tests.pallas_kernels.operands import dequantized, varied
from tests.pallas_kernels.test_fp8_on_gpu import poison_memory
from tests.pallas_kernels.triton_interpreter import interpret_kernels, written_by
from tests.pallas_kernels.triton_machine_code import assemble, calls_of

MISSING = triton.missing()
needs_triton = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
# Half a step, and what an exponential and some products in float32 are off by.
NEAREST = 1 + 1e-3
SHAPES = {"whole blocks": (128, 256), "odd edges": (200, 130)}


def operands(shape):
    """Gate, up and the gradient of their product; gates of every size, also where sigmoid is 0."""
    gate, up, grad = (varied(shape, seed=seed) for seed in range(3))
    return tuple(jnp.asarray(x, jnp.bfloat16) for x in (gate, up, grad))


def by_numpy(gate, up, grad):
    """The product and both gradients in float64."""
    g, u, d = (np.asarray(x, np.float64) for x in (gate, up, grad))
    with np.errstate(over="ignore"):
        share = 1 / (1 + np.exp(-g))
    matrices = g * share * u, d * u * share * (1 + g * (1 - share)), d * g * share
    return list(matrices)


def worst(shape, *, backend):
    """The largest error of an element, in halves of the step to the next one in 8 bits."""
    gate, up, grad = operands(shape)
    product, of_gate, of_up = by_numpy(gate, up, grad)
    gradients = swiglu_gradients_both(gate, up, grad, backend=backend)
    found = (*swiglu_both(gate, up, backend=backend), *gradients[0], *gradients[1])
    expected = [m for matrix in (product, of_gate, of_up) for m in (matrix, matrix.T)]
    return max(in_half_steps(q, m) for q, m in zip(found, expected, strict=True))


def in_half_steps(q, exact):
    """How far a matrix is from the exact one. Of 8 bits 3 are a fraction, 2^-9 the least step."""
    scales = np.repeat(np.asarray(q.scales, np.float64), 128, axis=1)[:, : exact.shape[1]]
    half = np.maximum(2.0 ** np.floor(np.log2(np.abs(exact) / scales + 1e-30)) / 16, 2.0**-10)
    assert np.abs(np.asarray(q.scales)).min() > 0
    return float((np.abs(dequantized(q) - exact) / (half * scales)).max())


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_what_xla_makes_is_the_nearest_in_8_bits(shape):
    assert worst(shape, backend="xla") < NEAREST


def test_gradients_are_those_that_jax_derives():
    gate, up, grad = (x.astype(jnp.float32) for x in operands((16, 24)))
    _, pull = jax.vjp(lambda g, u: jax.nn.silu(g) * u, gate, up)
    for found, expected in zip(swiglu_gradients(gate, up, grad), pull(grad), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(swiglu(gate, up)[0], jax.nn.silu(gate) * up, rtol=1e-6)


def write_interpreted():
    """The child process: how far the kernels are from numpy, as a line of JSON."""
    interpret_kernels()
    with hardware.target("NVIDIA H200"):
        found = [worst(shape, backend="jax_triton") for shape in SHAPES.values()]
    sys.stdout.write(json.dumps(found))


@needs_triton
@pytest.mark.slow
def test_what_the_sources_make_is_the_nearest_in_8_bits():
    assert max(written_by("test_swiglu_rounding")) < NEAREST


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES.values(), (1024, 6912)], ids=str)
def test_what_the_card_makes_is_the_nearest_in_8_bits(shape):
    poison_memory()
    # Its exponential and root are approximate: a sigmoid is off by up to 2^-20 of itself, and where
    # SiLU's slope is zero that is all there is, beside steps of 2^-9 of a line's scale.
    assert worst(shape, backend="jax_triton") < 1 + 4e-2


@needs_triton
@pytest.mark.parametrize("kind", ["NVIDIA H200", "NVIDIA B200"])
@pytest.mark.parametrize("shape", [(256, 384), (201, 130)], ids=str)
def test_each_result_is_one_kernel_without_spills(shape, kind, tmp_path):
    one = (shape, jnp.bfloat16)
    calls = [*calls_of(swiglu_both, one, one, kind=kind)]
    calls += calls_of(swiglu_gradients_both, one, one, one, kind=kind)
    assert len(calls) == 3
    for i, call in enumerate(calls):
        assert not assemble(call, tmp_path / f"{i}.ptx", kind=kind)


@needs_triton
def test_a_kernel_serves_where_it_is_worth_one():
    with hardware.target("NVIDIA H200"):
        assert serves_swiglu(4096, 6912)
        assert not serves_swiglu(64, 6912)
    assert not serves_swiglu(4096, 6912)


def test_a_feed_forward_in_one_call_is_three_products_and_what_lies_between():
    rng = np.random.default_rng(0)
    shapes = Swiglu((96, 160), (96, 160), (160, 96))
    w = Swiglu(*(jnp.asarray(rng.normal(size=s) / s[0] ** 0.5, jnp.float32) for s in shapes))
    x, grad = (jnp.asarray(rng.normal(size=(2, 70, 96)), jnp.float32) for _ in range(2))
    w_q = Swiglu(*(quantize(each, format=WEIGHT) for each in w))

    def apart(x, w):
        gate, up = (linear_of_quantized(x, w[i], w_q[i]) for i in range(2))
        return linear_of_quantized(jax.nn.silu(gate) * up, w.down, w_q.down)

    together = lambda x, w: swiglu_of_quantized(x, w, w_q)
    (expected, pull), (found, pull_found) = (
        jax.jit(lambda x, w, run=run: jax.vjp(run, x, w))(x, w) for run in (apart, together)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(jax.tree.leaves(pull_found(grad)), jax.tree.leaves(pull(grad)), strict=True):
        # An element at a tie may be rounded the other way.
        assert np.linalg.norm(a - b) < 2e-3 * np.linalg.norm(b)
