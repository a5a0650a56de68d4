"""The decoder: embedding, a leading dense stack, the main stack, head, extra predictions."""

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxfound.config.model import ModelConfig
from jaxfound.models.block import Block, BlockInput
from jaxfound.models.cache import Cache, LayerCache, slots_of
from jaxfound.models.execution import Execution
from jaxfound.models.layers.attention import View, cached_view
from jaxfound.models.layers.dropout import Noise, drop
from jaxfound.models.layers.embedding import Embedding, Head, logits_of
from jaxfound.models.layers.norm import RMSNorm
from jaxfound.models.layers.router import LoadStats
from jaxfound.models.mtp import MtpModule
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
            positions: place of each token in its document; 0, 1, 2 … by default.
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
        if positions is None:
            order = jnp.arange(tokens.shape[1]) if places is None else places
            positions = jnp.broadcast_to(order[None, :], tokens.shape)
        real = jnp.ones(tokens.shape, bool) if segment_ids is None else segment_ids > 0
        return BlockInput(View(positions, segment_ids, places), real, noise)

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
            x, leading = walk_cached(self.leading, x, leading, row=row)
        x, layers = walk_cached(self.layers, x, cache.layers, row=row)
        return self.logits(self.final_norm(x)), Cache(leading, layers)


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
    """Run x through stacked blocks, `layers_per_scan_step` of them unrolled in a scan step.

    Args:
        first: number of the first block among the layers of the model.
    """

    def one(x: jax.Array, layer: Layer) -> tuple[jax.Array, LoadStats | None]:
        block, number = layer
        return block(x, row if number is None else row.of_layer(number + 1))

    num_layers = jax.tree.leaves(blocks)[0].shape[0]
    unroll = min(execution.layers_per_scan_step or num_layers, num_layers)
    layer = rematerialize(one, execution.remat, in_loop=unroll < num_layers)
    numbers = None if row.noise is None else first + jnp.arange(num_layers)
    return jax.lax.scan(layer, x, (blocks, numbers), unroll=unroll)


def walk_cached(
    blocks: Block, x: Float[Array, "B T D"], cache: LayerCache, *, row: BlockInput
) -> tuple[Float[Array, "B T D"], LayerCache]:
    """Run x through stacked blocks, each with its own slice of the cache."""

    def one(x: jax.Array, layer: tuple[Block, LayerCache]) -> tuple[jax.Array, LayerCache]:
        block, slots = layer
        return block.extend(x, slots, row)

    return jax.lax.scan(one, x, (blocks, cache))
