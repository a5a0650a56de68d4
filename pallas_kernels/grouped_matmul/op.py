"""The grouped product: rows in order of their groups, each group with its own matrix.

Contract: x [M, K], w [G, K, N], sizes [G] on the device; row i of group g becomes `x[i] @ w[g]`.
Rows behind the last group give zeros and are ignored even if NaN. Forward and backward, a group
without rows gives exact zeros. "fp8" quantises by the DeepSeek-V3 recipe: activations and
gradients in tiles of 1x128, weights in squares, the weight gradient in tiles along tokens.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import hardware
from pallas_kernels.formats import ACTIVATION, BLOCK, WEIGHT, Format, Quantized
from pallas_kernels.grouped_matmul import mosaic_gpu, reference, xla
from pallas_kernels.grouped_matmul.cases import GroupedCase, Precision, make_case
from pallas_kernels.grouped_matmul.layout import GroupLayout, align, stay
from pallas_kernels.quantize import quantize
from pallas_kernels.registry import Backend, KernelOp
from pallas_kernels.sharded import vary, varying_axes

# XLA's ragged product needs no alignment; kernels and scale tiles need whole tiles of rows.
PLAIN_ROWS = 8
ALONG_TOKENS = Format(block=(BLOCK, 1))


def grouped_matmul(
    x: Float[Array, "rows k"],
    w: Float[Array, "groups w_k n"],
    *,
    group_sizes: Int[Array, " num_groups"],
    precision: Precision,
    in_tiles: bool = False,
    backend: str | None = None,
) -> Float[Array, "rows n"]:
    """Return each row times the matrix of its group, in the dtype of `x`; differentiable.

    Args:
        in_tiles: every group's rows, and all rows, are a multiple of 128. Then no row is moved,
            and the results and gradients of rows behind the last group are not defined: they may
            be NaN. What such rows hold is not read.
    Raises:
        ValueError: if the sizes of the operands do not fit each other.
        KernelError: if `backend` refuses the case.
    """
    if w.shape[1] != x.shape[1] or len(group_sizes) != len(w):
        raise ValueError(
            f"x {x.shape}, w {w.shape} and group_sizes {group_sizes.shape} do not fit: "
            "w must be [G, K, N] with the K of x and group_sizes [G]."
        )
    if in_tiles and len(x) % BLOCK:
        raise ValueError(f"{len(x)} rows are no whole tiles of {BLOCK}: they cannot be in_tiles.")
    case = GroupedCase(
        m=x.shape[0],
        n=w.shape[2],
        k=x.shape[1],
        num_groups=len(w),
        precision=precision,
        hardware=hardware.current(),
        out_dtype="bfloat16" if x.dtype == jnp.bfloat16 else "float32",
    )
    static = _Static(case, OP.choose(case, backend=backend).name, in_tiles)
    axes = varying_axes(x, w, group_sizes)
    return _grouped(*(vary(operand, axes) for operand in (x, w, group_sizes)), static)


def masked_grouped_matmul(
    x: Float[Array, "groups max_rows k"],
    w: Float[Array, "groups k n"],
    *,
    group_sizes: Int[Array, " groups"],
    precision: Precision,
    backend: str | None = None,
) -> Float[Array, "groups max_rows n"]:
    """Return `x[g] @ w[g]` where only the first `group_sizes[g]` rows of each group count.

    The layout of decoding, where each expert has room for `max_rows` tokens. The other rows give
    zeros and are ignored even if NaN. Room for one tile of rows is multiplied whole, unless the
    precision is fp8 or `backend` names one: a grouped kernel would run the same tiles and would
    have to gather the rows first.

    Raises:
        ValueError: if the sizes of the operands do not fit each other.
        KernelError: if `backend` refuses the case.
    """
    groups, max_rows, k = x.shape
    valid = jnp.arange(max_rows)[None, :] < group_sizes[:, None]
    if backend is None and precision != "fp8" and max_rows <= BLOCK:
        return _all_room(jnp.where(valid[..., None], x, 0), w, precision=precision)
    # A stable sort brings the rows that count to the front, still in order of their groups.
    order = jnp.argsort(~valid.reshape(-1), stable=True)
    flat = grouped_matmul(
        x.reshape(-1, k)[order],
        w,
        group_sizes=group_sizes,
        precision=precision,
        backend=backend,
    )
    back = jnp.zeros_like(flat).at[order].set(flat)
    return back.reshape(groups, max_rows, w.shape[2])


def _all_room(x: Array, w: Array, *, precision: Precision) -> Float[Array, "groups max_rows n"]:
    """Each group's rows times its matrix, as one batched product; sums are float32."""
    narrow = precision == "bfloat16"
    dtype = jnp.bfloat16 if narrow else jnp.promote_types(x.dtype, jnp.float32)
    out = jnp.matmul(
        x.astype(dtype),
        w.astype(dtype),
        precision="default" if narrow else "highest",
        preferred_element_type=jnp.promote_types(dtype, jnp.float32),
    )
    return out.astype(x.dtype)


