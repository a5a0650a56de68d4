"""Which experts a token goes to, with which weights, and how the load is kept even."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxfound.config.model import ModelConfig, MoeConfig
from jaxfound.models.execution import Execution
from jaxfound.models.layers.parameter import weight, zeros_buffer
from jaxfound.parallelism.axes import sum_over


class Routing(NamedTuple):
    """Where each token goes.

    Attributes:
        experts: chosen experts of each token [B T A], A = top_k.
        weights: share of each in the mix, float32 [B T A].
        scores: every expert's score before the bias, float32 [B T E].
    """

    experts: Int[Array, "B T A"]
    weights: Float[Array, "B T A"]
    scores: Float[Array, "B T E"]


class LoadStats(NamedTuple):
    """What a layer of experts reports of one micro-batch; sums, so that they add up exactly.

    Attributes:
        balance_loss: weighted balance loss of each row times the row's real tokens, summed.
        expert_counts: real tokens sent to each expert, int32 [E].
    """

    balance_loss: Float[Array, ""]
    expert_counts: Int[Array, " E"]


class Router(nnx.Module):
    """Scores experts by a float32 matmul; `bias` shifts the choice and never the mix."""

    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs, execution: Execution) -> None:
        experts = (None, cfg.moe.num_experts)
        self.kernel = weight(rngs, (("embed", cfg.embed_dim), experts), std=cfg.init_std)
        self.bias = zeros_buffer((experts,))
        self.cfg = cfg.moe
        self.rules = execution.rules

    def __call__(self, x: Float[Array, "B T D"]) -> Routing:
        """Return where the tokens of x go."""
        kernel = self.rules.gather(self.kernel[...], "embed", None)
        logits_BTE = jnp.einsum(
            "BTD,DE->BTE", x.astype(jnp.float32), kernel, precision=jax.lax.Precision.HIGHEST
        )
        rows = self.rules.activation_spec(("batch", "seq", None))
        choose = self.rules.on_each_device(
            lambda logits, bias: tuple(route(logits, bias, cfg=self.cfg)),
            takes=(rows, PartitionSpec()),
            gives=(rows, rows, rows),
        )
        return Routing(*choose(logits_BTE, self.bias[...]))


def route(logits: Float[Array, "B T E"], bias: Float[Array, " E"], *, cfg: MoeConfig) -> Routing:
    """Choose top_k experts a token by biased scores and weigh them by unbiased ones.

    Source: DeepSeek-V3, section 2.1.2; groups as in DeepSeek-V2, section 2.2.2.
    """
    scores = SCORES[cfg.scoring](logits)
    biased = jax.lax.stop_gradient(scores) + jax.lax.stop_gradient(bias)[None, None, :]
    # -inf and not 0: with a negative bias, zero would beat every expert of a kept group.
    allowed = allowed_experts(biased, cfg=cfg)
    _, experts = jax.lax.top_k(jnp.where(allowed, biased, -jnp.inf), cfg.top_k)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if cfg.normalize_weights:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return Routing(experts, weights * cfg.routed_scaling, scores)


def allowed_experts(biased: Float[Array, "B T E"], *, cfg: MoeConfig) -> Bool[Array, "B T E"]:
    """Return True for the experts of each token's best `top_groups` groups."""
    if cfg.num_groups == 1:
        return jnp.ones(biased.shape, bool)
    size = cfg.num_experts // cfg.num_groups
    grouped_BTGE = biased.reshape(*biased.shape[:2], cfg.num_groups, size)
    best = jax.lax.top_k(grouped_BTGE, 1 if cfg.group_score == "max" else 2)[0].sum(axis=-1)
    _, kept = jax.lax.top_k(best, cfg.top_groups)
    in_kept_BTG = jax.nn.one_hot(kept, cfg.num_groups, dtype=jnp.int32).sum(axis=-2) > 0
    return jnp.repeat(in_kept_BTG, size, axis=-1)


def load_stats(routing: Routing, *, real: Bool[Array, "B T"], cfg: MoeConfig) -> LoadStats:
    """Return the balance loss and the expert counts over real tokens.

    The loss of one row is weight · Σ_e f_e P_e, with f_e the expert's share of the row's choices
    times E and P_e its mean normalised score (DeepSeek-V3, equations 17-20).
    """
    real_BT1 = real[:, :, None].astype(jnp.float32)
    chosen_BTE = jax.nn.one_hot(routing.experts, cfg.num_experts, dtype=jnp.float32).sum(axis=-2)
    chosen_BTE = chosen_BTE * real_BT1
    tokens_B1 = jnp.maximum(over_row(real_BT1), 1.0)
    share_BTE = routing.scores / (routing.scores.sum(axis=-1, keepdims=True) + 1e-20)
    mean_BE = over_row(share_BTE * real_BT1) / tokens_B1
    load_BE = over_row(chosen_BTE) * (cfg.num_experts / cfg.top_k) / tokens_B1
    row_loss_B = (jax.lax.stop_gradient(load_BE) * mean_BE).sum(axis=-1)
    total = cfg.balance_loss_weight * (row_loss_B * real_BT1.sum(axis=(1, 2))).sum()
    return LoadStats(total, chosen_BTE.sum(axis=(0, 1)).astype(jnp.int32))


def over_row(x: Float[Array, "B T E"]) -> Float[Array, "B E"]:
    """Return the sum over each row, of which a device of a pipeline may hold a part only."""
    return sum_over(x.sum(axis=1), "context")


def updated_bias(
    bias: Float[Array, "*L E"], counts: Int[Array, "*L E"], *, rate: float
) -> Float[Array, "*L E"]:
    """Return the bias after one optimizer step: up for experts below the mean load, else down.

    Source: DeepSeek-V3, section 2.1.2 (auxiliary-loss-free load balancing).
    """
    load = counts.astype(jnp.float32)
    return bias + rate * jnp.sign(load.mean(axis=-1, keepdims=True) - load)


SCORES = {"sigmoid": jax.nn.sigmoid, "softmax": lambda logits: jax.nn.softmax(logits, axis=-1)}
