"""FLOPs of a step and the seconds they take: a matmul of a [K N] matrix is 2 K N a token."""

from collections.abc import Mapping

from jaxfound.config.model import ModelConfig
from jaxfound.config.params import ParamSpec
from jaxfound.parallelism.layout import Layout, stack_size
from jaxfound.resources.topology import Topology

# A training step is a forward pass and a backward pass of twice the work.
PASSES = 3

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


def forward_flops(layout: Layout) -> int:
    """Return the forward FLOPs of one token, half of the scores counted, predictions ahead too."""
    model = layout.cfg.model
    heads = 1 + model.mtp_depth
    matmuls = 0
    for spec in layout.trained():
        if not spec.is_matrix:
            continue
        is_head = spec.path.startswith("head.")
        if spec.path.startswith("embedding.") and not model.tie_embeddings:
            continue
        uses = heads if is_head or spec.path.startswith("embedding.") else 1
        matmuls += 2 * uses * active_elements(spec, model)
    layers = sum(stack_size(s) for s in layout.trained() if s.path.endswith("mixer_norm.scale"))
    scores = 2 * layers * model.num_heads * score_channels(model)
    return matmuls + scores * (layout.cfg.train.seq_len + 1) // 2


def step_flops(layout: Layout) -> int:
    """Return the FLOPs of one step, all devices together; recomputation does not count."""
    tokens = layout.cfg.train.batch_size * layout.cfg.train.seq_len
    return PASSES * forward_flops(layout) * tokens


def compute_seconds(layout: Layout, topology: Topology) -> float | None:
    """Return the seconds of a step's arithmetic, stages' waiting included; None without a peak."""
    compute = layout.cfg.precision.compute
    peak = topology.peak_flops.get(compute)
    if peak is None:
        return None
    busy = step_flops(layout) / (layout.num_devices * peak * EFFICIENCY[layout.remat])
    return busy / (1 - bubble(layout))


def bubble(layout: Layout) -> float:
    """Return the share of a step in which a pipeline stage waits, of a 1F1B schedule.

    (P - 1) / (M + P - 1) for P stages and M micro-batches (Narayanan et al., 2021, section 2.2).
    """
    stages = layout.degree("pipeline")
    return (stages - 1) / (layout.num_microbatches + stages - 1)
