"""Mixture of experts: route, compute each expert on its own tokens, mix."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxfound.config.model import ModelConfig
from jaxfound.models.execution import Execution
from jaxfound.models.layers.mlp import Mlp
from jaxfound.models.layers.parameter import weight
from jaxfound.models.layers.router import LoadStats, Router, load_stats
from jaxfound.parallelism.axes import sum_over

# Rows of one tile: every expert's tokens are padded to a multiple of it, so that one tile
# multiplies one expert's matrix.
TILE_ROWS = 128


class Experts(nnx.Module):
    """E SwiGLU networks side by side: gate, up [E D F] and down [E F D]."""

    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs, execution: Execution) -> None:
        experts, embed = ("experts", cfg.moe.num_experts), ("embed", cfg.embed_dim)
        ffn = ("ffn", cfg.moe.expert_dim)
        self.gate = weight(rngs, (experts, embed, ffn), std=cfg.init_std)
        self.up = weight(rngs, (experts, embed, ffn), std=cfg.init_std)
        std = cfg.init_std / math.sqrt(2 * cfg.num_layers)
        self.down = weight(rngs, (experts, ffn, embed), std=std)
        self.execution = execution

    def __call__(
        self,
        x: Float[Array, "B T D"],
        experts: Int[Array, "B T A"],
        weights: Float[Array, "B T A"],
    ) -> Float[Array, "B T D"]:
        """Return each token's weighted sum over its experts."""
        run = self.execution
        kernels = (
            run.rules.gather(self.gate[...].astype(run.dtype), "experts", "embed", "ffn"),
            run.rules.gather(self.up[...].astype(run.dtype), "experts", "embed", "ffn"),
            run.rules.gather(self.down[...].astype(run.dtype), "experts", "ffn", "embed"),
        )
        rules = run.rules
        rows = rules.activation_spec(("batch", "seq", None))
        wide = rules.gathered_spec(("experts", "embed", "ffn"))
        narrow = rules.gathered_spec(("experts", "ffn", "embed"))
        mix = rules.on_each_device(
            partial_mix,
            takes=(rows, rows, rows, wide, wide, narrow),
            gives=rows,
        )
        return mix(x, experts, weights, *kernels)


class MixtureOfExperts(nnx.Module):
    """Routed experts plus one shared network that sees every token (DeepSeek-V3, 2.1.2)."""

    def __init__(
        self, cfg: ModelConfig, *, rngs: nnx.Rngs, execution: Execution, path: str
    ) -> None:
        self.router = Router(cfg, rngs=rngs, execution=execution)
        self.experts = Experts(cfg, rngs=rngs, execution=execution)
        hidden = cfg.moe.num_shared_experts * cfg.moe.expert_dim
        self.shared = (
            Mlp(cfg, hidden, rngs=rngs, execution=execution, path=f"{path}.shared")
            if hidden
            else None
        )
        self.cfg = cfg.moe
        self.rules = execution.rules

    def __call__(
        self, x: Float[Array, "B T D"], *, real: Bool[Array, "B T"]
    ) -> tuple[Float[Array, "B T D"], LoadStats]:
        """Return the mix and the load; tokens that are not `real` count in neither."""
        routing = self.router(x)
        mixed = self.experts(x, routing.experts, routing.weights)
        if self.shared is not None:
            mixed = mixed + self.shared(x)
        mixed = self.rules.constrain(mixed, "batch", "seq", "embed")
        return mixed, load_stats(routing, real=real, cfg=self.cfg)


def partial_mix(
    x: Float[Array, "B T D"],
    experts: Int[Array, "B T A"],
    weights: Float[Array, "B T A"],
    gate: Float[Array, "E D F"],
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
) -> Float[Array, "B T D"]:
    """Return `mix_experts` of a device's tokens, its channels F summed with the other devices'."""
    return sum_over(mix_experts(x, experts, weights, gate, up, down), "tensor")


def mix_experts(
    x: Float[Array, "B T D"],
    experts: Int[Array, "B T A"],
    weights: Float[Array, "B T A"],
    gate: Float[Array, "E D F"],
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
) -> Float[Array, "B T D"]:
    """Compute every expert on the tokens that chose it; no token is dropped."""
    num_choices, width = experts.shape[2], x.shape[2]
    x_MD = x.reshape(-1, width)
    slot_of_choice, expert_of_tile = tile_slots(experts.reshape(-1), num_experts=gate.shape[0])
    token_of_choice = jnp.arange(slot_of_choice.shape[0]) // num_choices
    tiles = jnp.zeros((expert_of_tile.shape[0] * TILE_ROWS, width), x.dtype)
    tiles = tiles.at[slot_of_choice].set(x_MD[token_of_choice], unique_indices=True)
    tiles_PMD = tiles.reshape(-1, TILE_ROWS, width)
    hidden_PMF = nnx.silu(tile_matmul(tiles_PMD, gate, expert_of_tile))
    hidden_PMF = hidden_PMF * tile_matmul(tiles_PMD, up, expert_of_tile)
    out = tile_matmul(hidden_PMF, down, expert_of_tile).reshape(-1, width)
    # A token's choices are summed in their own order and in float32: the same on every layout.
    picked = out[slot_of_choice].reshape(-1, num_choices, width).astype(jnp.float32)
    mixed = (picked * weights.reshape(-1, num_choices, 1)).sum(axis=1)
    return mixed.astype(x.dtype).reshape(x.shape)


def tile_slots(
    experts: Int[Array, " R"], *, num_experts: int
) -> tuple[Int[Array, " R"], Int[Array, " P"]]:
    """Give every choice a row, grouped by expert, each group padded to whole tiles.

    Returns:
        the row of each choice, and the expert of each tile; tiles past the last group have
        rows of zeros and any expert.
    """
    choices = experts.shape[0]
    num_tiles = -(-choices // TILE_ROWS) + num_experts
    order = jnp.argsort(experts, stable=True)
    counts_E = jnp.bincount(experts, length=num_experts)
    padded_E = -(-counts_E // TILE_ROWS) * TILE_ROWS
    ends_E = jnp.cumsum(padded_E)
    shift_E = (ends_E - padded_E) - (jnp.cumsum(counts_E) - counts_E)
    slots = jnp.arange(choices) + shift_E[experts[order]]
    slot_of_choice = jnp.zeros(choices, slots.dtype).at[order].set(slots, unique_indices=True)
    first_rows = jnp.arange(num_tiles) * TILE_ROWS
    expert_of_tile = jnp.searchsorted(ends_E, first_rows, side="right")
    return slot_of_choice, jnp.minimum(expert_of_tile, num_experts - 1)


def tile_matmul(
    tiles: Float[Array, "P M K"], kernels: Float[Array, "E K N"], expert_of_tile: Int[Array, " P"]
) -> Float[Array, "P M N"]:
    """Multiply each tile by its expert's matrix."""
    full = jax.lax.Precision.HIGHEST if tiles.dtype == jnp.float32 else None
    return jnp.einsum("PMK,PKN->PMN", tiles, kernels[expert_of_tile], precision=full)
