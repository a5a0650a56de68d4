"""Time the masked grouped product: a decode step, where few tokens of each group's room count."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.accuracy import Difference, difference
from pallas_kernels.bench import peers
from pallas_kernels.bench.grouped_matmul import Operands, case_of, make_layout, ours, work_of
from pallas_kernels.bench.measure import Check, Part, Problem
from pallas_kernels.bench.timing import Candidate, compiled_candidate, untimed
from pallas_kernels.formats import ACTIVATION, BLOCK, WEIGHT
from pallas_kernels.grouped_matmul import masked_grouped_matmul, mosaic_gpu
from pallas_kernels.quantize import quantize

# G, tokens that count in each group, N, K; a group has room for 128.
Sizes = tuple[int, int, int, int]
SIZES: tuple[Sizes, ...] = ((8, 64, 4096, 7168), (32, 16, 4096, 7168))
ROOM = BLOCK
# The op as it chooses, the op told to take the grouped kernel, and that kernel alone on rows and
# weights that are quantised already.
CHOSEN_NAME, OP_NAME, KERNEL_NAME = "chosen_bfloat16", "mosaic_gpu_bfloat16", "mosaic_gpu_fp8"


def operand_bytes(sizes: Sizes) -> int:
    """About what the operands and torch's copies take."""
    num_groups, _, n, k = sizes
    return 8 * num_groups * (ROOM + n) * k


def named(sizes: Sizes) -> dict[str, int]:
    """The sizes under their letters; M is a group's."""
    return dict(zip("GMNK", sizes, strict=True))


def problem(sizes: Sizes) -> Problem:
    """The masked op in bfloat16, the kernel in 8-bit, and products over all the room."""
    num_groups, num_tokens, n, k = sizes
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (num_groups, ROOM, k), jnp.bfloat16)
    w = jax.random.normal(keys[1], (num_groups, k, n), jnp.bfloat16)
    group_sizes = jnp.full((num_groups,), num_tokens, jnp.int32)
    flat = (num_groups * num_tokens, n, k, num_groups)
    operands = _in_both(x, w)

    def masked(
        x: jax.Array, w: jax.Array, group_sizes: jax.Array, *, backend: str | None
    ) -> jax.Array:
        return masked_grouped_matmul(
            x, w, group_sizes=group_sizes, precision="bfloat16", backend=backend
        )

    def as_called(name: str, backend: str | None) -> Candidate:
        run = partial(masked, backend=backend)
        return compiled_candidate(name, run, [(x, w, group_sizes)])

    def batched() -> Candidate:
        module = peers.torch()
        tensors = peers.to_torch(x), peers.to_torch(w)
        return peers.torch_candidate("torch_bmm", lambda index: module.bmm(*tensors), tensors)

    builds: dict[str, Callable[[], Candidate]] = {
        CHOSEN_NAME: partial(as_called, CHOSEN_NAME, None),
        OP_NAME: partial(as_called, OP_NAME, "mosaic_gpu"),
        "xla_batched": lambda: compiled_candidate("xla_batched", jnp.matmul, [(x, w)]),
        "torch_bmm": batched,
    }
    wide = work_of(flat, "bfloat16")
    parts = [
        Part(name, wide, build, against="" if name in (CHOSEN_NAME, OP_NAME) else CHOSEN_NAME)
        for name, build in builds.items()
        if name != OP_NAME or mosaic_gpu.refuses(case_of(flat, "bfloat16")) is None
    ]
    build = partial(
        ours, flat, "fp8", name=KERNEL_NAME, operands=operands, layout=make_layout(flat)
    )
    note = "the kernel alone, on aligned rows and weights that are quantised already"
    parts.append(Part(KERNEL_NAME, work_of(flat, "fp8"), build, note=note))
    return Problem("grouped_masked", named(sizes), parts, partial(_checker, operands, num_tokens))


@untimed
def _in_both(x: jax.Array, w: jax.Array) -> Operands:
    rows, w = x.reshape(-1, x.shape[-1]), w.mT
    return Operands(rows, w, quantize(rows, format=ACTIVATION), quantize(w, format=WEIGHT))


def _checker(operands: Operands, num_tokens: int) -> Check:
    """Compare the tokens of the first group with the float32 product."""

    @untimed
    def run(operands: Operands) -> tuple[jax.Array, jax.Array]:
        product = partial(jnp.matmul, precision="highest")
        rows, w, rows8, w8 = operands
        scaled = product(rows8.dequantize()[:num_tokens], w8.dequantize()[0].T)
        plain = product(rows[:num_tokens].astype(jnp.float32), w[0].astype(jnp.float32).T)
        return plain, scaled

    plain, scaled = (np.asarray(x) for x in run(operands))

    def check(name: str, result: Any) -> Difference:
        first = result[:num_tokens] if name == KERNEL_NAME else result[0][:num_tokens]
        found = first.astype(jnp.float32) if isinstance(first, jax.Array) else first.float().cpu()
        return difference(np.asarray(found), scaled if name == KERNEL_NAME else plain)

    return check
