"""What rounds to 8 bits, in Triton and without a GPU: numbers by interpreter, machine code."""

import json
import sys
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hardware, triton
from pallas_kernels.formats import ACTIVATION
from pallas_kernels.quantize import (
    quantize,
    quantize_both,
    quantize_squares,
    requantize_transposed,
)
from tests.pallas_kernels.operands import (
    dequantized,
    squares_apart,
    steps_apart,
    tiles_by_numpy,
    varied,
)
from tests.pallas_kernels.triton_interpreter import interpret_kernels, written_by
from tests.pallas_kernels.triton_machine_code import assemble, calls_of

MISSING = triton.missing()
needs_triton = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

# Rows, columns, input: whole blocks, and edges in both dims.
QUANTIZED = {
    "whole blocks": (128, 256, "bfloat16"),
    "odd edges": (200, 130, "float32"),
    "one column": (300, 1, "bfloat16"),
}

# Weights, and what they are rounded to first: edges in both dims of a stack, whole blocks.
SQUARES = {
    "squares, odd edges": ((2, 200, 130), "bfloat16"),
    "squares, whole blocks": ((128, 256), "float32"),
}


def write_interpreted():
    """The child process: every case through its op, the differences as one line of JSON."""
    interpret_kernels()
    found = {}
    with hardware.target("NVIDIA H200"):
        for name, (rows, columns, dtype) in QUANTIZED.items():
            found[name] = compare_quantized(rows, columns, dtype)
        for name, (shape, dtype) in SQUARES.items():
            apart = squares_apart(shape, dtype)
            found[name] = float((apart > 0).mean()), float(apart.max())
    sys.stdout.write(json.dumps(found))


def compare_quantized(rows, columns, dtype):
    """How many elements of each result differ from numpy's, and the largest step apart."""
    x = np.array(varied((rows, columns), seed=2), np.float32)
    x[0, :3] = (np.nan, np.inf, -np.inf)[:columns]
    x[-1, :] = 0.0
    x = jnp.asarray(x, dtype)
    given = quantize(x, format=ACTIVATION, backend="xla")
    found = (
        quantize(x, format=ACTIVATION, backend="jax_triton"),
        *quantize_both(x, format=ACTIVATION, backend="jax_triton"),
        requantize_transposed(given, backend="jax_triton"),
    )
    plain, turned = tiles_by_numpy(x), tiles_by_numpy(x.T)
    expected = (plain, plain, turned, tiles_by_numpy(dequantized(given).T))
    apart = [steps_apart(q, *tiles) for q, tiles in zip(found, expected, strict=True)]
    return max((float((one > 0).mean()), float(one.max())) for one in apart)


@pytest.fixture(scope="module")
def interpreted():
    return written_by("test_rounding_triton")


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUANTIZED, *SQUARES])
def test_the_sources_quantise_as_the_reference_does(name, interpreted):
    share, apart = interpreted[name]
    # A quotient at the middle between two elements may go either way: the interpreter rounds a
    # fused product and sum twice.
    assert share <= 1e-3
    assert apart <= 1


@needs_triton
@pytest.mark.parametrize("kind", ["NVIDIA H200", "NVIDIA B200"])
@pytest.mark.parametrize("shape", [(256, 384), (201, 130)], ids=str)
def test_quantising_is_one_kernel_each_without_spills(shape, kind, tmp_path):
    def run(x):
        plain = quantize(x, format=ACTIVATION)
        return plain, quantize_both(x, format=ACTIVATION), requantize_transposed(plain)

    calls = calls_of(run, (shape, jnp.bfloat16), kind=kind)
    assert len(calls) == 3
    for i, call in enumerate(calls):
        assert not assemble(call, tmp_path / f"{i}.ptx", kind=kind)


@needs_triton
@pytest.mark.parametrize("kind", ["NVIDIA H200", "NVIDIA B200"])
@pytest.mark.parametrize("shape", [(2, 256, 384), (201, 130)], ids=str)
def test_squares_and_their_transpose_are_one_kernel_without_spills(shape, kind, tmp_path):
    run = partial(quantize_squares, dtype=jnp.bfloat16)
    (call,) = calls_of(run, (shape, jnp.float32), kind=kind)
    assert not assemble(call, tmp_path / "kernel.ptx", kind=kind)
