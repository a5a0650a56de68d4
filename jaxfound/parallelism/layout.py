"""One way to run a config: what the bytes and the seconds of a plan are counted from."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxfound.config.parallel import AXES, AxisName
from jaxfound.config.params import LAYER_DIMS, ParamSpec, ParamTable
from jaxfound.config.run import RunConfig
from jaxfound.parallelism.axes import ACTIVATION_AXES, BATCH_AXES, Axes, Dims, ShardingRules
from jaxfound.parallelism.pipeline.facts import Pipeline

FLOAT32_BYTES = 4
# The dim that stages cut.
STAGED_DIM = "layers"
FORMAT_BYTES = {"float32": 4, "bfloat16": 2}
# Where a parameter is kept, or lies while it is used: a method of the rules.
type Place = Callable[[Dims, tuple[int, ...]], Axes]


class PackedRows(NamedTuple):
    """What the packed rows of a text ask of attention.

    Attributes:
        places: documents of a row that attention has places for.
        fit: whether every row's do; if not, a program holds room for attention that writes its
            scores out too.
    """

    places: int
    fit: bool


@dataclass(frozen=True)
class Layout:
    """A config, its parameters and the axes that cut them.

    Attributes:
        cfg: what was asked.
        params: the model's parameters.
        rules: which axes cut which dims, with the degrees and the ZeRO stage.
        remat: recomputation policy.
        num_microbatches: pieces of the global batch.
        pipeline: the schedule of the stages; None without stages.
        packed: the rows, where the text is known; None for as many places as the kernel's default,
            which fit.
    """

    cfg: RunConfig
    params: ParamTable
    rules: ShardingRules
    remat: str
    num_microbatches: int
    pipeline: Pipeline | None = None
    packed: PackedRows | None = None

    def degree(self, axis: AxisName) -> int:
        """Return the devices along `axis`."""
        return self.rules.degree(axis)

    @property
    def num_devices(self) -> int:
        """Devices of the layout."""
        return math.prod(self.degree(axis) for axis in AXES)

    @property
    def rows(self) -> int:
        """Rows of one device in one micro-batch."""
        pieces = self.num_microbatches * math.prod(self.degree(a) for a in BATCH_AXES)
        return max(self.cfg.train.batch_size // pieces, 1)

    @property
    def row_tokens(self) -> int:
        """Tokens of a row that one device holds."""
        return -(-self.cfg.train.seq_len // self.degree("context"))

    @property
    def tokens(self) -> int:
        """Tokens of one device in one micro-batch."""
        return self.rows * self.row_tokens

    @property
    def stream_tokens(self) -> int:
        """Tokens of one device in one micro-batch between blocks, in the residual stream."""
        return self.tokens // (self.degree("tensor") if self.rules.cuts_stream else 1)

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a row whose logits exist at one time."""
        return min(self.cfg.train.loss_chunk or self.row_tokens, self.row_tokens)

    @property
    def compute_bytes(self) -> int:
        """Bytes of an activation's element."""
        return FORMAT_BYTES[self.cfg.precision.compute]

    @property
    def num_layers(self) -> int:
        """Layers that the busiest device runs for a micro-batch, further predictions' included."""
        model = self.cfg.model
        if self.pipeline is None:
            return model.num_layers + model.mtp_depth
        return self.pipeline.layers_run + max(model.num_leading_layers, model.mtp_depth)

    @property
    def recomputes(self) -> bool:
        """Whether the backward pass runs a layer's forward pass again."""
        return self.remat != "none"

    @property
    def forward_passes(self) -> int:
        """Times that a layer's forward pass runs: stages keep their input alone and run it again.

        A policy of recomputation then runs each layer of the stage once more.
        """
        return 1 + (self.pipeline is not None) + self.recomputes

    def stored_shape(self, spec: ParamSpec) -> tuple[int, ...]:
        """Return the shape in which a parameter is stored: of the main stack, every place."""
        if self.pipeline is None:
            return spec.shape
        places = self.pipeline.num_places
        sizes = zip(spec.dims, spec.shape, strict=True)
        return tuple(places if dim == STAGED_DIM else size for dim, size in sizes)

    def stored(self) -> ParamTable:
        """Return the parameters in the shapes in which they are stored."""
        return ParamTable(tuple(replace(s, shape=self.stored_shape(s)) for s in self.params))

    def layers_here(self, spec: ParamSpec) -> int:
        """Return the layers of one device that are stacked in an array."""
        if self.pipeline is not None and STAGED_DIM in spec.dims:
            return self.pipeline.layers_held
        return stack_size(spec)

    def elements(self, spec: ParamSpec, place: Place) -> int:
        """Return the elements of a parameter, its gradient or a moment on one device."""
        shape = self.stored_shape(spec)
        cuts = (self.rules.pieces(axes) for axes in place(spec.dims, shape))
        return math.prod(-(-n // cut) for n, cut in zip(shape, cuts, strict=True))

    def used_elements(self, spec: ParamSpec) -> int:
        """Return the elements on one device while the parameter is used: whole over fsdp."""
        return self.elements(spec, lambda dims, _: self.rules.used_axes(dims))

    def trained(self) -> Iterator[ParamSpec]:
        """Yield the parameters that the optimizer moves."""
        return (spec for spec in self.params if spec.kind == "param")

    def channels(self, dim: str, size: int) -> int:
        """Return how many of the `size` channels of an activation's dim one device computes."""
        split = dim not in self.rules.unsplit and "tensor" in ACTIVATION_AXES.get(dim, ())
        return -(-size // self.degree("tensor")) if split else size


def in_layer(spec: ParamSpec) -> bool:
    """Return whether a parameter is of a decoder layer, further predictions' included."""
    return ".mixer" in spec.path or ".ffn" in spec.path


def stack_size(spec: ParamSpec) -> int:
    """Return the layers that are stacked in one array."""
    return next((n for d, n in zip(spec.dims, spec.shape, strict=True) if d in LAYER_DIMS), 1)


def is_shared(spec: ParamSpec) -> bool:
    """Return whether every rank of a pipeline holds a parameter whole: it is of no stage's layers.

    The embedding and the dense layers before the main stack run on the first stage, the last norm,
    the head and further predictions on the last.
    """
    return STAGED_DIM not in spec.dims


def runs_first(spec: ParamSpec) -> bool:
    """Return whether a shared parameter is the first stage's; the others are the last's."""
    return spec.path.startswith(("embedding.", "leading."))
