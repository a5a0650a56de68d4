"""Muon: the momentum of every matrix, orthogonalised; each matrix of a stack by itself.

Sources: Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024);
Liu et al., "Muon is scalable for LLM training" (arXiv 2502.16982).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Float

from jaxfound.config.params import ParamSpec, ParamTable
from jaxfound.config.train import OptimizerConfig
from jaxfound.parallelism.axes import TABLE_RULES, ShardingRules

# What a logical dim is to the matrices of a parameter. `stack` counts them; `side` is their rows
# or their columns; `channels` continue the heads before them, one side together; `ids` index a
# table of vectors, whose rows are looked up or scored one by one: no matrix to orthogonalise.
ROLES: Mapping[str | None, Literal["stack", "side", "channels", "ids"]] = {
    "layers": "stack",
    "leading_layers": "stack",
    "experts": "stack",
    "embed": "side",
    "ffn": "side",
    "latent": "side",
    "heads": "side",
    "kv_heads": "side",
    None: "side",
    "head_dim": "channels",
    "vocab": "ids",
}
HEADS = ("heads", "kv_heads")
STACKS = tuple(dim for dim, role in ROLES.items() if role == "stack")
# The mesh axes that cut N, R and C.
Place = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]

# Jordan et al.'s quintic a X + b (XX')X + c (XX')(XX')X, five times. A row each makes optax loop
# over one compiled body.
ITERATIONS = ((3.4445, -4.7750, 2.0315),) * 5

# What an orthogonal R x C matrix is multiplied by, R inputs and C outputs. Its entries have a
# root mean square of 1/sqrt(max(R, C)).
SCALES: Mapping[str, Callable[[int, int], float]] = {
    # AdamW's updates have a root mean square of about 0.2 (arXiv 2502.16982, section 2.2).
    "match_adamw": lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)),
    # Jordan et al. (2024).
    "original": lambda rows, cols: math.sqrt(max(1.0, cols / rows)),
}


@dataclass(frozen=True)
class Matrices:
    """A parameter seen as N matrices of R inputs x C outputs.

    Attributes:
        spec: the parameter.
        groups: its dims by position: those of the stack, of the rows, of the columns.
    """

    spec: ParamSpec
    groups: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]

    @property
    def shape(self) -> tuple[int, int, int]:
        """N, R and C."""
        n, r, c = (math.prod(self.spec.shape[i] for i in group) for group in self.groups)
        return n, r, c

    def places(self, rules: ShardingRules) -> tuple[Place, ...]:
        """Return where [N R C] lies as stored, with whole rows, and as whole matrices.

        Over the axes that the mesh in force leaves to the partitioner. One axis after the other:
        a shard that changes two dims at one time would be gathered whole.
        """
        asked = rules.slot_axes(self.spec.dims, self.spec.shape)
        sizes = free_axes()

        def cuts(group: tuple[int, ...]) -> tuple[str, ...]:
            # What does not divide stays whole, as the plan has it for key and value heads.
            return tuple(
                a
                for i in group
                for a in asked[i]
                if a in sizes and self.spec.shape[i] % sizes[a] == 0
            )

        n, r, c = (cuts(group) for group in self.groups)
        found = ((n, r, c), (n + r, (), c), (n + r + c, (), ()))
        return found if n + r + c else ()


def muon(
    cfg: OptimizerConfig,
    table: ParamTable,
    *,
    others: optax.GradientTransformation,
    rules: ShardingRules = TABLE_RULES,
) -> optax.GradientTransformation:
    """Return Muon without learning rate and decay; `others` moves what is no matrix.

    Args:
        cfg: its numbers.
        table: the model's parameters.
        others: the update rule of what is no matrix.
        rules: where momenta lie on a mesh.

    Raises:
        ValueError: if a parameter has a dim that ROLES does not know, or more than two sides.
    """
    matrices = {
        spec.path: found
        for spec in table
        if spec.kind == "param" and (found := matrices_of(spec)) is not None
    }
    steps = optax.chain(
        optax.trace(decay=cfg.muon_momentum, nesterov=True),
        orthogonalise(cfg, matrices, rules=rules),
    )
    labels = {
        spec.path: "muon" if spec.path in matrices else "adamw"
        for spec in table
        if spec.kind == "param"
    }
    return optax.partition({"muon": steps, "adamw": others}, labels)


def matrices_of(spec: ParamSpec) -> Matrices | None:
    """Return the matrices that a parameter holds; None for a table of vectors, a norm, a bias.

    Raises:
        ValueError: if a dim is not in ROLES, or if there are more than two sides.
    """
    unknown = [dim for dim in spec.dims if dim not in ROLES]
    if unknown:
        raise ValueError(
            f"{spec.path} has dims {spec.dims}: Muon does not know what {unknown} are to a matrix. "
            f"Add them to ROLES in {__name__}, or use optimizer.name=adamw"
        )
    roles = [ROLES[dim] for dim in spec.dims]
    stack = tuple(i for i, role in enumerate(roles) if role == "stack")
    sides: list[tuple[int, ...]] = []
    for i, role in enumerate(roles):
        if role == "channels" and i and spec.dims[i - 1] in HEADS:
            sides[-1] = (*sides[-1], i)
        elif role != "stack":
            sides.append((i,))
    if len(sides) < 2 or "ids" in roles:
        return None
    if len(sides) > 2 or stack != tuple(range(len(stack))):
        raise ValueError(
            f"{spec.path} has dims {spec.dims}: Muon takes stacks {STACKS} of two sides, and this "
            f"has {len(sides)}. Say in {__name__} which dims are one side, or use "
            "optimizer.name=adamw"
        )
    return Matrices(spec, (stack, sides[0], sides[1]))


def orthogonalise(
    cfg: OptimizerConfig, matrices: Mapping[str, Matrices], *, rules: ShardingRules = TABLE_RULES
) -> optax.GradientTransformation:
    """Return the stateless transformation of momenta into scaled orthogonal matrices."""
    dtype = jnp.dtype(cfg.muon_format)

    def move(momentum: jax.Array, kind: Matrices) -> jax.Array:
        _, rows, cols = kind.shape
        stack = momentum.astype(dtype).reshape(kind.shape)
        moved = on_whole_matrices(newton_schulz, stack, places=kind.places(rules))
        scale = SCALES[cfg.muon_scale](rows, cols)
        return scale * moved.reshape(momentum.shape).astype(momentum.dtype)

    def update(momenta: optax.Updates, params: optax.Params | None) -> optax.Updates:
        del params
        return jax.tree_util.tree_map_with_path(
            lambda keys, m: move(m, matrices[keys[0].key]), momenta
        )

    return optax.stateless(update)


def newton_schulz(stack: Float[Array, "N R C"]) -> Float[Array, "N R C"]:
    """Return about U V' of each matrix U S V': singular values near 1; zero of zero.

    In the format of `stack`: norm, products and result.
    """
    step = optax.contrib.scale_by_muon(
        ns_coeffs=ITERATIONS,
        ns_steps=len(ITERATIONS),
        beta=0.0,
        nesterov=False,
        weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(1, 2),
    )
    # An accelerator's own default may round float32 operands to 11 bits.
    with jax.default_matmul_precision("highest"):
        moved, _ = step.update(stack, step.init(stack))
    return cast(jax.Array, moved)


def on_whole_matrices(
    fn: Callable[[jax.Array], jax.Array],
    stack: Float[Array, "N R C"],
    *,
    places: Sequence[Place],
) -> Float[Array, "N R C"]:
    """Return fn of the stack, computed where each device has whole matrices of it.

    On shards, each iteration would gather the stack twice and hold all of it on every device.
    Moving to whole matrices and back is an all_to_all an axis each way, and the work is shared.

    Args:
        fn: maps each matrix by itself, zero to zero.
        stack: cut as the first of `places`.
        places: from `Matrices.places`; empty without a mesh.
    """
    if not places:
        return fn(stack)
    count, sizes = stack.shape[0], free_axes()
    missing = -count % math.prod(sizes[axis] for axis in places[-1][0])
    stack = jnp.pad(stack, ((0, missing), (0, 0), (0, 0)))
    for place in places:
        stack = pin(stack, place)
    moved = fn(stack)
    for place in reversed(places):
        moved = pin(moved, place)
    return moved[:count]


def pin(stack: Float[Array, "N R C"], place: Place) -> Float[Array, "N R C"]:
    """Return the stack, cut as `place` says on the mesh in force."""
    spec = PartitionSpec(*(axes or None for axes in place))
    return jax.lax.with_sharding_constraint(stack, spec)


def free_axes() -> dict[str, int]:
    """Return the axes above one that the mesh in force leaves to the partitioner."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {n: mesh.shape[n] for n, t in kinds if t == AxisType.Auto and mesh.shape[n] > 1}
