"""FLOPs of a step and the seconds they take: a matmul of a [K N] matrix is 2 K N a token."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from jaxfound.config.layer_formats import ruled_operations
from jaxfound.config.model import ModelConfig
from jaxfound.config.params import ParamSpec
from jaxfound.parallelism.activations import (
    everything_bytes,
    is_free,
    kept_bytes,
    num_pieces,
    tile_bytes,
)
from jaxfound.parallelism.layout import Layout, is_shared, stack_size
from jaxfound.parallelism.pipeline.facts import lockstep_work
from jaxfound.resources.topology import Topology

# A training step is a forward pass and a backward pass of twice the work.
PASSES = 3
# With stages: a forward pass, the same again, and the backward pass.
AGAIN_PASSES = 4

# Shares of published peaks. A product of 8192^3 alone reaches 80 % of an H200's on end; with the
# shapes of a step, and what lies between its kernels, 71 % were left: fitted to one measurement,
# configs/dense-1.3b.yaml at 520 ms a step, of which the memory of its program then took its part.
# Other models and devices are taken to reach as much. In 8 bits, the layers of
# configs/dense-2.7b.yaml took 243 ms for 249 TFLOP, and those of configs/dense-7b-width.yaml 120 ms
# for 129 (docs/benchmarks/train-h200.json).
PRODUCTS: Mapping[str, float] = {"bfloat16": 0.71, "float32": 0.71, "float8": 0.53}
# cuDNN's causal attention on an H200, forward and backward, reaches 45 % of the peak in rows of
# 2,048 tokens, 53 % of 4,096 and 60 % of 16,384 (docs/benchmarks/kernels-h200.json). Between the
# other kernels of a step, at the power that is left, it was at 80 % of that in models of 1.3 and
# 2.7 B parameters (docs/benchmarks/train-h200.json).
ATTENTION_SHARE, ATTENTION_HALF = 0.8 * 0.61, 700
# A copy on an H200, in the same record.
MEMORY_SHARE = 0.89
# Of attention its forward pass is 2 products and its backward pass 5, the scores again among them.
ATTENTION_PASSES = 3.5

# Bytes of memory that a step moves outside of its products, by the program that XLA compiles for an
# H200 of two dense models. Of a parameter: what AdamW reads and writes, and the gradient's norm; in
# each micro-batch it is rounded twice and its gradient widened; summed where there are several.
UPDATE_BYTES = {"adamw": 32, "muon": 24}
USE_BYTES, SUM_BYTES = 18, 12
# Of one that fsdp cuts each device rounds its own part; whole it is written twice, and a gradient.
GATHERED_BYTES = 6
# A product in eight bits rounds its operands first, along both dims in one kernel: 4.3 bytes for
# each token and channel that goes in or comes out, by the same compiled programs, at 2.6 TB/s where
# a copy reaches 4.3 (one H200, 16,384 x 6,912).
ROUNDING_BYTES = 4.3 * 4.3 / 2.6
# How often memory sees what a layer makes and does not only move (`activations.everything_bytes`),
# by policy: what is computed again need not be kept, and is made in fewer pieces.
PASSES_OF_ARRAYS: Mapping[str, float] = {"none": 3.1, "matmul_outputs": 2.0, "full": 2.95}
# The same where the compiler chooses what is kept (`activations.is_free`).
PASSES_OF_FREE = 1.6
# A loop over layers copies what they keep into a stack, and out of it again.
STACK_PASSES = 2
# How often it sees a logit in the format of compute.
PASSES_OF_LOGITS = 9


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


class TokenFlops(NamedTuple):
    """Forward FLOPs of one token; a training step is three times as many.

    Attributes:
        products: with weights, further predictions' included; of the experts, the chosen ones.
        scores: of attention, every pair of tokens of a row counted.
        seq_len: tokens of the row.
    """

    products: int
    scores: int
    seq_len: int

    @property
    def full(self) -> int:
        """All scores counted, which is how most published figures do it."""
        return self.products + self.scores

    @property
    def causal(self) -> int:
        """Only the scores of tokens with earlier ones counted, about half of them."""
        return self.products + self.scores * (self.seq_len + 1) // (2 * self.seq_len)


def token_flops(layout: Layout) -> TokenFlops:
    """Return the forward FLOPs of one token in a row that is one document."""
    model, seq_len = layout.cfg.model, layout.cfg.train.seq_len
    mixers = [s for s in layout.trained() if s.path.endswith("mixer_norm.scale")]
    layers = sum(stack_size(spec) for spec in mixers)
    products = round(part_flops(layout).total) - layers * causal_scores(layout)
    scores = 2 * layers * model.num_heads * score_channels(model) * seq_len
    return TokenFlops(products, scores, seq_len)


def causal_scores(layout: Layout) -> int:
    """Return the FLOPs of one token's scores and mixing in one layer, earlier tokens alone."""
    model = layout.cfg.model
    return model.num_heads * score_channels(model) * (layout.cfg.train.seq_len + 1)


