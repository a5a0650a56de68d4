"""Bytes that a layer keeps for its backward pass, by what it computes; nothing is traced.

The counts are of the arrays that the residuals of `models.decoder.walk` hold, in elements a token:
the tests trace the real layers and compare.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxfound.config.model import ModelConfig
from jaxfound.parallelism.layout import FLOAT32_BYTES, Layout

# Rows of one tile of an expert's tokens: each expert's are padded to a multiple of it.
TILE_ROWS = 128
# An element in 8 bits, and its share of the scale of 128.
EIGHT_BIT_BYTES = 1 + 4 / 128
# Bytes of the rows in which tokens are exchanged at one time, at most.
PIECE_BYTES = 2 * 2**30
# Documents in a row that attention keeps softmax statistics for: one for every 128 tokens, from 8
# to 64.
TOKENS_PER_SEGMENT, MIN_SEGMENTS, MAX_SEGMENTS = 128, 8, 64


class Kept(NamedTuple):
    """What layers of one device keep of the micro-batch in its backward pass.

    Attributes:
        leading: the dense layers before the main stack.
        main: the main stack's; of stages, those of one chunk.
        ahead: the layers of further predictions.
    """

    leading: int
    main: int
    ahead: int


def kept_bytes(layout: Layout) -> Kept:
    """Return what layers keep for the backward pass of one micro-batch.

    Of the others a stage keeps its input alone: `stage_slot_bytes`.
    """
    model, staged = layout.cfg.model, layout.pipeline
    routed, num_leading = model.ffn == "moe", model.num_leading_layers
    num_main = model.num_layers - num_leading
    if staged is not None:
        num_main = staged.stages.layers_a_chunk
    return Kept(
        leading=num_leading * layer_bytes(layout, False, in_a_row=num_leading),
        main=num_main * layer_bytes(layout, routed, in_a_row=num_main),
        ahead=model.mtp_depth * layer_bytes(layout, routed, in_a_row=1),
    )


def layer_bytes(layout: Layout, routed: bool, *, in_a_row: int) -> int:
    """Return what one of so many stacked layers keeps."""
    kept = operands_bytes if is_free(layout, in_a_row=in_a_row) else KEPT[layout.remat]
    return kept(layout, routed)


def widest_layer_bytes(layout: Layout) -> int:
    """Return what the layer that keeps the most keeps, of a stack that is no loop."""
    model = layout.cfg.model
    kinds = [False] * has_dense_layers(model) + [True] * (model.ffn == "moe")
    return max(layer_bytes(layout, routed, in_a_row=model.num_layers) for routed in kinds)


def is_free(layout: Layout, *, in_a_row: int) -> bool:
    """Return whether the compiler chooses what so many stacked layers keep, all being allowed.

    It does where no loop goes over them, nothing is gathered and no other tick comes between
    (`remat.rematerialize`): then it makes again what is made element by element.
    """
    step = layout.cfg.parallel.layers_per_scan_step
    unrolled = step == "all" or step >= in_a_row
    whole = layout.pipeline is None and not layout.rules.cuts_parameters
    return layout.remat == "none" and unrolled and whole


def stage_slot_bytes(layout: Layout) -> int:
    """Return what a rank of a pipeline holds for other ticks: slots of its schedule's tables.

    Inputs of its stages, gradients of their outputs, and of micro-batches between I and W what the
    gradients of a chunk's weights are made from; one slot of each more, for what nobody needs.
    """
    staged = layout.pipeline
    if staged is None:
        return 0
    routed = layout.cfg.model.ffn == "moe"
    rows = (staged.num_input_slots + 1 + staged.num_grad_slots + 1) * stream_bytes(layout, routed)
    if not staged.schedule.splits_backward:
        return rows
    chunk = staged.stages.layers_a_chunk * weight_grad_bytes(layout, routed)
    return rows + (staged.num_kept_slots + 1) * chunk


def weight_grad_bytes(layout: Layout, routed: bool) -> int:
    """Return the bytes from which the gradients of a layer's weights follow without a product.

    The stream before and after the mixer and the gradients of what was added to it; the mixer's
    products, inputs and gradients of outputs; of a SwiGLU gate, up and the gradient of what they
    make. The rest is moved or made element by element again. It is the minimum cut of
    pipeline/split.py, whatever the policy of recomputation.
    """
    model, degree = layout.cfg.model, layout.degree("context")
    heads = layout.channels("heads", model.num_heads)
    if model.mixer == "mla":
        mla = model.mla
        whole = heads * (mla.qk_nope_head_dim + mla.v_head_dim) + mla.kv_lora_rank
        mixer = 2 * mla.q_lora_rank + mla.kv_lora_rank + mla.qk_rope_head_dim + degree * whole
        mixer += heads * (mla.v_head_dim + mla.qk_head_dim)
    else:
        kv_heads = layout.channels("kv_heads", model.gqa.num_kv_heads)
        mixer = 2 * (heads + kv_heads) * model.gqa.head_dim
    shared = model.moe.num_shared_experts * model.moe.expert_dim
    hidden = layout.channels("ffn", shared if routed else model.ffn_dim)
    width = mixer + 3 * hidden
    scores = model.moe.num_experts * FLOAT32_BYTES if routed else 0
    tokens = layout.tokens * (width * layout.compute_bytes + scores)
    tokens += 4 * stream_bytes(layout, routed)
    return tokens + (expert_grad_bytes(layout) if routed else 0)


def expert_grad_bytes(layout: Layout) -> int:
    """Return the bytes from which the gradients of a layer's experts follow without a product.

    Rows of tiles in the worst case: those of inputs and of what the experts make of them, and of
    gradients. Tokens that are exchanged in pieces pass a loop, which cannot be cut: its backward
    pass makes the gradients themselves, in the format of compute.
    """
    width, here = layout.cfg.model.embed_dim, experts_here(layout)
    hidden = layout.channels("ffn", layout.cfg.model.moe.expert_dim)
    if num_pieces(layout) > 1:
        return here * 3 * width * hidden * layout.compute_bytes
    return layout.compute_bytes * tile_rows(layout) * (2 * width + 3 * hidden)


def gathered_bytes(layout: Layout) -> int:
    """Return the bytes of all tokens at the products of a block, where the stream has a part.

    Its input and the gradient of its output, gathered.
    """
    if not layout.rules.cuts_stream:
        return 0
    return 2 * layout.tokens * layout.cfg.model.embed_dim * layout.compute_bytes


def has_dense_layers(model: ModelConfig) -> bool:
    """Return whether some layer has a dense feed-forward, further predictions' apart."""
    return model.num_layers > model.num_moe_layers


