"""What the backward pass of a layer holds besides what was kept for it, moment by moment.

A step needs as much memory as its fullest moment. In a layer the backward pass runs from the end:
the feed-forward's products, the gradients of their weights, then attention. What the weights'
gradients are made from waits: XLA orders them behind the gradients that lower layers need.
"""

from collections.abc import Mapping
from typing import NamedTuple

from jaxfound.parallelism.activations import (
    gathered_bytes,
    has_dense_layers,
    num_pieces,
    num_segments,
    statistics_bytes,
    stream_bytes,
    tile_rows,
)
from jaxfound.parallelism.context import CHUNKS_EACH
from jaxfound.parallelism.layout import FLOAT32_BYTES, Layout
from jaxfound.parallelism.weights import waiting_bytes, widest_matrix

# Streams [tokens embed] in the format of compute that wait while a layer is gone through: its
# input, both norms' results, and the gradient that came from above, which alone is new where the
# layer's operands are kept. Where the stream is cut over tensor these are parts; what products read
# of them is gathered.
STREAMS, NEW_STREAMS = 4, 1
# Streams where the feed-forward's inputs get their gradient: one of gate, one of up, and the sum
# that either is added to. In float32, but that one device rounds them as it writes them.
SUMMED_STREAMS = 3
# Arrays as wide as the feed-forward that wait for weights' gradients: gate and up, and their
# gradients, which alone are new where operands are kept.
HIDDEN, NEW_HIDDEN = 4, 2
# Of the tiles of experts' rows: the hidden rows and the gradients of gate and up wait for weights'
# gradients; gate, up and the gradient of the hidden rows are there until those are made. New are
# the gradients.
TILE_HIDDEN, NEW_TILE_HIDDEN, NEW_UNTIL_MADE = 3, 2, 1
# Attention that writes scores out does so for all queries of a row up to this many scores, else
# for some at a time, in multiples of the last.
WHOLE_SCORES, CHUNK_SCORES, MIN_CHUNK_ROWS = 2**20, 2**19, 64
# Of a score: itself and its gradient in float32, its weight in the format of compute, a mask.
BYTES_A_SCORE = 11
# Of a score of two chunks of the context axis: itself, the masked one, the two constants that a
# masked one is replaced by, and its weight.
BYTES_A_CHUNK_SCORE = 18
# Architectures on which cuDNN's attention takes packed documents, and the widest head it takes:
# the rows of pallas_kernels.flash_attention.cudnn, which a test compares.
FUSED_HEAD_DIM: Mapping[str, int] = {"sm90": 256, "sm100": 128}
HEAD_ALIGN = 8


class Moment(NamedTuple):
    """What a layer's backward pass holds at one point, bytes of one device.

    Attributes:
        activations: besides what was kept.
        weights: in the format of compute, and gradients of weights before they are cut.
        workspace: what cuDNN asks for.
    """

    activations: int
    weights: int
    workspace: int = 0


def moments_of(layout: Layout, *, architecture: str, are_kept: bool = False) -> tuple[Moment, ...]:
    """Return the moments of the widest layer's backward pass that may need the most.

    Args:
        layout: what runs.
        architecture: of the device, which decides whether attention runs in cuDNN or writes scores
            out.
        are_kept: whether the layer's operands are among what was kept, and are not counted again.
    """
    model, widest = layout.cfg.model, widest_matrix(layout)
    kinds = [False] * has_dense_layers(model) + [True] * (model.ffn == "moe")
    waiting = [held_bytes(layout, routed, are_kept=are_kept) for routed in kinds]
    held = max(waiting)
    made = max(
        bytes_held + made_bytes(layout, routed, are_kept=are_kept)
        for bytes_held, routed in zip(waiting, kinds, strict=True)
    )
    a_sum = layout.compute_bytes if are_kept else FLOAT32_BYTES
    sums = SUMMED_STREAMS * layout.tokens * model.embed_dim * a_sum
    used, gradient = layout.compute_bytes * widest, FLOAT32_BYTES * widest
    own, moved = attention_bytes(layout)
    always = waiting_bytes(layout)
    workspace = workspace_bytes(layout, architecture=architecture)
    is_fused = workspace and (layout.packed is None or layout.packed.fit)
    scores = 0 if is_fused else moved + score_bytes(layout)
    return (
        Moment(made + sums, always or used),
        Moment(held, always or used + gradient),
        Moment(held + own + scores, always, workspace),
    )


def held_bytes(layout: Layout, routed: bool, *, are_kept: bool) -> int:
    """Return what waits from one end of a layer's backward pass to the other."""
    width, model = layout.compute_bytes, layout.cfg.model
    heads = layout.channels("heads", model.num_heads)
    hidden = model.moe.num_shared_experts * model.moe.expert_dim if routed else model.ffn_dim
    num_streams = NEW_STREAMS if are_kept else STREAMS
    streams = num_streams * stream_bytes(layout, routed) + gathered_bytes(layout)
    channels = (NEW_HIDDEN if are_kept else HIDDEN) * layout.channels("ffn", hidden) * width
    if not are_kept:
        channels += saved_width(layout) * width + statistics_bytes(layout, heads)
    tokens = streams + layout.tokens * channels
    if not routed or num_pieces(layout) > 1:
        return tokens
    return tokens + tile_rows(layout) * waiting_tile_width(layout, are_kept=are_kept) * width


