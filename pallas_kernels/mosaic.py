"""The one adapter to JAX's Mosaic GPU API: every name of it that a kernel here uses is here.

When the API moves, this file moves. It adds what every Hopper kernel of this package shares: the
ring of shared-memory stages between one copying warpgroup and the computing ones.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as mosaic_gpu_api
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from pallas_kernels.formats import round_up
from pallas_kernels.hardware import Hardware

# The API exports more than its type stubs say.
plgpu: Any = mosaic_gpu_api

# Layouts of a wgmma accumulator, and of a vector along its rows or its columns.
ACCUMULATOR = plgpu.Layout.WGMMA
PER_ROW = plgpu.Layout.WGMMA.reduce(1)
PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)

# Rows of the wgmma instruction's left operand: what one warpgroup computes at a time.
WARPGROUP_ROWS = 64
# Bytes of one row of the shared-memory pattern that wgmma and the copy engine agree on.
SWIZZLE_BYTES = 128
# A copy engine row must start and end on this many bytes.
COPY_ALIGN_BYTES = 16
# Rows of the shared-memory pattern; a matrix that is higher must be cut into whole patterns.
PATTERN_ROWS = 8
# A stage into which the copy engine writes must start on this many bytes; the hardware faults
# elsewhere, and neither the compiler nor the interpreter says so.
STAGE_ALIGN_BYTES = 128

Accumulator = plgpu.ACC
Barrier = plgpu.Barrier
arrive = plgpu.barrier_arrive
broadcasted_iota = plgpu.broadcasted_iota
commit = plgpu.commit_smem
layout_cast = plgpu.layout_cast
load = plgpu.load
planar_snake = plgpu.planar_snake
set_max_registers = plgpu.set_max_registers
wait = plgpu.barrier_wait
wait_copy_out = plgpu.wait_smem_to_gmem
wgmma = plgpu.wgmma
wgmma_wait = plgpu.wgmma_wait


def refuses(hardware: Hardware) -> str | None:
    """Why `hardware` cannot run a Hopper kernel; None if it can."""
    if hardware.architecture != "sm90":
        return (
            f"{hardware.kind} is {hardware.architecture}; this kernel is written for sm90 "
            "(wgmma). The XLA backend serves it."
        )
    return None


def shared(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, *, matrix: bool = True) -> Any:
    """Shared memory of `shape`; a `matrix` is laid out as wgmma reads it.

    Raises:
        ValueError: if the parts along the first dim are stages that no copy may start on.
    """
    stage_bytes = math.prod(shape[1:]) * jnp.dtype(dtype).itemsize
    if len(shape) > 1 and stage_bytes % STAGE_ALIGN_BYTES:
        raise ValueError(
            f"stages of shared memory {shape} are {stage_bytes} bytes long; copies start at "
            f"multiples of {STAGE_ALIGN_BYTES}. Round the last dim up."
        )
    if not matrix:
        return plgpu.SMEM(shape, dtype)
    columns = min(shape[len(shape) - 1], SWIZZLE_BYTES // jnp.dtype(dtype).itemsize)
    swizzle_bytes = columns * jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle_bytes))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def byte_rows(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Any:
    """Shared memory for rows of 128 bytes that no wgmma reads.

    For copies out of an array whose rows are no multiple of a wgmma pattern.
    """
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.SwizzleTransform(SWIZZLE_BYTES),))


def tiled_layout(
    tiles: tuple[tuple[int, ...], ...],
    *,
    warp_dims: tuple[int, ...],
    lane_dims: tuple[int, ...],
    vector_dim: int,
) -> Any:
    """How the threads of a warpgroup share an array that is cut into tiles, then those again.

    Args:
        tiles: shapes, the outermost cut first; dims are counted from the end after all cuts.
        warp_dims, lane_dims: dims over which warps and their lanes are spread.
        vector_dim: the dim that one register of one thread holds.
    """
    return plgpu.Layout.TILED(
        plgpu.Tiling(tiles), warp_dims=warp_dims, lane_dims=lane_dims, vector_dim=vector_dim
    )


def whole_patterns(x: Shaped[Array, "*stack m n"]) -> Shaped[Array, "*stack m_whole n_whole"]:
    """`x` padded with zeros so that copies cut its matrices into whole patterns; often `x`."""
    rows, columns = whole_shape((x.shape[-2], x.shape[-1]), x.dtype)
    widths = [(0, 0, 0)] * (x.ndim - 2)
    widths += [(0, rows - x.shape[-2], 0), (0, columns - x.shape[-1], 0)]
    if not any(after for _, after, _ in widths):
        return x
    return lax.pad(x, jnp.zeros((), x.dtype), widths)


def whole_shape(shape: tuple[int, int], dtype: jax.typing.DTypeLike) -> tuple[int, int]:
    """`shape` of a matrix rounded up to whole patterns of 8 rows of 128 bytes."""
    rows, columns = shape
    return (
        round_up(rows, PATTERN_ROWS),
        round_up(columns, SWIZZLE_BYTES // jnp.dtype(dtype).itemsize),
    )


def copy_in(source: Any, stage: Any, barrier: Any, **options: Any) -> None:
    """Start the copy of a part of device memory into shared memory; `barrier` then completes."""
    _check_copy(source, stage)
    plgpu.copy_gmem_to_smem(source, stage, barrier, **options)


def copy_out(stage: Any, target: Any) -> None:
    """Start the copy of shared memory into a part of device memory.

    Some of the part must be inside its array. In an array one pattern wide the compiler drops
    the pattern's index: a store behind the only pattern would land on it, not be clipped.
    """
    _check_copy(target, stage)
    plgpu.copy_smem_to_gmem(stage, target)


def _check_copy(part: Any, stage: Any) -> None:
    """Raise ValueError if the whole array behind `part` has rows that copies cannot cut.

    The interpreter copies any shape, so this is what makes a test on a CPU say what a GPU would.
    """
    array = part.ref if hasattr(part, "ref") else part
    row_bytes = array.shape[-1] * jnp.dtype(array.dtype).itemsize
    num_rows = array.shape[-2] if array.ndim > 1 else 1
    if array.ndim > 1 and row_bytes % COPY_ALIGN_BYTES:
        raise ValueError(
            f"rows of {array.shape} {array.dtype} are {row_bytes} bytes long; a copy needs a "
            f"multiple of {COPY_ALIGN_BYTES}. Pad the last dim."
        )
    if len(stage.shape) > 1 and num_rows > PATTERN_ROWS and num_rows % PATTERN_ROWS:
        raise ValueError(
            f"{array.shape} {array.dtype} has {num_rows} rows; a copy in patterns needs a "
            f"multiple of {PATTERN_ROWS}. Pad it with mosaic.whole_patterns."
        )


def zeros(shape: tuple[int, int]) -> jax.Array:
    """Float32 zeros in registers, laid out as an accumulator."""
    return plgpu.layout_cast(jnp.full(shape, 0, jnp.float32), ACCUMULATOR)


def per_row(value: float, *, rows: int = WARPGROUP_ROWS) -> jax.Array:
    """A float32 vector in registers with one `value` for each row of an accumulator."""
    return plgpu.layout_cast(jnp.full((rows,), value, jnp.float32), PER_ROW)


def multiply(shape: tuple[int, int], issue: Callable[[Any], None]) -> jax.Array:
    """Run the products that `issue` adds to a fresh accumulator and return it in registers."""

    def scoped(accumulator: Any) -> jax.Array:
        issue(accumulator)
        return accumulator[...]

    return pl.run_scoped(scoped, plgpu.ACC(shape, jnp.float32))


def add_products(total: jax.Array, issue: Callable[[Any], None]) -> jax.Array:
    """Return `total`, an accumulator in registers, plus the products that `issue` adds to it."""
    if is_interpreting():
        return total + multiply((total.shape[0], total.shape[1]), issue)
    return pl.run_state(issue)(plgpu.ACC.init(total))


def kernel(
    body: Callable[..., None],
    *,
    out_type: object,
    scratch_types: Sequence[object],
    grid: tuple[int, ...],
    grid_names: tuple[str, ...],
    num_warpgroups: int,
    reduction_bytes: int = 512,
    **mesh: Any,
) -> Callable[..., Any]:
    """Return a launcher of `body` on `grid` blocks of `num_warpgroups` warpgroups.

    Automatic barriers are off: the copying warpgroup would pay one for each copy. So a body must
    never read and overwrite the same shared memory in one thread without a wait in between.
    """
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch_types,
        grid=grid,
        grid_names=grid_names,
        num_threads=num_warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=reduction_bytes,
        ),
        **mesh,
    )


def empty_barrier(num_readers: int, num_stages: int, *, cluster: int = 1) -> Any:
    """Barriers that complete once `num_readers` warpgroups of each block have let a stage go.

    In a cluster, whose axis is named "member", a stage is refilled for all blocks at once.
    """
    if cluster == 1:
        return plgpu.Barrier(num_arrivals=num_readers, num_barriers=num_stages)
    return plgpu.ClusterBarrier(
        collective_axes=("member",), num_arrivals=num_readers, num_barriers=num_stages
    )


@dataclass(frozen=True)
class Ring:
    """Stages of shared memory that a copying warpgroup fills and computing ones empty.

    Attributes:
        full: one barrier a stage; completes when all copies into the stage have landed.
        empty: one barrier a stage; completes when every reader has let go of the stage.
    """

    full: Any
    empty: Any
    num_stages: int

    def slot(self, step: jax.Array) -> jax.Array:
        """The stage that step number `step` uses."""
        return lax.rem(step, jnp.int32(self.num_stages))

    def wait_empty(self, step: jax.Array) -> None:
        """Return once the stage of `step` may be overwritten; the first round never waits."""

        @pl.when(step >= self.num_stages)
        def _() -> None:
            plgpu.barrier_wait(self.empty.at[self.slot(step)])

    def wait_full(self, step: jax.Array) -> None:
        """Return once the stage of `step` holds its data."""
        plgpu.barrier_wait(self.full.at[self.slot(step)])

    def release(self, step: jax.Array) -> None:
        """Say that this warpgroup has read the stage of `step`."""
        plgpu.barrier_arrive(self.empty.at[self.slot(step)])

    def drain(self, num_steps: jax.Array) -> None:
        """Wait for the last readers after `num_steps` steps, so that no barrier is left pending."""
        for behind in range(self.num_stages):
            self.wait_empty(num_steps + behind)


_interpreting = jax.make_user_context(default_value=False)


@contextmanager
def interpreted(*, detect_races: bool = False) -> Iterator[None]:
    """Run kernels traced inside on the CPU, by JAX's Mosaic GPU interpreter.

    A missing wait or a barrier left pending raises. Accumulators with an initial value and left
    operands in registers are beyond it.
    """
    params = plgpu.InterpretGPUParams(detect_races=detect_races)
    with _interpreting(True), plgpu.force_gpu_interpret_mode(params):
        yield


def is_interpreting() -> bool:
    """True inside `interpreted`, where a kernel is an ordered callback and cannot be split."""
    return _interpreting.value
