"""The decoder: embedding, a leading dense stack, the main stack, head, extra predictions."""

from functools import partial
from typing import Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxfound.config.model import ModelConfig
from jaxfound.models.block import Block, BlockInput, layers_apart
from jaxfound.models.cache import Cache, LayerCache, slots_of
from jaxfound.models.execution import Execution
from jaxfound.models.layers.attention import View, cached_view
from jaxfound.models.layers.dropout import Noise, drop
from jaxfound.models.layers.embedding import Embedding, Head, logits_of
from jaxfound.models.layers.norm import RMSNorm
from jaxfound.models.layers.router import LoadStats
from jaxfound.models.mtp import MtpModule
from jaxfound.models.pages import PagedView, Pages
from jaxfound.models.segments import in_formats, segments_of
from jaxfound.parallelism.remat import rematerialize
from jaxfound.parallelism.stream import from_stream

# A block, and its number; None where nothing depends on it.
type Layer = tuple[Block, Int[Array, ""] | None]


class Hidden(NamedTuple):
    """The decoder's output before the head.

    Attributes:
        final: normalised, where the residual stream lies; the head and multi-token prediction
            read it [B T D].
        load: expert load of every layer with experts, stacked; None without experts.
    """

    final: Float[Array, "B T D"]
    load: LoadStats | None


