"""FLOPs of a step and the seconds they take: a matmul of a [K N] matrix is 2 K N a token."""

from collections.abc import Mapping
from typing import NamedTuple

from jaxfound.config.model import ModelConfig
from jaxfound.config.params import ParamSpec
from jaxfound.parallelism.layout import Layout, is_shared, stack_size
from jaxfound.parallelism.pipeline.facts import lockstep_work
from jaxfound.resources.topology import Topology

# A training step is a forward pass and a backward pass of twice the work.
PASSES = 3
# With stages: a forward pass, the same again, and the backward pass.
AGAIN_PASSES = 4

# Share of the published dense peak that the model's FLOPs (causal, recomputation not counted)
# reached: plain JAX on one H200 in bfloat16, dense models of 1.3 and 2.7 B, means of the runs of
# each policy. Other models and devices are taken to reach as much.
EFFICIENCY: Mapping[str, float] = {"none": 0.42, "matmul_outputs": 0.45, "full": 0.41}


def real_elements(spec: ParamSpec, model: ModelConfig) -> int:
    """Return the elements of an array without the rows that pad the vocabulary."""
    if "vocab" in spec.dims:
        return spec.size // model.padded_vocab_size * model.vocab_size
    return spec.size


def active_elements(spec: ParamSpec, model: ModelConfig) -> int:
    """Return the elements of an array that one token uses: of the experts, the chosen ones."""
    real = real_elements(spec, model)
    return real // model.moe.num_experts * model.moe.top_k if "experts" in spec.dims else real


def score_channels(model: ModelConfig) -> int:
    """Return the channels of a head that scores and mixing contract, for one pair of tokens."""
    if model.mixer == "mla":
        return model.mla.qk_head_dim + model.mla.v_head_dim
    return 2 * model.gqa.head_dim


class Flops(NamedTuple):
    """Forward FLOPs of one token.

    Attributes:
        layer: of one layer of the main stack.
        first: of the dense layers before it.
        last: of what comes after it: the head and further predictions.
        num_layers: layers of the main stack.
    """

    layer: float
    first: float
    last: float
    num_layers: int

    @property
    def total(self) -> float:
        """Of the whole model."""
        return self.layer * self.num_layers + self.first + self.last


def forward_flops(layout: Layout) -> int:
    """Return the forward FLOPs of one token, half of the scores counted, predictions ahead too."""
    return round(part_flops(layout).total)


def part_flops(layout: Layout) -> Flops:
    """Return the forward FLOPs of one token by the part of the model that does them."""
    model = layout.cfg.model
    heads = 1 + model.mtp_depth
    flops = {"main": 0.0, "first": 0.0, "last": 0.0}
    a_row = 2 * model.num_heads * score_channels(model) * (layout.cfg.train.seq_len + 1)
    for spec in layout.trained():
        part = part_of(spec)
        if spec.path.endswith("mixer_norm.scale"):
            flops[part] += stack_size(spec) * a_row // 2
        if not spec.is_matrix or (spec.path.startswith("embedding.") and not model.tie_embeddings):
            continue
        uses = heads if spec.path.startswith(("head.", "embedding.")) else 1
        flops[part] += 2 * uses * active_elements(spec, model)
    layers = max((stack_size(s) for s in layout.trained() if part_of(s) == "main"), default=1)
    return Flops(flops["main"] / layers, flops["first"], flops["last"], layers)


def part_of(spec: ParamSpec) -> str:
    """Return the part of the model that computes with a parameter; a tied embedding is the head."""
    if not is_shared(spec):
        return "main"
    return "first" if spec.path.startswith("leading.") else "last"


def step_flops(layout: Layout) -> int:
    """Return the FLOPs of one step, all devices together; recomputation does not count."""
    tokens = layout.cfg.train.batch_size * layout.cfg.train.seq_len
    return PASSES * forward_flops(layout) * tokens


def compute_seconds(layout: Layout, topology: Topology) -> float | None:
    """Return the seconds of a step's arithmetic, stages' waiting included; None without a peak."""
    busy = busy_seconds(layout, topology)
    return None if busy is None else busy * (1 + waiting(layout))


def busy_seconds(layout: Layout, topology: Topology) -> float | None:
    """Return the seconds in which a device computes, were work shared evenly; None without a peak.

    Stages run their forward pass again in their backward pass, which is a third more.
    """
    peak = topology.peak_flops.get(layout.cfg.precision.compute)
    if peak is None:
        return None
    busy = step_flops(layout) / (layout.num_devices * peak * EFFICIENCY[layout.remat])
    return busy if layout.pipeline is None else busy * AGAIN_PASSES / PASSES


def waiting(layout: Layout) -> float:
    """Return the seconds that a device waits for other stages, over those that it computes.

    By the ticks of the schedule, each as long as its busiest rank needs: waiting at both ends,
    places without a layer, and stages that have more to do than others.
    """
    if layout.pipeline is None:
        return 0.0
    return _lockstep(layout, part_flops(layout)) / _work(layout) - 1


def uneven(layout: Layout) -> float:
    """Return the share that a step takes longer than if all stages had the same to do."""
    if layout.pipeline is None:
        return 0.0
    flops, stages = part_flops(layout), layout.pipeline.schedule.num_stages
    places = stages * layout.pipeline.stages.layers_a_chunk
    even = Flops(flops.total / places, 0.0, 0.0, flops.num_layers)
    return _lockstep(layout, flops) / _lockstep(layout, even) - 1


def _lockstep(layout: Layout, flops: Flops) -> float:
    assert layout.pipeline is not None
    return lockstep_work(layout.pipeline, layer=flops.layer, first=flops.first, last=flops.last)


def _work(layout: Layout) -> float:
    """Return what a rank has to do in a step, in forward FLOPs of a micro-batch's token."""
    passes = layout.num_microbatches * AGAIN_PASSES
    return passes * part_flops(layout).total / layout.degree("pipeline")
