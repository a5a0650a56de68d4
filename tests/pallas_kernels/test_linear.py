"""The drop-in product of linear layers: values and gradients of each precision."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hardware
from pallas_kernels.formats import ACTIVATION, WEIGHT
from pallas_kernels.linear import (
    PRECISIONS,
    linear,
    linear_of_quantized,
    linears_of_quantized,
    widened_linear,
)
from pallas_kernels.quantize import quantize
from tests.pallas_kernels.operands import dequantized, quantized

# Relative error of a result against float64. float32: order of sums. bfloat16: two operands
# rounded to 8 bits. fp8: two operands rounded to 4 bits, errors of random sign; or one of them.
RELATIVE_ERROR = {"float32": 1e-6, "bfloat16": 5e-3, "fp8": 5e-2, "fp8_weights": 4e-2}


def operands(*shape, n=24, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    x, grad = rng.standard_normal(shape), rng.standard_normal((*shape[:-1], n))
    w = rng.standard_normal((shape[-1], n)) / shape[-1] ** 0.5
    return jnp.asarray(x, dtype), jnp.asarray(w, jnp.float32), jnp.asarray(grad, dtype)


@partial(jax.jit, static_argnames="precision")
def with_gradients(x, w, grad, *, precision):
    """The product and the gradients of x and w, as one program."""
    out, vjp = jax.vjp(lambda x, w: linear(x, w, precision=precision), x, w)
    return out, *vjp(grad)


def relative_error(found, expected):
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", [(40, 130), (2, 3, 13), (129,), (1, 1)], ids=str)
def test_values_and_gradients_are_those_of_a_matrix_product(shape, precision):
    x, w, grad = operands(*shape)
    out, grad_x, grad_w = with_gradients(x, w, grad, precision=precision)
    rows, grad_rows = (np.asarray(t, np.float64).reshape(-1, t.shape[-1]) for t in (x, grad))
    # One row is one draw of rounding errors, not their average.
    allowed = RELATIVE_ERROR[precision] * (2 if len(rows) < 4 else 1)
    expected_w = np.asarray(w, np.float64)
    assert relative_error(out, (rows @ expected_w).reshape(out.shape)) < allowed
    assert relative_error(grad_x, (grad_rows @ expected_w.T).reshape(x.shape)) < allowed
    assert relative_error(grad_w, rows.T @ grad_rows) < allowed


def test_weights_in_8_bits_alone_are_the_product_of_the_rounded_weights():
    x, w, grad = operands(20, 300)
    out, grad_x, grad_w = with_gradients(x, w, grad, precision="fp8_weights")
    w_back = dequantized(quantized(w, format=WEIGHT))
    assert relative_error(out, np.asarray(x, np.float64) @ w_back) < 1e-6
    assert relative_error(grad_x, np.asarray(grad, np.float64) @ w_back.T) < 1e-6
    # The gradient passes the rounding by.
    assert relative_error(grad_w, np.asarray(x, np.float64).T @ np.asarray(grad)) < 1e-6


@pytest.mark.parametrize("num_rows", [3, 200])
def test_weights_kept_in_8_bits_are_widened_for_few_rows_and_for_many(num_rows):
    x, w, _ = operands(2, num_rows, 300)
    kept = quantize(w, format=WEIGHT).mT
    expected = linear(x, w, precision="fp8_weights")
    assert relative_error(widened_linear(x, kept), expected) < 1e-6


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_result_has_the_dtype_of_the_input_and_gradients_that_of_their_operand(precision):
    x, w, grad = operands(8, 32, dtype=jnp.bfloat16)
    out, grad_x, grad_w = jax.eval_shape(partial(with_gradients, precision=precision), x, w, grad)
    assert (out.dtype, grad_x.dtype, grad_w.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_mapping_over_experts_equals_one_call_for_each(precision):
    x, w, _ = operands(3, 5, 40)
    stack = np.stack([w, 2 * w, -w])
    run = partial(linear, precision=precision)
    one = jax.jit(run)
    each = np.stack([one(x[i], stack[i]) for i in range(3)])
    assert relative_error(jax.jit(jax.vmap(run))(x, stack), each) < 1e-6


@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_tokens_give_an_empty_result_and_a_zero_weight_gradient(precision):
    x, w, grad = operands(0, 40)
    out, _, grad_w = with_gradients(x, w, grad, precision=precision)
    assert out.shape == (0, 24)
    np.testing.assert_array_equal(grad_w, np.zeros_like(w))


def test_fp8_is_the_product_of_the_quantised_operands_forward_and_for_the_input():
    x, w, grad = operands(20, 300)
    out, grad_x, _ = with_gradients(x, w, grad, precision="fp8")
    x_back, grad_back = (dequantized(quantized(t, format=ACTIVATION)) for t in (x, grad))
    w_back = dequantized(quantized(w, format=WEIGHT))
    assert relative_error(out, x_back @ w_back) < 1e-6
    assert relative_error(grad_x, grad_back @ w_back.T) < 1e-6


def test_fp8_quantises_both_operands_of_the_weight_gradient_along_tokens():
    x, w, grad = operands(300, 20)
    _, _, grad_w = with_gradients(x, w, grad, precision="fp8")
    x_back, grad_back = (
        dequantized(quantized(np.asarray(t).T, format=ACTIVATION)) for t in (x, grad)
    )
    assert relative_error(grad_w, x_back @ grad_back.T) < 1e-6


@pytest.mark.multidevice
@pytest.mark.parametrize(("num_devices", "left_in"), [(1, "bf16"), (2, "f32")])
def test_only_sums_that_one_device_has_are_rounded_by_the_product_itself(num_devices, left_in):
    x, w, grad = operands(8, 32, dtype=jnp.bfloat16)
    w = jnp.asarray(w, jnp.bfloat16)

    def run(x, w, grad):
        out, back = jax.vjp(partial(linear, precision="bfloat16"), x, w)
        return out, back(grad)

    with jax.set_mesh(jax.make_mesh((num_devices,), ("data",), (jax.sharding.AxisType.Auto,))):
        text = str(jax.make_jaxpr(run)(x, w, jnp.asarray(grad, jnp.bfloat16)))
    assert re.findall(r":(\w+)\[[\d,]*\] = dot_general", text) == [left_in] * 3


def test_weights_that_were_quantised_before_give_the_same_bits_and_gradients():
    x, w, grad = operands(20, 300, dtype=jnp.bfloat16)

    @jax.jit
    def before(x, w, grad):
        w_q = quantize(w, format=WEIGHT)
        out, vjp = jax.vjp(lambda x, w: linear_of_quantized(x, w, w_q), x, w)
        return out, *vjp(grad)

    found, expected = before(x, w, grad), with_gradients(x, w, grad, precision="fp8")
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_products_of_one_input_are_those_of_each_weight():
    x, _, _ = operands(20, 300)
    rng = np.random.default_rng(1)
    w = tuple(jnp.asarray(rng.normal(size=(x.shape[-1], n)) / 16, jnp.float32) for n in (40, 136))
    w_q = tuple(quantize(each, format=WEIGHT) for each in w)
    grads = tuple(jnp.asarray(rng.normal(size=(*x.shape[:-1], n)), jnp.float32) for n in (40, 136))
    together = lambda x, w: linears_of_quantized(x, w, w_q)
    apart = lambda x, w: tuple(map(partial(linear_of_quantized, x), w, w_q))
    found, expected = (
        jax.jit(lambda x, w, run=run: (run(x, w), jax.vjp(run, x, w)[1](grads)))(x, w)
        for run in (together, apart)
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_an_unknown_precision_is_refused_with_the_known_ones():
    x, w, _ = operands(2, 4)
    with pytest.raises(Exception, match="fp4"):
        linear(x, w, precision="fp4")


@pytest.mark.multidevice
@pytest.mark.parametrize("precision", PRECISIONS)
def test_sharded_operands_give_the_same_values_and_gradients(precision):
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = lambda *names: jax.NamedSharding(mesh, jax.P(*names))
    x, w, grad = operands(8, 16, 512, n=512)
    run = partial(with_gradients, precision=precision)
    places = (spec("data"), spec(None, "tensor"), spec("data", None, "tensor"))
    sharded = [jax.device_put(t, place) for t, place in zip((x, w, grad), places, strict=True)]
    for found, expected in zip(run(*sharded), run(x, w, grad), strict=True):
        assert relative_error(found, expected) < (1e-2 if precision == "bfloat16" else 1e-5)


@pytest.mark.multidevice
@pytest.mark.parametrize("precision", PRECISIONS)
def test_inside_a_shard_map_the_gradient_of_a_shared_weight_is_summed(precision):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x, w, _ = operands(8, 40)
    loss = lambda w, x: (linear(x, w, precision=precision) ** 2).sum()

    def local(w, x):
        return jax.lax.psum(loss(w, x), "data"), jax.grad(loss)(w, x)

    run = jax.shard_map(
        local, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=(jax.P(), jax.P())
    )
    total, grad = jax.jit(run)(w, x)
    expected, expected_grad = jax.jit(jax.value_and_grad(loss))(w, x)
    assert relative_error(total, expected) < 1e-4
    assert relative_error(grad, expected_grad) < RELATIVE_ERROR[precision]


@pytest.mark.multidevice
def test_inside_a_shard_map_the_hopper_kernels_lower_on_the_shards():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x, w, _ = operands(1024, 256, n=128, dtype=jnp.bfloat16)
    loss = lambda w, x: (linear(x, w, precision="fp8") ** 2).sum()
    run = jax.shard_map(
        jax.grad(loss), mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P()
    )
    with hardware.target("NVIDIA H200"):
        lowered = jax.jit(run).trace(w, x).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@mosaic_gpu_v2(") == 2
