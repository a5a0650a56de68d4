"""One layer of experts on a mesh of devices: its output and its gradients, by routing."""

from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxfound.communication import axes_crossed, collectives
from jaxfound.config.parallel import AXES
from jaxfound.config.precision import PrecisionConfig, PrecisionRule
from jaxfound.models.execution import Execution
from jaxfound.models.layers.moe import Experts
from jaxfound.parallelism.axes import ShardingRules
from tests.models.tiny import model_config

ROWS, TOKENS, WIDTH, HIDDEN, EXPERTS, CHOICES = 8, 8, 32, 16, 8, 3
MESHES = {
    "expert2": {"expert": 2},
    "expert8": {"expert": 8},
    "data2_expert4": {"data": 2, "expert": 4},
    "fsdp2_expert2_tensor2": {"fsdp": 2, "expert": 2, "tensor": 2},
}
NAMES = ("x", "weights", "gate", "up", "down")


def permutations(count, *, of=EXPERTS, seed=0):
    """Different experts of the first `of` for each of `count` tokens."""
    rng = np.random.default_rng(seed)
    return rng.permuted(np.tile(np.arange(of), (count, 1)), axis=1)[:, :CHOICES]


def every_token_also(expert):
    chosen = permutations(ROWS * TOKENS, seed=2)
    chosen[(chosen == expert).any(axis=1)] = np.roll([expert, expert - 1, expert - 2], 1)
    chosen[~(chosen == expert).any(axis=1), 1] = expert
    return chosen


ROUTINGS = {
    "even": permutations(ROWS * TOKENS),
    "every token to one expert": every_token_also(5),
    "every token to the same three experts": np.tile([2, 0, 1], (ROWS * TOKENS, 1)),
    "half of the experts get nothing": permutations(ROWS * TOKENS, of=4, seed=1),
}


@dataclass(frozen=True)
class Layer:
    """A compiled layer: its output and gradients of arguments and kernels, by routing."""

    compiled: jax.stages.Compiled
    places: tuple

    def results(self, routing):
        arguments = (*operands(), ROUTINGS[routing].reshape(ROWS, TOKENS, CHOICES))
        return jax.tree.map(np.asarray, self.compiled(*jax.device_put(arguments, self.places)))


def operands():
    rng = np.random.default_rng(3)
    shapes = (
        (ROWS, TOKENS, WIDTH),
        (ROWS, TOKENS, CHOICES),
        (EXPERTS, WIDTH, HIDDEN),
        (EXPERTS, WIDTH, HIDDEN),
        (EXPERTS, HIDDEN, WIDTH),
    )
    return tuple(rng.normal(0, 0.5, shape).astype(np.float32) for shape in shapes)


def mesh_of(degrees, devices):
    grid = np.array(devices).reshape([degrees.get(axis, 1) for axis in AXES])
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def lowered(degrees, devices, shapes, *, execution):
    """The layer's output and gradients on a mesh, lowered, and where its arguments lie."""
    mesh, rules = mesh_of(degrees, devices), execution.rules
    config = model_config("mla_moe_mtp", embed_dim=shapes[0].shape[2])
    sizes = {"num_experts": shapes[2].shape[0], "expert_dim": shapes[2].shape[2]}
    config = config.model_copy(update={"moe": config.moe.model_copy(update=sizes)})
    frame = nnx.eval_shape(
        lambda: Experts(config, rngs=nnx.Rngs(0), execution=execution, path="experts")
    )
    graph, state = nnx.split(frame)
    variables = dict(nnx.to_flat_state(state))

    def layer(x, weights, gate, up, down, experts):
        values = {"gate": gate, "up": up, "down": down}
        flat = [(path, v.replace(values[path[-1]])) for path, v in variables.items()]
        mixed = nnx.merge(graph, nnx.from_flat_state(flat))(x, experts, weights)
        # A gradient of its own for every channel of every token.
        wave = jnp.sin(jnp.arange(mixed.size, dtype=jnp.float32)).reshape(mixed.shape)
        return (wave * mixed).sum(), mixed

    def step(*arguments):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            grads, mixed = jax.grad(layer, tuple(range(5)), has_aux=True)(*arguments)
            grads = jax.tree.map(jax.lax.with_sharding_constraint, grads, places[:5])
            return {"mixed": mixed, **dict(zip(NAMES, grads, strict=True))}

    rows = NamedSharding(mesh, rules.activation_spec(("batch", "seq", None)))
    wide = NamedSharding(mesh, rules.param_spec(("experts", "embed", "ffn")))
    narrow = NamedSharding(mesh, rules.param_spec(("experts", "ffn", "embed")))
    places = (rows, rows, wide, wide, narrow, rows)
    structs = [
        jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place)
        for s, place in zip(shapes, places, strict=True)
    ]
    return jax.jit(step).lower(*structs), places


@cache
def layer_on(name, format="float32"):
    degrees = MESHES.get(name, {})
    devices = jax.devices()[: int(np.prod(list(degrees.values())))]
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in operands()]
    shapes.append(jax.ShapeDtypeStruct((ROWS, TOKENS, CHOICES), jnp.int32))
    rules = ShardingRules(degrees=tuple(degrees.get(axis, 1) for axis in AXES))
    precision = PrecisionConfig(
        compute="float32", rules=(PrecisionRule(pattern="experts", format=format),)
    )
    execution = Execution(precision=precision, rules=rules)
    program, places = lowered(degrees, devices, shapes, execution=execution)
    return Layer(program.compile(), places)


def crossed(text, degrees):
    sizes = {axis: degrees.get(axis, 1) for axis in AXES}
    found = ((c.kind, axes_crossed(c, sizes)) for c in collectives(text))
    return [(kind, axes) for kind, axes in found if axes]
