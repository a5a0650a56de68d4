"""Few rows at a time, times weights kept in 8 bits: contract, checks and choice of backend.

Contract: X [M, K], the same for every matrix, or tiles of rows [P, M, K]; W [E, N, K] in squares of
128x128, as `quantize(…, format=WEIGHT)` leaves it; Y [P, M, N], each tile times the matrix that is
named for it, in the dtype of X. Only weights are in 8 bits: rows are not rounded, so that a step of
decoding, which is as long as its reading of weights, gains their bytes and pays with nothing else.
An element of W is rounded to the dtype of X behind its scale or before it, by the backend; sums are
float32. No gradient passes to W.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import hardware
from pallas_kernels.formats import BLOCK, WEIGHT, FormatError, Quantized, check_quantized
from pallas_kernels.registry import Backend, KernelOp
from pallas_kernels.widened_matmul import jax_triton, reference
from pallas_kernels.widened_matmul.cases import WidenedCase, make_case


def widened_matmul(
    x: Float[Array, "*tiles m k"],
    w: Quantized,
    *,
    matrices: Int[Array, " p"] | None = None,
    backend: str | None = None,
) -> Float[Array, "p m n"]:
    """Return Y [P, M, N] = X·Wᵀ in the dtype of X.

    Args:
        matrices: the matrix of each tile; for -1 there is none: what comes of that tile is finite
            and may be anything, and nothing is read for it. None: tile e has matrix e.
        backend: the backend to use; None = the fastest that serves the case.
    Raises:
        FormatError: if the operands do not fit each other.
        KernelError: if `backend` refuses the case.
    """
    num_tiles = len(w.values) if matrices is None else len(matrices)
    case = case_of(x, w, num_tiles=num_tiles)
    chosen = OP.choose(case, backend=backend)
    if not case.flops:
        return jnp.zeros((case.p, case.m, case.n), x.dtype)
    return chosen.run(x, w, matrices=matrices, case=case)


def has_kernel(x: jax.Array, w: Quantized, *, num_tiles: int) -> bool:
    """Return whether tiles of `x` have a kernel here, and not XLA's product of widened weights."""
    return OP.choose(case_of(x, w, num_tiles=num_tiles)).name != "xla"


def case_of(x: jax.Array, w: Quantized, *, num_tiles: int) -> WidenedCase:
    """Check that the operands fit each other and return their case.

    Raises:
        FormatError: if they do not.
    """
    check_quantized("w", w)
    if w.format.block != WEIGHT.block or w.values.ndim != 3:
        raise FormatError(
            f"w must be [E, N, K] in squares of {BLOCK}x{BLOCK}, got {w.shape} in {w.format}. Of a "
            "single matrix make a stack of one."
        )
    shared = x.ndim == 2
    if x.shape[-1] != w.columns or not (shared or (x.ndim == 3 and len(x) == num_tiles)):
        raise FormatError(
            f"x is {x.shape} and w is {w.shape}: x must be [M, K] or [P, M, K] with the K of w "
            f"[E, N, K], and P the number of matrices, here {num_tiles}."
        )
    sizes = {"p": num_tiles, "m": x.shape[-2], "n": w.rows, "k": w.columns}
    return WidenedCase(
        **sizes,
        hardware=hardware.current(),
        shared=shared,
        dtype=x.dtype.name,
        element=w.format.element,
    )


def _by_reference(
    x: jax.Array, w: Quantized, *, matrices: jax.Array | None, case: WidenedCase
) -> jax.Array:
    """Multiply as XLA compiles the reference, with weights in the dtype of `x`."""
    return reference.widened_matmul(x, w, matrices=matrices, dtype=x.dtype).astype(x.dtype)


def _serves_everything(case: WidenedCase) -> None:
    return None


OP: KernelOp[WidenedCase] = KernelOp(
    name="widened_matmul",
    reference=reference.widened_matmul,
    backends=(
        Backend(name="jax_triton", refuses=jax_triton.refuses, run=jax_triton.run),
        Backend(name="xla", refuses=_serves_everything, run=_by_reference),
    ),
    make_case=make_case,
)