def stream_bytes(layout: Layout, routed: bool) -> int:
    """Return the bytes of a layer's input: all that is kept when everything is recomputed."""
    del routed
    return layout.stream_tokens * layout.cfg.model.embed_dim * layout.compute_bytes


def products_bytes(layout: Layout, routed: bool) -> int:
    """Return the bytes of a layer's input, of its products with weights and of its attention.

    The last product of the feed-forward is not among them: only the sum after it is used. Nor is
    attention of rows that are cut over `context`: it is no kernel, and is computed again.
    """
    model, moe = layout.cfg.model, layout.cfg.model.moe
    heads = layout.channels("heads", model.num_heads)
    if model.mixer == "mla":
        mla = model.mla
        mixer = mla.q_lora_rank + mla.kv_lora_rank + mla.qk_rope_head_dim
        whole = layout.degree("context") * (mla.qk_nope_head_dim + mla.v_head_dim)
        mixer += heads * (mla.qk_head_dim + whole)
        value_dim = mla.v_head_dim
    else:
        kv_heads = layout.channels("kv_heads", model.gqa.num_kv_heads)
        mixer = (heads + 2 * kv_heads) * model.gqa.head_dim
        value_dim = model.gqa.head_dim
    attention = 0
    if layout.degree("context") == 1:
        attention = statistics_bytes(layout, heads)
        mixer += heads * value_dim
    hidden = moe.num_shared_experts * moe.expert_dim if routed else model.ffn_dim
    width = mixer + 2 * layout.channels("ffn", hidden)
    scores = moe.num_experts * FLOAT32_BYTES if routed else 0
    tokens = layout.tokens * (width * layout.compute_bytes + scores + attention)
    return tokens + 2 * stream_bytes(layout, routed)


class Arrays(NamedTuple):
    """How many arrays there are of each kind, a token.

    Attributes:
        stream_bytes: of the residual stream and its two norms, for each channel.
        latent_bytes: of a latent and its norm, for each channel.
        hidden: of a SwiGLU, in the format of compute.
    """

    stream_bytes: int
    latent_bytes: int
    hidden: int


