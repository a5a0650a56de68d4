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
from pallas_kernels.formats import ACTIVATION, BLOCK, WEIGHT, Quantized
from pallas_kernels.grouped_matmul import mosaic_gpu, reference, xla
from pallas_kernels.grouped_matmul.cases import (
    GroupedCase,
    OutDtype,
    Precision,
    make_case,
)
from pallas_kernels.grouped_matmul.layout import GroupLayout, align, stay
from pallas_kernels.quantize import quantize, quantize_both
from pallas_kernels.registry import Backend, KernelOp
from pallas_kernels.sharded import vary, varying_axes

# XLA's ragged product needs no alignment; kernels and scale tiles need whole tiles of rows.
PLAIN_ROWS = 8

Operand = Array | Quantized


def grouped_matmul(
    x: Float[Array, "rows k"],
    w: Float[Array, "groups w_k n"] | Quantized,
    *,
    group_sizes: Int[Array, " num_groups"],
    precision: Precision,
    quantized: Quantized | None = None,
    in_tiles: bool = False,
    backend: str | None = None,
) -> Float[Array, "rows n"]:
    """Return each row times the matrix of its group, in the dtype of `x`; differentiable.

    Args:
        w: [G, K, N]; for "fp8" also in squares, `quantize(w, format=WEIGHT)`, which get no
            gradient.
        quantized: for "fp8" those squares beside `w`, which gets the gradient and whose values are
            not read: one quantisation for every use of the weights before they change.
        in_tiles: every group's rows, and all rows, are a multiple of 128. Then no row is moved,
            and the results and gradients of rows behind the last group are not defined: they may
            be NaN. What such rows hold is not read.
    Raises:
        ValueError: if the operands do not fit each other, or the precision.
        KernelError: if `backend` refuses the case.
    """
    if isinstance(w, Quantized):
        quantized = w
    if quantized is not None and precision != "fp8":
        raise ValueError(
            f"w is in {quantized.format}: precision={precision!r} needs an array. Pass what it was "
            "made of, or precision='fp8'."
        )
    if w.shape[1] != x.shape[1] or len(group_sizes) != w.shape[0]:
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
        num_groups=w.shape[0],
        precision=precision,
        hardware=hardware.current(),
        out_dtype=_out_dtype(x.dtype),
        inner_dtype="float32" if isinstance(w, Quantized) else _out_dtype(w.dtype),
    )
    trained = None if isinstance(w, Quantized) else w
    dtypes = x.dtype, None if trained is None else trained.dtype
    static = _Static(case, OP.choose(case, backend=backend).name, in_tiles, *dtypes)
    operands = x, trained, quantized, group_sizes
    axes = varying_axes(*jax.tree.leaves(operands))
    return _grouped(*jax.tree.map(lambda array: vary(array, axes), operands), static)


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


def _out_dtype(dtype: jnp.dtype) -> OutDtype:
    """The dtype in which a product writes its sums: rounded there where a caller would round."""
    return "bfloat16" if dtype == jnp.bfloat16 else "float32"


