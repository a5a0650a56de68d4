"""A feed-forward in 8 bits is one call where a kernel makes what lies between its products."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import pytest

from jaxfound.config.precision import PrecisionConfig, PrecisionRule
from jaxfound.models.build import Frame
from jaxfound.models.execution import Execution
from jaxfound.models.layers import linear
from jaxfound.models.quantized_once import quantized_once, with_quantized
from pallas_kernels import hardware, triton
from tests.models.tiny import jit, model_config, relative_error, tokens_of, weights_of

MISSING = triton.missing()
EVERYWHERE = ("layers.*",)


@cache
def lowered(patterns, *, remat="none", kind="NVIDIA H200"):
    """The program of a gradient with one layer, for a device that need not be there."""
    rules = tuple(PrecisionRule(pattern=pattern, format="fp8") for pattern in patterns)
    precision = PrecisionConfig(compute="bfloat16", rules=rules)
    frame = Frame(
        model_config("gqa", num_layers=1), execution=Execution(precision=precision, remat=remat)
    )

    def loss(params, buffers, tokens):
        model = frame.bind(with_quantized(params, quantized_once(frame, params)), buffers)
        return model.hidden(tokens, model.row(tokens, None, None)).final.sum()

    tokens = jax.ShapeDtypeStruct((4, 64), jnp.int32)
    # As a step has it: without a mesh nobody knows that one device has all of an array.
    with hardware.target(kind), jax.set_mesh(jax.make_mesh((1,), ("data",))):
        traced = jax.jit(jax.grad(loss)).trace(*frame.shapes(), tokens)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def matrices_taken(text):
    """How many matrices each kernel that rounds takes: one, or two or three of a feed-forward."""
    return [
        len(operands.split(","))
        for operands in re.findall(r"@triton_kernel_call_ffi\(([^)]*)", text)
    ]


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_what_lies_between_the_products_is_made_and_rounded_by_three_kernels():
    taken = matrices_taken(lowered(EVERYWHERE))
    # Gate and up, or gate and a gradient; gate, up and a gradient.
    assert (taken.count(2), taken.count(3)) == (2, 1)
    assert taken.count(1) > 6


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize(
    ("patterns", "remat"),
    [(EVERYWHERE, "full"), (("layers.mixer.*", "layers.ffn.gate", "layers.ffn.down"), "none")],
    ids=["computed again", "up in another format"],
)
def test_else_each_product_rounds_its_own_operands(patterns, remat):
    taken = matrices_taken(lowered(patterns, remat=remat))
    assert set(taken) == {1}


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_gradients_of_what_several_layers_read_are_one_sum():
    text = lowered(EVERYWHERE)
    calls = re.findall(r"@mosaic_gpu_v2\(([^)]*)", text)
    # Elements and scales of two operands, and three arrays for each product that is added.
    assert sorted({len(operands.split(",")) for operands in calls}) == [4, 7, 10]
    calls = re.findall(r"@mosaic_gpu_v2\(([^)]*)", lowered(EVERYWHERE, remat="full"))
    assert {len(operands.split(",")) for operands in calls} == {4}


@pytest.mark.parametrize("model", ["gqa", pytest.param("mla_moe_yarn", marks=pytest.mark.slow)])
def test_products_of_one_call_are_those_of_each_layer(model, monkeypatch):
    rule = PrecisionRule(pattern="layers.mixer.*", format="fp8")
    precision = PrecisionConfig(compute="float32", rules=(rule,))
    execution = Execution(precision=precision, remat="none")
    frame = Frame(model_config(model, num_layers=2), execution=execution)
    params, buffers = weights_of(frame)
    tokens = jnp.asarray(tokens_of(2, 8))

    def loss(params):
        model = frame.bind(with_quantized(params, quantized_once(frame, params)), buffers)
        return jnp.sin(model.hidden(tokens, model.row(tokens, None, None)).final).sum()

    apart = jit(jax.grad(loss))(params)
    asked = []
    monkeypatch.setattr(linear, "adds_products", lambda *sizes: not asked.append(sizes))
    together = jit(jax.grad(lambda params: loss(params)))(params)
    assert asked
    for path, grad in together.items():
        assert relative_error(grad, apart[path]) < 1e-4, path


def test_without_a_kernel_xla_rounds():
    assert matrices_taken(lowered(EVERYWHERE, kind="NVIDIA A100-SXM4-80GB")) == []
