"""Logical dims of arrays and the mesh axes that split them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
from jax.sharding import AxisType, PartitionSpec

from jaxfound.config.parallel import AXES, Activations, AxisName, ZeroStage
from jaxfound.config.params import LAYER_DIMS

BATCH_AXES: tuple[AxisName, ...] = ("data", "fsdp", "expert")

# How a parameter lies while it is used; a dim that is not a key here is whole.
PARAM_AXES: Mapping[str, tuple[AxisName, ...]] = {
    "layers": ("pipeline",),
    "experts": ("expert",),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "ffn": ("tensor",),
}
# fsdp cuts what is kept between uses along the first of these dims, on top of the table above. An
# array that has none of them, a norm's scale, is whole on every device.
FSDP_DIMS = ("embed", "latent")
# The seq dim of the residual stream: of embeddings and of what blocks read and add to.
STREAM_SEQ = "stream_seq"
type Dims = Sequence[str | None]
type Axes = tuple[tuple[AxisName, ...], ...]

ACTIVATION_AXES: Mapping[str, tuple[AxisName, ...]] = {
    "batch": BATCH_AXES,
    "seq": ("context",),
    # The residual stream between blocks, where `ShardingRules.activations` is `sequence`.
    STREAM_SEQ: ("context", "tensor"),
    # Rows that every device of the context axis holds whole, one copy each.
    "copies": ("context", *BATCH_AXES),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "ffn": ("tensor",),
}


@dataclass(frozen=True)
class ShardingRules:
    """Maps the logical dims of parameters and activations to mesh axes.

    Which arrays fsdp cuts is the ZeRO stage; along which dim follows from the parameter's own dims
    and is the same for the parameter, its gradient and its moments: the first `embed` or `latent`
    that divides; else the largest named dim that no other axis cuts; else the largest that one
    does. Gradients and moments take the stack of layers where nothing else divides. A parameter
    cannot: the scan over layers would gather the whole stack to pick one. What none of this
    divides is whole on every device (`zero.notes` names it).

    Attributes:
        unsplit: dims that stay whole although the table above would split them, e.g. `kv_heads`
            when there are fewer of them than tensor-parallel devices.
        zero_stage: what fsdp cuts: 0 nothing, 1 the optimizer's arrays, 2 also summed gradients,
            3 also parameters.
        activations: whether the residual stream is whole over tensor or cut along the sequence.
        degrees: devices along each axis, in mesh order; 1 also where nobody knows, so that every
            dim divides.

    Source: Rajbhandari et al., "ZeRO" (2020), section 5.
    """

    unsplit: tuple[str, ...] = ()
    zero_stage: ZeroStage = 3
    activations: Activations = "replicated"
    degrees: tuple[int, ...] = (1,) * len(AXES)

    @property
    def cuts_parameters(self) -> bool:
        """Whether fsdp cuts parameters, so that each is gathered for its use."""
        return self.zero_stage >= 3 and self.degrees[AXES.index("fsdp")] > 1

    def param_axes(self, dims: Dims, shape: Sequence[int] | None = None) -> Axes:
        """Return the mesh axes that split each dim of a stored parameter.

        Args:
            dims: their names.
            shape: their sizes; without them every dim divides.
        """
        return self._stored(dims, shape, cut=self.zero_stage >= 3, layers=False)

    def grad_axes(self, dims: Dims, shape: Sequence[int] | None = None) -> Axes:
        """Return the mesh axes that split each dim of a parameter's gradient, while summed."""
        return self._stored(dims, shape, cut=self.zero_stage >= 2, layers=True)

    def slot_axes(self, dims: Dims, shape: Sequence[int] | None = None) -> Axes:
        """Return the mesh axes that split each dim of a moment of the optimizer."""
        return self._stored(dims, shape, cut=self.zero_stage >= 1, layers=True)

    def param_spec(self, dims: Dims, shape: Sequence[int] | None = None) -> PartitionSpec:
        """Return how a parameter with these dims is stored on the mesh."""
        return _spec(self.param_axes(dims, shape))

    def grad_spec(self, dims: Dims, shape: Sequence[int] | None = None) -> PartitionSpec:
        """Return how the gradient of a parameter lies while micro-batches are summed."""
        return _spec(self.grad_axes(dims, shape))

    def slot_spec(self, dims: Dims, shape: Sequence[int] | None = None) -> PartitionSpec:
        """Return how a moment of a parameter lies, and where the parameter is updated."""
        return _spec(self.slot_axes(dims, shape))

    def activation_spec(self, dims: Dims) -> PartitionSpec:
        """Return how an activation with these dims lies on the mesh."""
        uncut = self.activations == "replicated"
        named = ["seq" if dim == STREAM_SEQ and uncut else dim for dim in dims]
        return _spec(self._axes(named, ACTIVATION_AXES))

    def gathered_spec(self, dims: Dims) -> PartitionSpec:
        """Return how a parameter lies while it is used: whole over fsdp, split over the rest."""
        return _spec(self.used_axes(dims))

    def used_axes(self, dims: Dims) -> Axes:
        """Return the mesh axes that split each dim of a parameter while it is used."""
        return self._axes(dims, PARAM_AXES)

    def degree(self, axis: AxisName) -> int:
        """Return the devices along `axis`."""
        return self.degrees[AXES.index(axis)]

    @property
    def cuts_stream(self) -> bool:
        """Whether the residual stream is cut along the sequence over tensor."""
        return self.activations == "sequence" and self.degree("tensor") > 1

    def pieces(self, axes: Sequence[AxisName]) -> int:
        """Return the pieces that these axes together make of a dim."""
        return math.prod(self.degree(axis) for axis in axes)

    def fsdp_dim(self, dims: Dims, shape: Sequence[int], *, layers: bool) -> int | None:
        """Return which dim fsdp cuts, None for an array that stays whole over it.

        Args:
            dims: their names.
            shape: their sizes.
            layers: whether the stack of layers may be cut where nothing else divides.
        """
        named = [i for i, dim in enumerate(dims) if dim is not None and dim not in self.unsplit]
        asking = [i for i in named if dims[i] in FSDP_DIMS]
        if not asking:
            return None
        pieces = [self.pieces(axes) for axes in self.used_axes(dims)]
        others = [i for i in named if i not in asking and dims[i] not in LAYER_DIMS]
        others.sort(key=lambda i: (pieces[i] > 1, -shape[i], i))
        last = [i for i in named if dims[i] in LAYER_DIMS and layers]
        fsdp = self.degree("fsdp")
        fitting = (i for i in asking + others + last if shape[i] % (pieces[i] * fsdp) == 0)
        return next(fitting, None)

    def constrain(self, x: jax.Array, *dims: str | None) -> jax.Array:
        """Pin an activation to its place on the mesh in force; without a mesh it is `x`."""
        return _pin(x, self.activation_spec(dims))

    def gather(self, w: jax.Array, *dims: str | None) -> jax.Array:
        """Pin a parameter to its place during use, which all-gathers what fsdp split.

        Left to itself the partitioner may gather activations instead and split the product over
        fsdp: tensor parallelism that nobody asked for. Cast before: pinned as stored as well, `w`
        crosses the wire in its own format. Its gradient is pinned to its own place at once: behind
        a rounding, the sum over devices and the cut would no longer be one reduce_scatter.

        Args:
            w: the parameter, in the format of its use.
            dims: their names.
        """
        if jax.sharding.get_abstract_mesh().empty:
            return w

        def whole(w: jax.Array) -> jax.Array:
            return _pin(_pin(w, self.param_spec(dims, w.shape)), self.gathered_spec(dims))

        def forward(w: jax.Array) -> tuple[jax.Array, None]:
            return whole(w), None

        def backward(_: None, grad: jax.Array) -> tuple[jax.Array]:
            return (self.constrain_grad(grad, *dims) if self.zero_stage >= 2 else grad,)

        gathered = jax.custom_vjp(whole)
        gathered.defvjp(forward, backward)
        return gathered(w)

    def sum_of_picked(self, grad: jax.Array, *dims: str | None) -> jax.Array:
        """Pin the gradient of a table whose rows were picked and not multiplied.

        Its sum is formed whole: cut before, every token would be exchanged.
        """
        if jax.sharding.get_abstract_mesh().empty:
            return grad
        grad = _pin(grad, self.gathered_spec(dims))
        return self.constrain_grad(grad, *dims) if self.zero_stage >= 2 else grad

    def constrain_used(self, w: jax.Array, *dims: str | None) -> jax.Array:
        """Pin an array the shape of a parameter to where the parameter lies while it is used."""
        return _pin(w, self.gathered_spec(dims))

    def constrain_grad(self, grad: jax.Array, *dims: str | None) -> jax.Array:
        """Pin a parameter's gradient to its place while micro-batches are summed."""
        return _pin(grad, self.grad_spec(dims, grad.shape))

    def constrain_slot(self, x: jax.Array, *dims: str | None) -> jax.Array:
        """Pin an array the shape of a parameter to where the parameter's moments lie."""
        return _pin(x, self.slot_spec(dims, x.shape))

    def on_each_device[*In, Out](
        self,
        fn: Callable[[*In], Out],
        *,
        takes: Sequence[PartitionSpec],
        gives: PartitionSpec | tuple[PartitionSpec, ...],
    ) -> Callable[[*In], Out]:
        """Return `fn` run by each device on its own shards, when the mesh has more than one.

        Sorts and top-k are whole-array operations to the partitioner: left to it, every token
        would be gathered on every device. Inside a pipeline, where every axis but tensor is manual
        already, arrays are shards of those and `fn` may name them too.

        Args:
            fn: sees shards; sums over an axis with `sum_over`.
            takes: how each argument lies on the mesh.
            gives: how the results lie.
        """
        manual = free_axes()
        if not manual:
            return fn
        outs = gives if isinstance(gives, tuple) else (gives,)
        specs = tuple(only(s, manual) for s in outs)
        # check_vma off: the shards' types would have to be cast by hand around every scatter.
        return jax.shard_map(
            fn,
            in_specs=tuple(only(s, manual) for s in takes),
            out_specs=specs if isinstance(gives, tuple) else specs[0],
            axis_names=manual,
            check_vma=False,
        )

    def _stored(self, dims: Dims, shape: Sequence[int] | None, *, cut: bool, layers: bool) -> Axes:
        """Return the axes of an array that is kept, cut over fsdp as well when `cut`."""
        found = self.used_axes(dims)
        sizes = (0,) * len(dims) if shape is None else shape
        chosen = self.fsdp_dim(dims, sizes, layers=layers) if cut else None
        return self._even(
            tuple((*a, "fsdp") if i == chosen else a for i, a in enumerate(found)), sizes
        )

    def _even(self, axes: Axes, shape: Sequence[int]) -> Axes:
        """Return axes with `pipeline` where layers that stages do not share evenly can be cut.

        It moves to the largest dim that no axis cuts, so that every device still holds its part
        alone. An array without such a dim, a norm's scale, is whole over it: XLA cannot gather
        layers into two axes of one dim.
        """
        uneven = [i for i, a in enumerate(axes) if "pipeline" in a and shape[i] % self.pieces(a)]
        if not uneven:
            return axes
        free = [i for i, a in enumerate(axes) if self.pieces(a) == 1]
        fitting = [i for i in free if shape[i] % self.degree("pipeline") == 0]
        moved: list[tuple[AxisName, ...]] = [
            tuple(axis for axis in a if axis != "pipeline") for a in axes
        ]
        if fitting:
            moved[max(fitting, key=lambda i: shape[i])] = ("pipeline",)
        return tuple(moved)

    def _axes(self, dims: Dims, table: Mapping[str, tuple[AxisName, ...]]) -> Axes:
        used: set[AxisName] = set()
        found = []
        for dim in dims:
            asked = () if dim is None or dim in self.unsplit else table.get(dim, ())
            found.append(tuple(axis for axis in asked if axis not in used))
            used.update(found[-1])
        return tuple(found)