@dataclass(frozen=True)
class _Static:
    """What the trace of one call depends on, besides the operands."""

    case: GroupedCase
    backend: str
    in_tiles: bool

    @property
    def tile_rows(self) -> int:
        """Rows that a group's start is aligned to."""
        plain = self.backend == "xla" and self.case.precision != "fp8"
        on_gpu = self.case.hardware.platform in ("cuda", "rocm")
        return PLAIN_ROWS if plain and not on_gpu else BLOCK

    def layout(self, group_sizes: Array) -> GroupLayout:
        make = stay if self.in_tiles else align
        return make(group_sizes, num_rows=self.case.m, tile_rows=self.tile_rows)

    def rows(
        self, x: Array, w: Array, layout: GroupLayout, *, transposed: bool = False
    ) -> Float[Array, "rows n"]:
        """Aligned rows times their group's matrix, or its transpose."""
        case = replace(self.case, n=self.case.k, k=self.case.n) if transposed else self.case
        operands = _in_format(x, ACTIVATION, case), _in_format(w, WEIGHT, case)
        run = OP.backend(self.backend).run
        return run("rows", *operands, layout, case=case, transposed=transposed)

    def inner(self, x: Array, grad: Array, layout: GroupLayout) -> Float[Array, "groups k n"]:
        """For each group the sum over its aligned rows of xᵀ·grad."""
        operands = (_in_format(rows, ALONG_TOKENS, self.case) for rows in (x, grad))
        return OP.backend(self.backend).run("inner", *operands, layout, case=self.case)


def _in_format(x: Array, format: Format, case: GroupedCase) -> Array | Quantized:
    if case.precision == "fp8":
        return quantize(x, format=format)
    if case.precision == "bfloat16":
        return x.astype(jnp.bfloat16)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


@partial(jax.custom_vjp, nondiff_argnames=("static",))
def _grouped(
    x: Float[Array, "rows k"],
    w: Float[Array, "groups k n"],
    group_sizes: Int[Array, " groups"],
    static: _Static,
) -> Float[Array, "rows n"]:
    if not static.case.flops:
        return jnp.zeros((x.shape[0], w.shape[2]), x.dtype)
    layout = static.layout(group_sizes)
    out = static.rows(layout.spread(x), w, layout)
    return layout.collect(out).astype(x.dtype)


def _grouped_forward(
    x: Array, w: Array, group_sizes: Array, static: _Static
) -> tuple[Array, tuple[Array, Array, Array]]:
    return _grouped(x, w, group_sizes, static), (x, w, group_sizes)


def _grouped_backward(
    static: _Static, saved: tuple[Array, Array, Array], grad: Array
) -> tuple[Array, Array, None]:
    x, w, group_sizes = saved
    if not static.case.flops:
        return jnp.zeros_like(x), jnp.zeros_like(w), None
    layout = static.layout(group_sizes)
    grad_rows = layout.spread(grad)
    grad_x = static.rows(grad_rows, w, layout, transposed=True)
    grad_w = static.inner(layout.spread(x), grad_rows, layout)
    return layout.collect(grad_x).astype(x.dtype), grad_w.astype(w.dtype), None


_grouped.defvjp(_grouped_forward, _grouped_backward)


OP: KernelOp[GroupedCase] = KernelOp(
    name="grouped_matmul",
    reference=reference.grouped_matmul,
    backends=(
        Backend(name="mosaic_gpu", refuses=mosaic_gpu.refuses, run=mosaic_gpu.run),
        Backend(name="xla", refuses=xla.refuses, run=xla.run),
    ),
    make_case=make_case,
)
