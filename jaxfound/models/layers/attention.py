"""Scaled dot-product attention over packed rows, and grouped-query attention."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxfound.config.model import ModelConfig
from jaxfound.models.cache import KeyValueCache, write_at
from jaxfound.models.execution import Execution
from jaxfound.models.layers.embedding import NEG_INF
from jaxfound.models.layers.linear import Linear
from jaxfound.models.layers.rope import angles_of, frequencies, rotate, rotation_factor


class View(NamedTuple):
    """What a token may see.

    Attributes:
        positions: place of each token in its document [B T].
        mask: query token × key token, True where attention is allowed [B T S].
    """

    positions: Int[Array, "B T"]
    mask: Bool[Array, "B T S"]


def packed_view(positions: Int[Array, "B T"], segment_ids: Int[Array, "B T"]) -> View:
    """Return the view of packed rows: causal, inside one document; segment 0 sees nothing."""
    order = jnp.arange(segment_ids.shape[1])
    same_BTS = segment_ids[:, :, None] == segment_ids[:, None, :]
    real_BT1 = (segment_ids > 0)[:, :, None]
    causal_1TS = (order[:, None] >= order[None, :])[None]
    return View(positions, same_BTS & real_BT1 & causal_1TS)


def cached_view(positions: Int[Array, "B T"], num_slots: int) -> View:
    """Return the view of tokens at `positions` into a cache whose slot s holds position s."""
    slots_S = jnp.arange(num_slots)
    return View(positions, slots_S[None, None, :] <= positions[:, :, None])


def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    *,
    mask: Bool[Array, "B T S"],
    scale: float,
) -> Float[Array, "B T N V"]:
    """Return softmax(q·k·scale) v with a float32 softmax; a query that may see nothing gets 0."""
    heads = q.shape[2]
    q_BTKGH = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    full = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    scores_BKGTS = jnp.einsum(
        "BTKGH,BSKH->BKGTS", q_BTKGH, k, precision=full, preferred_element_type=jnp.float32
    )
    allowed = mask[:, None, None, :, :]
    scores_BKGTS = jnp.where(allowed, scores_BKGTS * scale, NEG_INF)
    top = jax.lax.stop_gradient(scores_BKGTS.max(axis=-1, keepdims=True))
    # A row that may see nothing has top = NEG_INF and would weigh every key alike.
    weights = jnp.where(allowed, jnp.exp(scores_BKGTS - top), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    weights = (weights / jnp.where(total == 0, 1.0, total)).astype(v.dtype)
    out_BTKGV = jnp.einsum("BKGTS,BSKV->BTKGV", weights, v, precision=full)
    return out_BTKGV.reshape(*q.shape[:2], heads, v.shape[3])


class GroupedQueryAttention(nnx.Module):
    """N query heads read K key/value heads (Ainslie et al., 2023)."""

    def __init__(
        self, cfg: ModelConfig, *, rngs: nnx.Rngs, execution: Execution, path: str
    ) -> None:
        embed = (("embed", cfg.embed_dim),)
        head = ("head_dim", cfg.gqa.head_dim)
        queries = (("heads", cfg.num_heads), head)
        keys = (("kv_heads", cfg.gqa.num_kv_heads), head)

        def make(name: str, inputs: tuple, outputs: tuple, std: float) -> Linear:
            return Linear(
                inputs, outputs, rngs=rngs, execution=execution, path=f"{path}.{name}", std=std
            )

        self.query = make("query", embed, queries, cfg.init_std)
        self.key = make("key", embed, keys, cfg.init_std)
        self.value = make("value", embed, keys, cfg.init_std)
        self.out = make("out", queries, embed, cfg.init_std / math.sqrt(2 * cfg.num_layers))
        self.rules = execution.rules
        self.cfg = cfg

    def __call__(self, x: Float[Array, "B T D"], view: View) -> Float[Array, "B T D"]:
        """Return the attention of x over its own row."""
        q, k, v = self._project(x, view.positions)
        return self._finish(attend(q, k, v, mask=view.mask, scale=self.scale))

    def extend(
        self, x: Float[Array, "B T D"], cache: KeyValueCache, view: View
    ) -> tuple[Float[Array, "B T D"], KeyValueCache]:
        """Append T tokens to the cache and return their attention over all of it."""
        q, k, v = self._project(x, view.positions)
        cache = KeyValueCache(
            write_at(cache.keys, k, view.positions), write_at(cache.values, v, view.positions)
        )
        k_all, v_all = cache.keys.astype(q.dtype), cache.values.astype(q.dtype)
        return self._finish(attend(q, k_all, v_all, mask=view.mask, scale=self.scale)), cache

    @property
    def scale(self) -> float:
        """Factor on the scores: head_dim^-1/2."""
        return self.cfg.gqa.head_dim**-0.5

    def _project(
        self, x: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        rope = self.cfg.rope
        angles = angles_of(positions, frequencies(rope, self.cfg.gqa.head_dim))
        factor = rotation_factor(rope)
        q = rotate(self.query(x), angles, pairing=rope.pairing, factor=factor)
        k = rotate(self.key(x), angles, pairing=rope.pairing, factor=factor)
        v = self.value(x)
        pin = self.rules.constrain
        return (
            pin(q, "batch", "seq", "heads", None),
            pin(k, "batch", "seq", "kv_heads", None),
            pin(v, "batch", "seq", "kv_heads", None),
        )

    def _finish(self, mixed: jax.Array) -> jax.Array:
        mixed = self.rules.constrain(mixed, "batch", "seq", "heads", None)
        return self.rules.constrain(self.out(mixed), "batch", "seq", "embed")
