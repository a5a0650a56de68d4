"""Beside the adapter: arithmetic on the registers of one thread, which Pallas cannot say.

What a thread does is written in the compiler's own operations or in assembly. The Mosaic GPU
interpreter knows neither, so each use has a plain form for it.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import jax
import numpy as np
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf, vector

from pallas_kernels import mosaic

WORD_BITS = 32


def on_registers(
    work: Callable[..., Any],
    *operands: jax.Array,
    layouts: Sequence[Any],
    out: jax.ShapeDtypeStruct,
    out_layout: Any,
) -> jax.Array:
    """Return what `work` makes of the operands' registers, as an array of shape and type `out`.

    Args:
        work: takes each operand as a thread holds it (`.registers`, an array of values of the
            compiler), and returns the result in the same form.
        layouts: how the threads share each operand.
    """
    plgpu = mosaic.plgpu
    inlined = plgpu.inline_mgpu(
        arg_types=tuple(layouts),
        return_type=plgpu.ShapeDtypeStruct(out.shape, out.dtype, out_layout),
    )
    return inlined(lambda _, *held: work(*held))(*operands)


def with_registers(like: Any, values: Sequence[Any]) -> Any:
    """`like` as a thread holds it, with these registers in place of its own."""
    registers = np.empty_like(like.registers)
    for index, value in zip(np.ndindex(*registers.shape), values, strict=True):
        registers[index] = value
    return type(like)(_registers=registers, _layout=like.layout, _is_signed=None)


def word_type() -> ir.Type:
    """The compiler's type of a register of 32 bits."""
    return ir.IntegerType.get_signless(WORD_BITS)


def integers(length: int, bits: int) -> ir.Type:
    """The compiler's type of `length` integers in a row."""
    return ir.VectorType.get((length,), ir.IntegerType.get_signless(bits))


def assemble(text: str, operands: Sequence[Any], constraints: str, num_results: int) -> list[Any]:
    """Results, of 32 bits each, of some lines of assembly."""
    word = word_type()
    if num_results == 1:
        return [llvm.inline_asm(word, list(operands), text, constraints)]
    words = llvm.StructType.get_literal([word] * num_results)
    found = llvm.inline_asm(words, list(operands), text, constraints)
    return [llvm.extractvalue(word, found, [i]) for i in range(num_results)]


def rescaled(total: jax.Array, factors: jax.Array) -> jax.Array:
    """`total`, an accumulator, times one factor a row; a warp whose factors are all 1 skips it.

    Args:
        total: in the layout `mosaic.ACCUMULATOR`.
        factors: one a row, in the layout `mosaic.PER_ROW`.
    """
    if mosaic.is_interpreting():
        return total * lax.broadcast_in_dim(factors, total.shape, [0])
    return on_registers(
        _rescale,
        total,
        factors,
        layouts=(mosaic.ACCUMULATOR, mosaic.PER_ROW),
        out=jax.ShapeDtypeStruct(total.shape, total.dtype),
        out_layout=mosaic.ACCUMULATOR,
    )


def _rescale(total: Any, factors: Any) -> Any:
    """What one thread does: with its warp, ask whether any factor differs from 1."""
    f32 = ir.F32Type.get()
    one = arith.constant(f32, ir.FloatAttr.get(f32, 1.0))
    differs = [
        arith.cmpf(arith.CmpFPredicate.UNE, vector.extract(register, [], [0]), one)
        for register in factors.registers.flat
    ]
    lanes = arith.constant(word_type(), ir.IntegerAttr.get(word_type(), -1))
    some = nvvm.vote_sync(lanes, reduce(arith.ori, differs), "any")
    kept = list(total.registers.flat)
    branch: Any = scf.IfOp(some, [register.type for register in kept], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        scaled = total * factors.broadcast_in_dim(total.shape, (0,), total.layout)
        scf.yield_(list(scaled.registers.flat))
    with ir.InsertionPoint(branch.else_block):
        scf.yield_(kept)
    return with_registers(total, list(branch.results))