def forward_flops(layout: Layout) -> int:
    """Return the forward FLOPs of one token, half of the scores counted, predictions ahead too."""
    return round(part_flops(layout).total)


def part_flops(layout: Layout) -> Flops:
    """Return the forward FLOPs of one token by the part of the model that does them."""
    model = layout.cfg.model
    heads = 1 + model.mtp_depth
    flops = {"main": 0.0, "first": 0.0, "last": 0.0}
    for spec in layout.trained():
        part = part_of(spec)
        if spec.path.endswith("mixer_norm.scale"):
            flops[part] += stack_size(spec) * causal_scores(layout)
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


class Terms(NamedTuple):
    """Seconds of a step on one device by what takes them, traffic apart.

    Attributes:
        products: of matrices with weights.
        attention: scores and mixing.
        memory: what multiplies no matrices, which is as fast as memory.
        waiting: for other stages.
    """

    products: float
    attention: float
    memory: float
    waiting: float

    @property
    def busy(self) -> float:
        """In which the device computes."""
        return self.products + self.attention + self.memory

    @property
    def total(self) -> float:
        """Of all terms."""
        return self.busy + self.waiting


def compute_terms(layout: Layout, topology: Topology) -> Terms | None:
    """Return the seconds of a step by what takes them; None where a peak is not known.

    Work is taken to be shared evenly by the devices, but for what stages wait.
    """
    peaks: dict[str, float] = {str(k): flops for k, flops in topology.peak_flops.items()}
    compute = layout.cfg.precision.compute
    if compute not in peaks or not topology.memory_bps:
        return None
    seq_len, flops = layout.cfg.train.seq_len, token_flops(layout)
    tokens = layout.cfg.train.batch_size * seq_len / layout.num_devices
    products = sum(
        tokens * amount / (peaks.get(kind, peaks[compute]) * PRODUCTS[kind])
        for kind, amount in product_flops(layout).items()
    )
    share = ATTENTION_SHARE * seq_len / (seq_len + ATTENTION_HALF)
    scores = (flops.causal - flops.products) * (ATTENTION_PASSES + layers_again(layout))
    attention = tokens * scores / (peaks[compute] * share)
    memory = memory_bytes(layout) / (topology.memory_bps * MEMORY_SHARE)
    busy = products + attention + memory
    return Terms(products, attention, memory, waiting(layout) * busy)


def layers_again(layout: Layout) -> int:
    """Return how often layers run their forward pass again in the backward pass, products too."""
    return (layout.pipeline is not None) + (layout.remat == "full")


def product_flops(layout: Layout) -> dict[str, float]:
    """Return the FLOPs of one token's products in a step, by number format, done again included.

    The head's are done again where logits are made in chunks.
    """
    flops = token_flops(layout)
    head = 2 * layout.cfg.model.embed_dim * layout.cfg.model.vocab_size
    chunked = layout.chunk_tokens < layout.row_tokens or layout.pipeline is not None
    layers = max(flops.products - head * (1 + layout.cfg.model.mtp_depth), 0)
    total = PASSES * flops.products + layers_again(layout) * layers + chunked * head
    rounded = sum(
        2 * active_elements(spec, layout.cfg.model)
        for spec in layout.trained()
        if spec.is_matrix and format_of(spec, layout) == "fp8"
    )
    eight = rounded * (PASSES + layers_again(layout))
    return {layout.cfg.precision.compute: float(total - eight), "float8": float(eight)}


