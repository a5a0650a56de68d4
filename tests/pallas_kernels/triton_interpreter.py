"""Triton's own interpreter, completed: what it lacks, and a stand-in for JAX's call to a kernel.

It runs the kernels' source with numpy. It has no product of bfloat16 and truncates where hardware
rounds; what stands here supplies both.
"""

import importlib
import json
import os
import subprocess
import sys
import types

import jax
import ml_dtypes
import numpy as np

from pallas_kernels import triton


def written_by(module):
    """What `write_interpreted` of a module of this package prints, run in a process of its own.

    Triton reads once whether it interprets.
    """
    code = f"from tests.pallas_kernels import {module} as t; t.write_interpreted()"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    child = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


class HostTensor:
    """A numpy array with the methods of a tensor that the interpreter calls; no copies."""

    def __init__(self, array):
        self.array, self.dtype = array, array.dtype

    def data_ptr(self):
        return self.array.ctypes.data

    def new_empty(self, *_, **__):
        return HostTensor(self.array)

    def set_(self, storage, *_):
        self.array = storage.array

    def copy_(self, other):
        assert other.array is self.array

    untyped_storage = cpu = lambda self: self
    storage_offset = size = stride = lambda self: 0


class Scalars(np.ndarray):
    """Arrays of one element that are numbers, as the interpreter expects of numpy."""

    def __int__(self):
        return int(self.item())


def complete_interpreter(interpreter, tl):
    """Give the interpreter products of bfloat16, and casts that round as hardware does."""
    check_handle = interpreter.TensorHandle.__post_init__
    dot, cast = interpreter.InterpreterBuilder.create_dot, interpreter.InterpreterBuilder.cast_impl
    narrow_types = {
        tl.bfloat16: ml_dtypes.bfloat16,
        tl.float8e4nv: ml_dtypes.float8_e4m3fn,
        tl.float8e5: ml_dtypes.float8_e5m2,
    }

    def handle_of_scalars(self):
        self.data = np.asarray(self.data).view(Scalars)
        check_handle(self)

    def widened(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        values = np.asarray(x.data).view(ml_dtypes.bfloat16).astype(np.float32)
        return interpreter.TensorHandle(values, tl.float32)

    def rounding_cast(self, x, target, *_):
        given, wanted = (narrow_types.get(t.scalar) for t in (x.dtype, target))
        if given is None and wanted is None:
            return cast(self, x, target)
        values = np.asarray(x.data)
        values = (values if given is None else values.view(given)).astype(np.float32)
        if wanted is None:
            return cast(self, interpreter.TensorHandle(values, tl.float32), target)
        if wanted is not ml_dtypes.bfloat16:
            # A cast to 8 bits takes the largest element for what is larger; NaN stays.
            largest = float(ml_dtypes.finfo(wanted).max)
            values = values.clip(-largest, largest)
        rounded = values.astype(wanted)
        return interpreter.TensorHandle(rounded.view(f"u{rounded.itemsize}"), target.scalar)

    interpreter.TensorHandle.__post_init__ = handle_of_scalars
    builder = interpreter.InterpreterBuilder
    builder.create_dot = lambda self, a, b, *rest: dot(self, widened(a), widened(b), *rest)
    builder.create_fp_trunc = builder.create_fp_to_fp = builder.cast_impl = rounding_cast


def interpreted_call(*arrays, kernel, out_shape, grid, **options):
    """Stand in for `triton_call`; results start as bytes of ones, which are NaN."""
    for name in ("name", "num_warps", "num_stages", "compute_capability"):
        del options[name]
    shapes, tree = jax.tree.flatten(out_shape)

    def on_host(*arrays):
        results = [np.empty(shape.shape, shape.dtype) for shape in shapes]
        for result in results:
            result.view(np.uint8).fill(0xFF)
        body = kernel.rewrite()
        # The rewriting puts quotes around annotations that are strings already.
        body.__annotations__ = {n: word.strip("'") for n, word in body.__annotations__.items()}
        kernel[grid](*map(HostTensor, [np.array(a) for a in arrays] + results), **options)
        return results

    return jax.tree.unflatten(tree, jax.pure_callback(on_host, shapes, *arrays))


def interpret_kernels():
    """Let every call of a Triton kernel in this process run in the interpreter."""
    tl = importlib.import_module("triton.language")
    complete_interpreter(importlib.import_module("triton.runtime.interpreter"), tl)
    sys.modules["jax_triton"] = types.SimpleNamespace(triton_call=interpreted_call)
    triton.lower_to_typed_calls = lambda: None