TABLE_RULES = ShardingRules()


def free_axes() -> set[str]:
    """Return the axes above one device that the mesh in force leaves to the partitioner."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name for name, kind in kinds if kind == AxisType.Auto and mesh.shape[name] > 1}


def is_manual(axis: AxisName) -> bool:
    """Return whether arrays here are one device's shards along an axis of several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape.get(axis, 1) > 1 and axis not in free_axes()


def sum_over(x: jax.Array, axis: AxisName) -> jax.Array:
    """Return the sum of x over a mesh axis whose shards are handled here; x itself elsewhere.

    Call it inside `on_each_device`, or where a pipeline has made the axis manual.
    """
    return jax.lax.psum(x, axis) if is_manual(axis) else x


def _spec(axes: Axes) -> PartitionSpec:
    """Return axes by dim as JAX writes them."""
    return PartitionSpec(*(e[0] if len(e) == 1 else (e or None) for e in axes))


def _pin(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Constrain `x` to `spec` over the axes the mesh in force leaves to the partitioner."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    free = {n for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == AxisType.Auto}
    if not free:
        return x
    return jax.lax.with_sharding_constraint(x, only(spec, free))


def only(spec: PartitionSpec, axes: set[str]) -> PartitionSpec:
    """Return `spec` without the axes that are not in `axes`."""
    entries = [(e,) if isinstance(e, str) else tuple(e or ()) for e in spec]
    return PartitionSpec(*(tuple(n for n in e if n in axes) or None for e in entries))