def format_of(spec: ParamSpec, layout: Layout) -> str:
    """Return the format in which the product with a matrix is asked for, rules for layers apart."""
    operation, precision = spec.path.rpartition(".")[0], layout.cfg.precision
    ruled = operation in ruled_operations(layout.params)
    return precision.format_of(operation) if ruled else precision.compute


def memory_bytes(layout: Layout) -> float:
    """Return the bytes that a device moves in a step outside of products and attention.

    Rounding counts as what a copy would move meanwhile.
    """
    trained, pieces = list(layout.trained()), layout.num_microbatches
    held = sum(layout.elements(s, layout.rules.slot_axes) for s in trained)
    own = sum(layout.elements(s, layout.rules.param_axes) for s in trained)
    gathered = sum(layout.used_elements(s) for s in trained) - own
    each = USE_BYTES + (SUM_BYTES if pieces > 1 else 0)
    weights = UPDATE_BYTES[layout.cfg.optimizer.name] * held
    weights += pieces * (each * own + GATHERED_BYTES * gathered)
    share = pieces / layout.degree("pipeline")
    is_chosen = is_free(layout, in_a_row=layout.cfg.model.num_layers)
    passes = PASSES_OF_FREE if is_chosen else PASSES_OF_ARRAYS[layout.remat]
    arrays = passes * made_bytes(layout)
    if layout.cfg.parallel.layers_per_scan_step != "all":
        arrays += STACK_PASSES * sum(kept_bytes(replace(layout, pipeline=None)))
    vocab = layout.channels("vocab", layout.cfg.model.padded_vocab_size)
    logits = PASSES_OF_LOGITS * layout.tokens * vocab * layout.compute_bytes
    rounded = ROUNDING_BYTES * layout.tokens * rounded_channels(layout)
    return float(weights + share * (arrays + logits + rounded))


def rounded_channels(layout: Layout) -> int:
    """Return the channels that go into products in eight bits and come out of them, all layers'.

    Of experts those of the chosen ones.
    """
    total, model = 0, layout.cfg.model
    for spec in layout.trained():
        if spec.is_matrix and format_of(spec, layout) == "fp8":
            experts = "experts" in spec.dims
            size = spec.size // stack_size(spec) // (model.moe.num_experts if experts else 1)
            inputs = model.embed_dim if "embed" in spec.dims else spec.shape[-1]
            chosen = model.moe.top_k if experts else 1
            total += stack_size(spec) * chosen * (inputs + size // inputs)
    return total


def made_bytes(layout: Layout) -> int:
    """Return the bytes of what all layers make of a micro-batch, its router being even.

    The ledger has room for the worst router; tiles that no token is in are not computed.
    """
    model, whole = layout.cfg.model, replace(layout, pipeline=None)
    routed = model.ffn == "moe"
    num_dense = model.num_leading_layers if routed else model.num_layers + model.mtp_depth
    made = num_dense * everything_bytes(whole, False)
    if not routed:
        return made
    made += (model.num_moe_layers + model.mtp_depth) * everything_bytes(whole, True)
    row = 6 * layout.channels("ffn", model.moe.expert_dim) + model.embed_dim
    even = layout.tokens * model.moe.top_k * row * layout.compute_bytes
    kept = tile_bytes(layout) if num_pieces(layout) == 1 else 0
    return made + (model.num_moe_layers + model.mtp_depth) * (even - kept)


def compute_seconds(layout: Layout, topology: Topology) -> float | None:
    """Return the seconds of a step without traffic, waiting included; None without peaks."""
    terms = compute_terms(layout, topology)
    return None if terms is None else terms.total


def busy_seconds(layout: Layout, topology: Topology) -> float | None:
    """Return the seconds in which a device computes, work shared evenly; None without peaks."""
    terms = compute_terms(layout, topology)
    return None if terms is None else terms.busy


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
