"""Models as arrays: described without any, or born already sharded."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxfound.config.model import ModelConfig
from jaxfound.config.params import LAYER_DIMS, ParamSpec, ParamTable
from jaxfound.models.decoder import Decoder
from jaxfound.models.execution import ONE_DEVICE, Execution
from jaxfound.models.layers.linear import Linear
from jaxfound.models.layers.parameter import Buffer
from jaxfound.parallelism.pipeline.pipelining import layers_of

# An array; in an `Arrays` that describes another, its shape or its sharding.
Leaf = Any


def abstract(cfg: ModelConfig, *, execution: Execution = ONE_DEVICE) -> Decoder:
    """Return the model with shapes in place of arrays; nothing is allocated."""
    return nnx.eval_shape(lambda: Decoder(cfg, rngs=nnx.Rngs(0), execution=execution))


def describe(cfg: ModelConfig) -> ParamTable:
    """Return every parameter and buffer of the model as plain data."""
    return _described(cfg.model_dump_json())


@cache
def _described(model: str) -> ParamTable:
    """Return the table of a model given as JSON: it is asked for often, and traced once."""
    cfg = ModelConfig.model_validate_json(model)
    specs = []
    for path, variable in nnx.to_flat_state(nnx.state(abstract(cfg))):
        value = variable.get_value()
        specs.append(
            ParamSpec(
                path=dotted(path),
                shape=shape_of(variable),
                dtype=np.dtype(value.dtype).name,
                dims=dims_of(variable),
                kind="buffer" if isinstance(variable, Buffer) else "param",
            )
        )
    return ParamTable(tuple(specs))


def build(
    cfg: ModelConfig,
    *,
    execution: Execution = ONE_DEVICE,
    seed: int = 0,
    mesh: Mesh | None = None,
) -> Decoder:
    """Return the model with fresh weights, each array created where the mesh keeps it.

    Args:
        cfg: what the model is.
        execution: how it runs here; stages are left out, a model that is called has all layers.
        seed: of the weights; the same seed gives the same weights on every mesh.
        mesh: from `build_mesh`; None builds on the default device.
    """
    frame = Frame(cfg, execution=execution.whole)
    shardings = None if mesh is None else frame.shardings(mesh)
    return frame.bind(*jax.jit(frame.fresh, static_argnums=0, out_shardings=shardings)(seed))


class Frame:
    """A model without its arrays: turns a flat dict of arrays back into a Decoder inside a trace.

    Training keeps arrays as plain dicts keyed by the ParamTable's paths: cheap to dispatch,
    readable in a checkpoint, and independent of the module library. In a pipeline the arrays of the
    main stack are stored chunk by chunk (`StageLayers`); `natural` puts their layers in order.
    """

    def __init__(self, cfg: ModelConfig, *, execution: Execution = ONE_DEVICE) -> None:
        model = abstract(cfg, execution=execution)
        self.cfg = cfg
        self.execution = execution
        self._graph, state = nnx.split(model)
        self._variables = dict(nnx.to_flat_state(state))
        # Linear operations by the path of their kernel, shapes in place of arrays.
        self.linears = {
            f"{dotted(path)}.kernel": module
            for path, module in nnx.iter_modules(model)
            if isinstance(module, Linear)
        }
        pipelining, num_layers = execution.pipelining, cfg.num_layers - cfg.num_leading_layers
        self.stages = None if pipelining is None else layers_of(pipelining, num_layers)

    def bind(self, *arrays: Mapping[str, Leaf]) -> Decoder:
        """Return the model with these arrays; together they cover every path exactly once.

        Raises:
            KeyError: if a path is missing or is not the model's; the message names it.
        """
        merged = {path: a for group in arrays for path, a in group.items()}
        wanted = {dotted(path) for path in self._variables}
        if merged.keys() != wanted:
            raise KeyError(
                f"these arrays are not this model's: missing {sorted(wanted - merged.keys())}, "
                f"unknown {sorted(merged.keys() - wanted)}"
            )
        flat = [(p, v.replace(merged[dotted(p)])) for p, v in self._variables.items()]
        return nnx.merge(self._graph, nnx.from_flat_state(flat))

    def shardings(self, mesh: Mesh) -> "Arrays":
        """Return where each array lives on `mesh`."""
        spec = self.execution.rules.param_spec
        return self._grouped(lambda v: NamedSharding(mesh, spec(dims_of(v), self._stored_shape(v))))

    def slot_shardings(self, mesh: Mesh) -> dict[str, NamedSharding]:
        """Return where the moments of each parameter live on `mesh`."""
        spec = self.execution.rules.slot_spec
        return self._grouped(
            lambda v: NamedSharding(mesh, spec(dims_of(v), self._stored_shape(v)))
        ).params

    def constrain_grads(self, grads: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Return gradients by path, each pinned to its place while micro-batches are summed."""
        return self._pinned(self.execution.rules.constrain_grad, grads)

    def constrain_slots(self, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Return arrays by parameter path, each pinned to where the parameter's moments lie."""
        return self._pinned(self.execution.rules.constrain_slot, arrays)

    def shapes(self) -> "Arrays":
        """Return the shape and format of each array as it is stored."""
        return self._grouped(
            lambda v: jax.ShapeDtypeStruct(self._stored_shape(v), v.get_value().dtype)
        )

    @property
    def num_copies(self) -> int:
        """How often each layer of the main stack is stored."""
        return 1 if self.stages is None else self.stages.places.count(0)

    def layers_of(self, path: str) -> tuple[int, ...] | tuple[None]:
        """Return the numbers in the model of the layers that are stacked in an array.

        None stands for the only one where there is no stack.
        """
        groups = self._grouped(lambda v: (dims_of(v)[0], shape_of(v)[0]))
        dim, count = {**groups.params, **groups.buffers}[path]
        if dim not in LAYER_DIMS:
            return (None,)
        first = 0 if dim == "leading_layers" else self.cfg.num_leading_layers
        return tuple(range(first, first + count))

    def dims(self) -> "Arrays":
        """Return the logical names of each array's dims."""
        return self._grouped(dims_of)

    def stored(self, arrays: Mapping[str, Leaf]) -> dict[str, Leaf]:
        """Return natural arrays by path as they are stored: zeros where a place has no layer."""
        stages = self.stages
        if stages is None or stages.is_natural:
            return dict(arrays)
        places = np.asarray(stages.places)

        def store(array: Leaf) -> Leaf:
            there = (places >= 0).reshape(-1, *[1] * (array.ndim - 1))
            return jnp.where(there, array[np.maximum(places, 0)], jnp.zeros((), array.dtype))

        return {p: store(a) if in_main_stack(p) else a for p, a in arrays.items()}

    def natural(self, arrays: Mapping[str, Leaf]) -> dict[str, Leaf]:
        """Return stored arrays by path with the layers of the main stack once each, in order."""
        stages = self.stages
        if stages is None or stages.is_natural:
            return dict(arrays)
        first = stages.place_of_layer()
        return {p: a[first] if in_main_stack(p) else a for p, a in arrays.items()}

    def fresh(self, seed: int) -> "Arrays":
        """Return new weights; the same seed gives the same weights on every mesh.

        Call it under jit with `shardings` as out_shardings, so that arrays are born in place.
        """
        model = Decoder(self.cfg, rngs=nnx.Rngs(seed), execution=self.execution)
        return Arrays(*map(self.stored, arrays_of(model)))

    def _stored_shape(self, variable: nnx.Variable) -> tuple[int, ...]:
        shape = shape_of(variable)
        cut = self.stages is not None and "layers" in dims_of(variable)
        return (len(self.stages.places), *shape[1:]) if self.stages and cut else shape

    def _pinned(
        self, pin: Callable[..., jax.Array], arrays: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        dims = self.dims().params
        return {path: pin(array, *dims[path]) for path, array in arrays.items()}

    def _grouped(self, of: Callable[[nnx.Variable], Leaf]) -> "Arrays":
        return _split(((p, v, of(v)) for p, v in self._variables.items()))


class Arrays(NamedTuple):
    """The arrays of a model by dotted path; or their shapes, or their shardings.

    Attributes:
        params: of what the optimizer trains.
        buffers: of what it does not touch.
    """

    params: dict[str, Leaf]
    buffers: dict[str, Leaf]


def arrays_of(model: Decoder) -> Arrays:
    """Return the model's arrays as two flat dicts."""
    flat = nnx.to_flat_state(nnx.state(model))
    return _split((path, v, v.get_value()) for path, v in flat)


def dims_of(variable: nnx.Variable) -> tuple[str | None, ...]:
    """Return the logical name of each dim of a model's variable."""
    return tuple(variable.get_metadata()["out_sharding"])


def shape_of(variable: nnx.Variable) -> tuple[int, ...]:
    """Return the sizes of a variable's dims."""
    return tuple(variable.get_value().shape)


def in_main_stack(path: str) -> bool:
    """Return whether an array is of the layers that a pipeline cuts."""
    return path.startswith("layers.")


def dotted(path: Iterable[Hashable]) -> str:
    """Return a module path as the ParamTable writes it."""
    return ".".join(str(part) for part in path)


def _split(entries: Iterable[tuple[tuple[Hashable, ...], nnx.Variable, Leaf]]) -> Arrays:
    groups = Arrays({}, {})
    for path, variable, value in entries:
        group = groups.buffers if isinstance(variable, Buffer) else groups.params
        group[dotted(path)] = value
    return groups