def everything_bytes(layout: Layout, routed: bool) -> int:
    """Return the bytes of all that a layer computes and does not only move.

    Of a norm that is two float32 arrays and the result; of a SwiGLU gate, its sigmoid and product,
    up, and their products.

    Args:
        layout: of one micro-batch.
        routed: whether the layer has experts.
    """
    width = layout.compute_bytes
    found = Arrays(4 * FLOAT32_BYTES + 2 * width, 2 * FLOAT32_BYTES + width, hidden=6)
    return arrays_bytes(layout, routed, found)


def operands_bytes(layout: Layout, routed: bool) -> int:
    """Return the bytes of what a layer's products and its attention read and write.

    What lies between is made again in the kernels that need it: of a norm its input and its result
    are kept, of a SwiGLU gate, up and what they make. Operands in 8 bits are kept in these.
    """
    width = layout.compute_bytes
    arrays = arrays_bytes(layout, routed, Arrays(4 * width, 2 * width, hidden=3))
    return arrays - saved_in_8_bits(layout, routed)


def saved_in_8_bits(layout: Layout, routed: bool) -> int:
    """Return the bytes that a layer keeps less where operands of its products are in 8 bits.

    Of a norm's result and of a SwiGLU's product nothing else is kept. Attention's result is kept
    beside its rounded one: the backward pass of attention reads it.
    """
    model = layout.cfg.model
    stack = "layers" if routed == (model.ffn == "moe") else "leading"
    precision = layout.cfg.precision

    def in_8_bits(*names: str) -> bool:
        return all(precision.format_of(f"{stack}.{name}", None) == "fp8" for name in names)

    less = layout.compute_bytes - EIGHT_BIT_BYTES
    heads = layout.channels("heads", model.num_heads)
    stream = channels = 0.0
    if model.mixer == "mla":
        value_dim, mla = model.mla.v_head_dim, model.mla
        stream += less * model.embed_dim * in_8_bits("mixer.latent_down", "mixer.rope_key")
        channels += less * mla.kv_lora_rank * in_8_bits("mixer.key_up", "mixer.value_up")
        channels += less * mla.q_lora_rank * in_8_bits("mixer.query_up")
    else:
        value_dim = model.gqa.head_dim
        inputs = in_8_bits("mixer.query", "mixer.key", "mixer.value")
        stream += less * model.embed_dim * inputs
    channels -= EIGHT_BIT_BYTES * heads * value_dim * in_8_bits("mixer.out")
    # Routers and experts read a norm's result as it is.
    stream += less * model.embed_dim * (not routed and in_8_bits("ffn.gate", "ffn.up"))
    hidden = model.moe.num_shared_experts * model.moe.expert_dim if routed else model.ffn_dim
    down = "ffn.shared.down" if routed else "ffn.down"
    channels += less * layout.channels("ffn", hidden) * in_8_bits(down)
    rows = 0.0
    if routed and in_8_bits("ffn.experts") and num_pieces(layout) == 1:
        # Their own rows and what a SwiGLU makes of them.
        rows = less * (model.embed_dim + layout.channels("ffn", model.moe.expert_dim))
        rows *= tile_rows(layout)
    return round(layout.stream_tokens * stream + layout.tokens * channels + rows)


def arrays_bytes(layout: Layout, routed: bool, found: Arrays) -> int:
    """Return the bytes of a layer's arrays."""
    model, tokens = layout.cfg.model, layout.tokens
    # Of dropout its masks alone, one byte a channel; other policies draw them again.
    masks = 2 if model.dropout else 0
    stream = layout.stream_tokens * model.embed_dim * (found.stream_bytes + masks)
    mixer = latent_bytes(layout, found) if model.mixer == "mla" else grouped_bytes(layout)
    if routed:
        return stream + tokens * mixer + routed_bytes(layout, num_hidden=found.hidden)
    ffn = found.hidden * layout.channels("ffn", model.ffn_dim) * layout.compute_bytes
    return stream + tokens * (mixer + ffn)