def made_bytes(layout: Layout, routed: bool, *, are_kept: bool) -> int:
    """Return what lies beside that while experts' products run.

    Of tokens that are exchanged in pieces only those of a piece are there: a loop goes through them
    one at a time and makes weights' gradients as well.
    """
    if not routed:
        return 0
    hidden = layout.channels("ffn", layout.cfg.model.moe.expert_dim)
    in_pieces = num_pieces(layout) > 1
    a_row = (NEW_UNTIL_MADE if are_kept and not in_pieces else TILE_HIDDEN) * hidden
    if in_pieces:
        a_row += waiting_tile_width(layout, are_kept=False)
    return tile_rows(layout) * a_row * layout.compute_bytes


def waiting_tile_width(layout: Layout, *, are_kept: bool) -> int:
    """Return the elements a row of the tiles that the gradients of experts' weights are made from.

    Inputs and gradients of results, the hidden rows and the gradients of gate and up.
    """
    model = layout.cfg.model
    num_hidden = NEW_TILE_HIDDEN if are_kept else TILE_HIDDEN
    hidden = num_hidden * layout.channels("ffn", model.moe.expert_dim)
    return (1 if are_kept else 2) * model.embed_dim + hidden


def saved_width(layout: Layout) -> int:
    """Return the elements a token of attention's operands and its result."""
    query, keys = head_widths(layout)
    return query + keys


def head_widths(layout: Layout) -> tuple[int, int]:
    """Return the elements a token of a query and its result, and of keys and values.

    Keys and values are there for whole rows, whatever part of them the context axis leaves here.
    """
    model, degree = layout.cfg.model, layout.degree("context")
    heads = layout.channels("heads", model.num_heads)
    if model.mixer == "mla":
        both = heads * (model.mla.qk_head_dim + model.mla.v_head_dim)
        return both, degree * both
    kv_heads = layout.channels("kv_heads", model.gqa.num_kv_heads)
    return 2 * heads * model.gqa.head_dim, degree * 2 * kv_heads * model.gqa.head_dim


def attention_bytes(layout: Layout) -> tuple[int, int]:
    """Return what attention's backward pass makes: in any case, and where it writes scores out.

    The gradients of result, query, key and value, and of the stream before; operands moved for its
    products and, in float32, the sums over chunks of queries.
    """
    query, keys = head_widths(layout)
    width, tokens = layout.compute_bytes, layout.tokens
    own = tokens * (query + keys + layout.cfg.model.embed_dim) * width
    return own, tokens * (query * width + keys * FLOAT32_BYTES)


def score_bytes(layout: Layout) -> int:
    """Return the bytes of the scores that exist at one time where attention writes them out."""
    heads = layout.channels("heads", layout.cfg.model.num_heads)
    if layout.degree("context") > 1:
        chunk = -(-layout.row_tokens // CHUNKS_EACH)
        return layout.rows * heads * chunk * chunk * BYTES_A_CHUNK_SCORE
    length = layout.cfg.train.seq_len
    queries = layout.row_tokens
    if queries * length > WHOLE_SCORES:
        queries = max(CHUNK_SCORES // length // MIN_CHUNK_ROWS, 1) * MIN_CHUNK_ROWS
    return layout.rows * heads * queries * length * BYTES_A_SCORE


def workspace_bytes(layout: Layout, *, architecture: str) -> int:
    """Return what cuDNN asks for in attention's backward pass; 0 where attention is not cuDNN's.

    The gradient of the query in float32 and a sum for each of its rows and, where several query
    heads share a key head, each one's gradients of key and value. It is laid out for every
    document slot as if that held a whole row: XLA hands cuDNN no bound on all documents together.

    Source: cudnn-frontend, `CompositeSDPABackwardNode` (`dQ_accum`, `softmax_sum`, `dK_fullhead`,
    `dV_fullhead`).
    """
    model = layout.cfg.model
    limit = FUSED_HEAD_DIM.get(architecture, 0)
    segments = num_segments(layout)
    key, value, kv_heads = (
        (model.mla.qk_head_dim, model.mla.v_head_dim, model.num_heads)
        if model.mixer == "mla"
        else (model.gqa.head_dim, model.gqa.head_dim, model.gqa.num_kv_heads)
    )
    # Documents are found by one offset for keys and values, which makes them equally wide.
    wide = -(-max(key, value) // HEAD_ALIGN) * HEAD_ALIGN
    fused = layout.cfg.precision.compute == "bfloat16" and layout.degree("context") == 1
    if not fused or wide > limit:
        return 0
    heads = layout.channels("heads", model.num_heads)
    shared = heads != layout.channels("kv_heads", kv_heads)
    a_row = FLOAT32_BYTES * (wide + 1) + shared * 2 * wide * layout.compute_bytes
    return layout.rows * segments * layout.cfg.train.seq_len * heads * a_row