@dataclass(frozen=True)
class _Static:
    """What the trace of one call depends on, besides the operands; no dtype = no gradient."""

    case: GroupedCase
    backend: str
    in_tiles: bool
    x_dtype: jnp.dtype
    w_dtype: jnp.dtype | None

    @property
    def tile_rows(self) -> int:
        """Rows that a group's start is aligned to."""
        if self.in_tiles:
            return BLOCK
        plain = self.backend == "xla" and self.case.precision != "fp8"
        on_gpu = self.case.hardware.platform in ("cuda", "rocm")
        return PLAIN_ROWS if plain and not on_gpu else BLOCK

    def layout(self, group_sizes: Array) -> GroupLayout:
        make = stay if self.in_tiles else align
        return make(group_sizes, num_rows=self.case.m, tile_rows=self.tile_rows)

    def rows(
        self, x: Operand, w: Operand, layout: GroupLayout, *, transposed: bool = False
    ) -> Float[Array, "rows n"]:
        """Aligned rows times their group's matrix, or its transpose."""
        case = replace(self.case, n=self.case.k, k=self.case.n) if transposed else self.case
        run = OP.backend(self.backend).run
        return run("rows", x, w, layout, case=case, transposed=transposed)

    def inner(self, x: Operand, grad: Operand, layout: GroupLayout) -> Float[Array, "groups k n"]:
        """For each group the sum over its aligned rows of xᵀ·grad."""
        return OP.backend(self.backend).run("inner", x, grad, layout, case=self.case)

    def both_ways(self, x: Array) -> tuple[Operand, Operand]:
        """Aligned rows as the products by rows, and over rows, take them."""
        if self.case.precision != "fp8":
            plain = self.plain(x)
            return plain, plain
        by_rows, turned = quantize_both(x, format=ACTIVATION)
        return by_rows, turned.mT

    def matrices(self, w: Array | None, quantized: Quantized | None) -> Operand:
        """The groups' matrices as the products take them."""
        if quantized is not None:
            return quantized
        assert w is not None
        # By XLA: where tensor cuts a stack, scales that a kernel makes would be gathered.
        return quantize(w, format=WEIGHT) if self.case.precision == "fp8" else self.plain(w)

    def plain(self, x: Array) -> Array:
        """An operand in the format of the products."""
        if self.case.precision == "bfloat16":
            return x.astype(jnp.bfloat16)
        return x.astype(jnp.promote_types(x.dtype, jnp.float32))


@partial(jax.custom_vjp, nondiff_argnames=("static",))
def _grouped(
    x: Float[Array, "rows k"],
    w: Float[Array, "groups k n"] | None,
    quantized: Quantized | None,
    group_sizes: Int[Array, " groups"],
    static: _Static,
) -> Float[Array, "rows n"]:
    case = static.case
    if not case.flops:
        return jnp.zeros((case.m, case.n), x.dtype)
    layout = static.layout(group_sizes)
    rows = layout.spread(x)
    operand = quantize(rows, format=ACTIVATION) if case.precision == "fp8" else static.plain(rows)
    out = static.rows(operand, static.matrices(w, quantized), layout)
    return layout.collect(out).astype(x.dtype)


type _Saved = tuple[Operand, Operand | None, Array]


def _grouped_forward(
    x: Array, w: Array | None, quantized: Quantized | None, group_sizes: Array, static: _Static
) -> tuple[Array, _Saved]:
    if static.case.precision != "fp8" or not static.case.flops:
        return _grouped(x, w, quantized, group_sizes, static), (x, w, group_sizes)
    # Kept in 8 bits, as the gradients' products take them: half the bytes, and rounded once.
    layout = static.layout(group_sizes)
    operand, turned = static.both_ways(layout.spread(x))
    matrices = static.matrices(w, quantized)
    out = layout.collect(static.rows(operand, matrices, layout)).astype(x.dtype)
    if isinstance(matrices, Quantized):
        # Of its transpose the gradients read nothing.
        matrices = replace(matrices, turned=None)
    return out, (turned, matrices, group_sizes)


def _grouped_backward(
    static: _Static, saved: _Saved, grad: Array
) -> tuple[Array, Array | None, None, None]:
    (x, w, group_sizes), case = saved, static.case
    if not case.flops:
        of_x = jnp.zeros((case.m, case.k), static.x_dtype)
        sizes = case.num_groups, case.k, case.n
        return of_x, static.w_dtype and jnp.zeros(sizes, static.w_dtype), None, None
    layout = static.layout(group_sizes)
    of_rows, of_inner = static.both_ways(layout.spread(grad))
    if isinstance(x, jax.Array) and isinstance(w, jax.Array):
        x, w = static.plain(layout.spread(x)), static.plain(w)
    assert w is not None
    grad_x = static.rows(of_rows, w, layout, transposed=True)
    of_x = layout.collect(grad_x).astype(static.x_dtype)
    if static.w_dtype is None:
        return of_x, None, None, None
    return of_x, static.inner(x, of_inner, layout).astype(static.w_dtype), None, None


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