class Decoder(nnx.Module):
    """A causal language model from a ModelConfig; layers of a kind are stacked arrays."""

    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs, execution: Execution) -> None:
        self.embedding = Embedding(cfg, rngs=rngs, execution=execution)
        first = cfg.num_leading_layers
        self.leading = (
            stack(cfg, "dense", first, rngs=rngs, execution=execution, path="leading")
            if first
            else None
        )
        self.layers = stack(
            cfg, cfg.ffn, cfg.num_layers - first, rngs=rngs, execution=execution, path="layers"
        )
        self.final_norm = RMSNorm(cfg.embed_dim, eps=cfg.norm_eps)
        self.head = Head(cfg, rngs=rngs, execution=execution)
        self.mtp = nnx.List(
            MtpModule(cfg, rngs=rngs, execution=execution, path=f"mtp.{i}")
            for i in range(cfg.mtp_depth)
        )
        self.cfg = cfg
        self.execution = execution

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T V"]:
        """Return the float32 logits of the next token, padded ids at -1e30.

        Args:
            tokens: token ids, each row one document unless `segment_ids` says otherwise.
            positions: place of each token in its document; 0, 1, 2 … by default, and always
                where the execution joins documents.
            segment_ids: document of each token, 0 = padding; one document a row by default.
        """
        hidden = self.hidden(tokens, self.row(tokens, positions, segment_ids))
        return self.logits(hidden.final)

    def row(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None,
        segment_ids: Int[Array, "B T"] | None,
        *,
        places: Int[Array, " T"] | None = None,
        noise: Noise | None = None,
    ) -> BlockInput:
        """Return what the layers share of these rows, with the defaults filled in.

        Args:
            places: place of each token in its row, where rows are arranged for the context axis.
            noise: what dropout draws its masks from; None drops nothing.
        """
        joined = self.execution.documents == "joined"
        if positions is None or joined:
            order = jnp.arange(tokens.shape[1]) if places is None else places
            positions = jnp.broadcast_to(order[None, :], tokens.shape)
        real = jnp.ones(tokens.shape, bool) if segment_ids is None else segment_ids > 0
        return BlockInput(View(positions, None if joined else segment_ids, places), real, noise)

    def hidden(self, tokens: Int[Array, "B T"], row: BlockInput) -> Hidden:
        """Return the decoder's output before the head."""
        x = self.entering(tokens, row)
        first = self.cfg.num_leading_layers
        x, load = walk(self.layers, x, row, execution=self.execution, first=first)
        return Hidden(self.final_norm(x), load)

    def entering(self, tokens: Int[Array, "B T"], row: BlockInput) -> Float[Array, "B T D"]:
        """Return the input of the main stack: the embedding behind the leading dense layers."""
        x = drop(
            self.embedding(tokens),
            row.of_layer(0).noise,
            place="embedding",
            rate=self.cfg.dropout,
            rules=self.execution.rules,
        )
        if self.leading is not None:
            x, _ = walk(self.leading, x, row, execution=self.execution)
        return x

    def logits(self, final: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Return the float32 logits of normalised states."""
        final = from_stream(final, self.execution.rules)
        return logits_of(final, self.head.matrix(self.embedding), head=self.head)

    def extend(
        self, tokens: Int[Array, "B T"], cache: Cache, positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T V"], Cache]:
        """Append tokens at `positions` to the cache; return their logits and the new cache.

        Prefill is this with a whole prompt, decoding with one token. Slots of later positions
        weigh nothing, so a padded prompt's tail is overwritten by what follows it; pad with any
        id of the vocabulary, since an id outside it is NaN and makes its whole row NaN.
        """
        row = BlockInput(cached_view(positions, slots_of(cache)), jnp.ones(tokens.shape, bool))
        x, leading = self.embedding(tokens), cache.leading
        if self.leading is not None and leading is not None:
            x, leading = walk_cached(self.leading, x, leading, row=row, execution=self.execution)
        first = self.cfg.num_leading_layers
        x, layers = walk_cached(
            self.layers, x, cache.layers, row=row, execution=self.execution, first=first
        )
        return self.logits(self.final_norm(x)), Cache(leading, layers)

    def extend_pages(
        self, tokens: Int[Array, "B T"], pages: Pages, view: PagedView
    ) -> tuple[Float[Array, "B T D"], Pages]:
        """Write tokens to pages; return their normalised states, which `logits` reads, and them.

        Args:
            tokens: new tokens of each row; padding may be any id of the vocabulary.
            pages: of all layers.
            view: of layer 0, from `paged_view`.
        """
        row = BlockInput(view, view.real)
        x, first = self.embedding(tokens), self.cfg.num_leading_layers
        if self.leading is not None:
            x, pages = walk_pages(self.leading, x, pages, row=row, execution=self.execution)
        x, pages = walk_pages(self.layers, x, pages, row=row, execution=self.execution, first=first)
        return self.final_norm(x), pages

    def look_ahead_pages(
        self,
        hidden: Float[Array, "B T D"],
        tokens: Int[Array, "B T"],
        pages: Pages,
        view: PagedView,
        *,
        depth: int,
    ) -> tuple[Float[Array, "B T D"], Pages]:
        """Return the states of depth 1, 2 …, whose `logits` are of the token depth + 1 places on.

        Args:
            hidden: states of the depth before; of depth 1 those of `extend_pages`.
            tokens: the token `depth` places behind each one; padding any id of the vocabulary.
            pages: of all layers; modules come behind the main model's.
            view: of layer 0.
            depth: number of the module.
        """
        row = BlockInput(view.of_layer(self.cfg.num_layers + depth - 1), view.real)
        module = self.mtp[depth - 1]
        return module.extend_pages(hidden, self.embedding(tokens), pages, row)


def stack(
    cfg: ModelConfig,
    ffn: Literal["dense", "moe"],
    num_layers: int,
    *,
    rngs: nnx.Rngs,
    execution: Execution,
    path: str,
) -> Block:
    """Return `num_layers` blocks as one block whose arrays have a leading dim of layers."""
    dim = "leading_layers" if path == "leading" else "layers"

    @nnx.split_rngs(splits=num_layers)
    @partial(nnx.vmap, transform_metadata={nnx.PARTITION_NAME: dim})
    def make(rngs: nnx.Rngs) -> Block:
        return Block(cfg, ffn, rngs=rngs, execution=execution, path=path)

    return make(rngs)


def walk(
    blocks: Block,
    x: Float[Array, "B T D"],
    row: BlockInput,
    *,
    execution: Execution,
    first: int = 0,
) -> tuple[Float[Array, "B T D"], LoadStats | None]:
    """Run x through stacked blocks: a scan for each segment of layers that compute alike.

    Args:
        first: number of the first block among the layers of the model.
    """
    loads = []
    for segment in segments_of(blocks, execution, first=first):
        x, load = _walk_alike(segment.blocks, x, row, execution=execution, first=segment.first)
        loads.append(load)
    return x, joined(loads)


def _walk_alike(
    blocks: Block,
    x: Float[Array, "B T D"],
    row: BlockInput,
    *,
    execution: Execution,
    first: int,
) -> tuple[Float[Array, "B T D"], LoadStats | None]:
    """Run x through the blocks of a segment, `layers_per_scan_step` unrolled in a scan step."""

    def one(x: jax.Array, layer: Layer) -> tuple[jax.Array, LoadStats | None]:
        block, number = layer
        return block(x, row if number is None else row.of_layer(number + 1))

    num_layers = jax.tree.leaves(blocks)[0].shape[0]
    unroll = min(execution.layers_per_scan_step or num_layers, num_layers)
    layer = rematerialize(
        one,
        execution.remat,
        in_loop=unroll < num_layers,
        drops_moves=execution.rules.cuts_parameters,
    )
    numbers = None if row.noise is None else first + jnp.arange(num_layers)
    return jax.lax.scan(layer, x, (blocks, numbers), unroll=unroll)


def joined[T](parts: list[T]) -> T:
    """Return arrays of segments, each [layers …], as one stack."""
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *a: jnp.concatenate(a), *parts)


def walk_cached(
    blocks: Block,
    x: Float[Array, "B T D"],
    cache: LayerCache,
    *,
    row: BlockInput,
    execution: Execution,
    first: int = 0,
) -> tuple[Float[Array, "B T D"], LayerCache]:
    """Run x through stacked blocks, each with its own slice of the cache.

    Args:
        first: number of the first block among the layers of the model.
    """

    def one(x: jax.Array, layer: tuple[Block, LayerCache]) -> tuple[jax.Array, LayerCache]:
        block, slots = layer
        return block.extend(x, slots, row)

    written = []
    for segment in segments_of(blocks, execution, first=first):
        start, count = segment.first - first, jax.tree.leaves(segment.blocks)[0].shape[0]
        slots = jax.tree.map(lambda a, s=start, n=count: a[s : s + n], cache)
        x, slots = jax.lax.scan(one, x, (segment.blocks, slots))
        written.append(slots)
    return x, joined(written)


def walk_pages(
    blocks: Block,
    x: Float[Array, "B T D"],
    pages: Pages,
    *,
    row: BlockInput,
    execution: Execution,
    first: int = 0,
) -> tuple[Float[Array, "B T D"], Pages]:
    """Run x through blocks; the pages of all layers are carried along and never sliced.

    Args:
        blocks: stacked, or with layers apart, as `serving_arrays` leaves them.
        first: number of the first block among the layers of the model.
    """
    view = cast(PagedView, row.view)

    def one(
        carry: tuple[jax.Array, Pages], layer: tuple[Block, Int[Array, ""]]
    ) -> tuple[tuple[jax.Array, Pages], None]:
        (x, pages), (block, number) = carry, layer
        return block.extend_pages(x, pages, row._replace(view=view.of_layer(number))), None

    apart = layers_apart(blocks)
    if apart is None:
        for segment in segments_of(blocks, execution, first=first):
            num_layers = jax.tree.leaves(segment.blocks)[0].shape[0]
            numbers = segment.first + jnp.arange(num_layers)
            (x, pages), _ = jax.lax.scan(one, (x, pages), (segment.blocks, numbers))
        return x, pages
    # Traced and lowered once for all layers that compute alike.
    layer = jax.jit(one)
    for number, block in enumerate(apart, first):
        block = in_formats(block, execution, layer=number)
        (x, pages), _ = layer((x, pages), (block, jnp.int32(number)))
    return x, pages
