"""Multi-token prediction: modules that look one token further each (DeepSeek-V3, section 2.2)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxfound.config.model import ModelConfig
from jaxfound.models.block import Block, BlockInput
from jaxfound.models.execution import Execution
from jaxfound.models.layers.linear import Linear
from jaxfound.models.layers.norm import RMSNorm
from jaxfound.models.layers.router import LoadStats
from jaxfound.parallelism.remat import rematerialize


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
    """Joins the hidden state at i with the embedding of a later token and runs one block."""

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

    def __call__(
        self, hidden: Float[Array, "B T D"], embedded: Float[Array, "B T D"], row: BlockInput
    ) -> tuple[Float[Array, "B T D"], LoadStats | None]:
        """Return the hidden state for the next depth (before `final_norm`) and the expert load."""
        joined = jnp.concatenate([self.embed_norm(embedded), self.hidden_norm(hidden)], axis=-1)
        x = self.execution.rules.constrain(self.join(joined), "batch", "seq", "embed")

        def one(x: jax.Array, block: Block) -> tuple[jax.Array, LoadStats | None]:
            return block(x, row)

        return rematerialize(one, self.execution.remat, in_loop=False)(x, self.block)
