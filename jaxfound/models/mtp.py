"""Multi-token prediction: modules that look one token further each (DeepSeek-V3, section 2.2).

What goes from one depth to the next is the normalised state, the one that the head reads. The
report calls it h, once for both uses: equation 21 hands h of depth k - 1 to the module of depth k
(of depth 0, "the representation given by the main model"), and in equation 23 the output head,
which "linearly maps the representation to logits", is applied to the same h. In the published
weights a norm stands before that linear map: `model.norm` in the main model, `shared_head.norm` in
a module. So h is what comes after it, and `hnorm` normalises once more. Published servers do the
same; a stream that skips the norm misses its scale, channel by channel, and `hnorm` has another.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxfound.config.model import ModelConfig
from jaxfound.models.block import Block, BlockInput
from jaxfound.models.execution import Execution
from jaxfound.models.layers.dropout import drop
from jaxfound.models.layers.linear import Linear
from jaxfound.models.layers.norm import RMSNorm
from jaxfound.models.layers.router import LoadStats
from jaxfound.models.pages import Pages
from jaxfound.parallelism.remat import rematerialize
from jaxfound.parallelism.stream import in_stream


class Ahead(NamedTuple):
    """What a module of depth d (1, 2 …) reads and predicts at each position i.

    Attributes:
        tokens: the token at i + d, given to the module [B T].
        targets: the token at i + d + 1, to be predicted [B T].
        counted: True where that target exists in the same document and counts [B T].
    """

    tokens: Int[Array, "B T"]
    targets: Int[Array, "B T"]
    counted: Bool[Array, "B T"]


def look_ahead(
    targets: Int[Array, "B T"],
    counted: Bool[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    *,
    depth: int,
) -> Ahead:
    """Return what depth `depth` reads and predicts, from next-token targets of packed rows."""

    def shifted(x: jax.Array, by: int) -> jax.Array:
        return jnp.pad(x[:, by:], ((0, 0), (0, by)))

    same = (shifted(segment_ids, depth) == segment_ids) & (segment_ids > 0)
    tokens = jnp.where(same, shifted(targets, depth - 1), 0)
    return Ahead(tokens, shifted(targets, depth), same & shifted(counted, depth))


class MtpModule(nnx.Module):
    """Joins the state of the depth before at i with the embedding of a later token: one block."""

    def __init__(
        self, cfg: ModelConfig, *, rngs: nnx.Rngs, execution: Execution, path: str
    ) -> None:
        self.embed_norm = RMSNorm(cfg.embed_dim, eps=cfg.norm_eps)
        self.hidden_norm = RMSNorm(cfg.embed_dim, eps=cfg.norm_eps)
        self.join = Linear(
            ((None, 2 * cfg.embed_dim),),
            (("embed", cfg.embed_dim),),
            rngs=rngs,
            execution=execution,
            path=f"{path}.join",
            std=cfg.init_std,
        )
        self.block = Block(cfg, cfg.ffn, rngs=rngs, execution=execution, path=f"{path}.block")
        self.final_norm = RMSNorm(cfg.embed_dim, eps=cfg.norm_eps)
        self.execution = execution
        self.dropout = cfg.dropout

    def __call__(
        self, hidden: Float[Array, "B T D"], embedded: Float[Array, "B T D"], row: BlockInput
    ) -> tuple[Float[Array, "B T D"], LoadStats | None]:
        """Return the state that the head and the next depth read, and the expert load.

        Args:
            hidden: the state of the depth before, normalised: `Hidden.final` of the main model, or
                what the module before returned.
            embedded: embeddings of the tokens that this depth reads.
            row: the main model's, of this module's layer.
        """
        embedded = drop(
            embedded,
            row.noise,
            place="embedding",
            rate=self.dropout,
            rules=self.execution.rules,
        )
        x = self._joined(hidden, embedded)

        def one(x: jax.Array, block: Block) -> tuple[jax.Array, LoadStats | None]:
            return block(x, row)

        drops_moves = self.execution.rules.cuts_parameters
        layer = rematerialize(one, self.execution.remat, in_loop=False, drops_moves=drops_moves)
        x, load = layer(x, self.block)
        return self.final_norm(x), load

    def extend_pages(
        self,
        hidden: Float[Array, "B T D"],
        embedded: Float[Array, "B T D"],
        pages: Pages,
        row: BlockInput,
    ) -> tuple[Float[Array, "B T D"], Pages]:
        """Return the state of T new tokens of each row, and the pages that hold them.

        Args:
            hidden: as for a call, of the new tokens.
            embedded: as for a call, of the new tokens.
            pages: of all layers.
            row: the main model's, with the view of this module's layer.
        """
        x, pages = self.block.extend_pages(self._joined(hidden, embedded), pages, row)
        return self.final_norm(x), pages

    def _joined(
        self, hidden: Float[Array, "B T D"], embedded: Float[Array, "B T D"]
    ) -> Float[Array, "B T D"]:
        joined = jnp.concatenate([self.embed_norm(embedded), self.hidden_norm(hidden)], axis=-1)
        return in_stream(self.join(joined), self.execution.rules)