def routed_bytes(layout: Layout, *, num_hidden: int) -> int:
    """Return the bytes of a layer's experts and of the shared network beside them.

    Tokens that are exchanged in pieces are not kept between them: each piece is computed again.
    """
    model = layout.cfg.model
    moe, width = model.moe, layout.compute_bytes
    hidden = num_hidden * layout.channels("ffn", moe.expert_dim) * width
    scores = 2 * moe.num_experts * FLOAT32_BYTES
    chosen = layout.tokens * moe.top_k * model.embed_dim * width
    pieces = num_pieces(layout)
    tiles = tile_bytes(layout, num_hidden=num_hidden) if pieces == 1 else 0
    return tiles + chosen + layout.tokens * (moe.num_shared_experts * hidden + scores)


def tile_bytes(layout: Layout, *, num_hidden: int = 6) -> int:
    """Return the bytes of the tiles of one piece: their rows, and what experts make of them.

    Shapes are those of the worst case: all tokens of all devices along `expert` go to this one.
    """
    moe, width = layout.cfg.model.moe, layout.compute_bytes
    slots = tile_rows(layout)
    hidden = num_hidden * layout.channels("ffn", moe.expert_dim)
    exchanged = 2 * piece_choices(layout) if layout.degree("expert") > 1 else 0
    rows = slots + exchanged
    return width * (slots * hidden + rows * layout.cfg.model.embed_dim)


def tile_rows(layout: Layout) -> int:
    """Return the rows of the tiles of one piece, each expert's padded to whole tiles."""
    most = piece_choices(layout)
    padding = min(experts_here(layout), most) * (TILE_ROWS - 1)
    return (most + padding) // TILE_ROWS * TILE_ROWS


def piece_choices(layout: Layout) -> int:
    """Return the choices that this device's experts may have to serve at one time."""
    return most_choices(layout) // num_pieces(layout)


def experts_here(layout: Layout) -> int:
    """Return the experts of one device."""
    return -(-layout.cfg.model.moe.num_experts // layout.degree("expert"))


def most_choices(layout: Layout) -> int:
    """Return the choices that one device's experts may have to serve in a micro-batch."""
    top_k, degree = layout.cfg.model.moe.top_k, layout.degree("expert")
    return degree * layout.tokens * min(top_k, experts_here(layout))


def num_pieces(layout: Layout) -> int:
    """Return in how many pieces tokens are exchanged, so that the rows of one have room."""
    if layout.degree("expert") == 1:
        return 1
    row_bytes = layout.cfg.model.embed_dim * layout.compute_bytes
    return -(-most_choices(layout) * row_bytes // PIECE_BYTES)


def grouped_bytes(layout: Layout) -> int:
    """Return the bytes a token of grouped-query attention: queries, results, keys and values.

    Keys and values are there for whole rows, whatever part of them the context axis leaves here.
    """
    gqa, heads = layout.cfg.model.gqa, layout.channels("heads", layout.cfg.model.num_heads)
    pair = 2 * layout.compute_bytes
    kv_heads = layout.channels("kv_heads", gqa.num_kv_heads) * layout.degree("context")
    return (heads + kv_heads) * gqa.head_dim * pair + statistics_bytes(layout, heads)


def latent_bytes(layout: Layout, found: Arrays) -> int:
    """Return the bytes a token of latent attention in its expanded form."""
    model = layout.cfg.model
    mla, heads = model.mla, layout.channels("heads", model.num_heads)
    # Query and output of this device's tokens, key and value of whole rows.
    rows = 1 + layout.degree("context")
    expanded = heads * rows * (mla.qk_head_dim + mla.v_head_dim) * layout.compute_bytes
    normed = (mla.q_lora_rank + mla.kv_lora_rank) * found.latent_bytes
    return expanded + normed + statistics_bytes(layout, heads)


def statistics_bytes(layout: Layout, heads: int) -> int:
    """Return the bytes a token of the softmax statistics: one for each head and document slot."""
    return heads * num_segments(layout) * FLOAT32_BYTES


def num_segments(layout: Layout) -> int:
    """Return the document slots of a row."""
    if layout.cfg.train.documents == "joined":
        return 1
    if layout.packed is not None:
        return layout.packed.places
    fitting = layout.cfg.train.seq_len // TOKENS_PER_SEGMENT
    return min(max(fitting, MIN_SEGMENTS), MAX_SEGMENTS)


# What a layer keeps under each policy of parallelism/remat.py.
KEPT: Mapping[str, Callable[[Layout, bool], int]] = {
    "none": everything_bytes,
    "matmul_outputs": products_bytes,
    "full": stream_bytes,
}
