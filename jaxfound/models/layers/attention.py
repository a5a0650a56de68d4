"""Scaled dot-product attention over packed rows, and grouped-query attention."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jaxfound.config.model import ModelConfig
from jaxfound.models.cache import KeyValueCache, write_at
from jaxfound.models.execution import Execution
from jaxfound.models.layers.context_attention import attend_over_context
from jaxfound.models.layers.embedding import NEG_INF
from jaxfound.models.layers.linear import Linear, products_of
from jaxfound.models.layers.paged_attention import attend_pages
from jaxfound.models.layers.rope import angles_of, frequencies, rotate, rotation_factor
from jaxfound.models.pages import KeyValuePages, PagedView, written
from jaxfound.parallelism.context import context_degree, whole_rows
from jaxfound.parallelism.remat import ATTENTION
from pallas_kernels.flash_attention import flash_attention


class View(NamedTuple):
    """What the tokens of packed rows may see: earlier ones of their own document.

    Attributes:
        positions: place of each token in its document [B T].
        segment_ids: document of each token [B T]; 0 is padding, which sees nothing. None: each
            row is one document.
        places: place in its row of each token [T], where rows are arranged for the `context`
            axis (`parallelism.context`); None: tokens are in order.
    """

    positions: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"] | None
    places: Int[Array, " T"] | None = None


class CachedView(NamedTuple):
    """What new tokens may see of a cache whose slot s holds position s.

    Attributes:
        positions: place of each token in its row [B T].
        mask: token x slot, True where attention is allowed [B T S].
    """

    positions: Int[Array, "B T"]
    mask: Bool[Array, "B T S"]


def cached_view(positions: Int[Array, "B T"], num_slots: int) -> CachedView:
    """Return the view of tokens at `positions`: slots up to their own."""
    slots_S = jnp.arange(num_slots)
    return CachedView(positions, slots_S[None, None, :] <= positions[:, :, None])


def attend_rows(
    q: Float[Array, "B T N H"],
    k: Float[Array, "copies S K H"],
    v: Float[Array, "copies S K V"],
    *,
    view: View,
    scale: float,
    execution: Execution,
) -> Float[Array, "B T N V"]:
    """Return the attention of packed rows over themselves, by the fastest kernel that is right.

    The data room leaves documents as runs with padding last. Where nobody vouches for that, rows
    of another make are noticed and take the kernel that needs no such promise.

    Args:
        k: keys of whole rows, from `whole_rows`: a copy for each device of the `context` axis.
        v: values, likewise.

    Raises:
        ValueError: if rows are cut over `context` and not arranged for it.
    """
    if context_degree() == 1:
        checked = execution.documents == "checked"
        return flash_attention(
            q,
            k,
            v,
            segment_ids=view.segment_ids,
            causal=True,
            scale=scale,
            packed="checked" if checked else "runs",
            max_segments=execution.most_documents if checked else None,
        )
    if view.places is None:
        raise ValueError(
            f"rows are cut over context={context_degree()}, but their tokens are in order. "
            "Arrange tokens and their places with jaxfound.parallelism.context.arranged, or use "
            "a mesh with context=1"
        )
    ids = view.segment_ids
    ids = jnp.ones(q.shape[:2], jnp.int32) if ids is None else ids
    return attend_over_context(q, k, v, segment_ids=ids, scale=scale, rules=execution.rules)


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
        self.execution = execution
        self.cfg = cfg

    def __call__(self, x: Float[Array, "B T D"], view: View) -> Float[Array, "B T D"]:
        """Return the attention of x over its own row."""
        q, k, v = self._project(x, view.positions)
        k, v = (whole_rows(x, "kv_heads", None, rules=self.rules) for x in (k, v))
        mixed = attend_rows(q, k, v, view=view, scale=self.scale, execution=self.execution)
        return self._finish(mixed)

    def extend(
        self, x: Float[Array, "B T D"], cache: KeyValueCache, view: CachedView
    ) -> tuple[Float[Array, "B T D"], KeyValueCache]:
        """Append T tokens to the cache and return their attention over all of it."""
        q, k, v = self._project(x, view.positions)
        cache = KeyValueCache(
            write_at(cache.keys, k, view.positions), write_at(cache.values, v, view.positions)
        )
        k_all, v_all = cache.keys.astype(q.dtype), cache.values.astype(q.dtype)
        return self._finish(attend(q, k_all, v_all, mask=view.mask, scale=self.scale)), cache

    def extend_pages(
        self, x: Float[Array, "B T D"], cache: KeyValuePages, view: PagedView
    ) -> tuple[Float[Array, "B T D"], KeyValuePages]:
        """Write T tokens of each row to its pages and return their attention over all of it."""
        q, k, v = self._project(x, view.positions)
        cache = KeyValuePages(written(cache.keys, k, view), written(cache.values, v, view))

        def read(ids: Int[Array, "B n"]) -> tuple[jax.Array, jax.Array]:
            keys, values = (part[ids].astype(q.dtype) for part in cache)
            heads = keys.shape[3:]
            return keys.reshape(len(ids), -1, *heads), values.reshape(len(ids), -1, *heads)

        mixed = attend_pages(
            q,
            read,
            view=view,
            page_size=cache.keys.shape[1],
            kv_heads=cache.keys.shape[2],
            value_dim=v.shape[3],
            scale=self.scale,
        )
        return self._finish(mixed), cache

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
        layers = (self.query, self.key, self.value)
        q, k, v = products_of(layers, x, execution=self.execution)
        q, k = (rotate(y, angles, pairing=rope.pairing, factor=factor) for y in (q, k))
        # Kept behind the rotation, whose own backward pass needs no more than the angles.
        q, k, v = (checkpoint_name(y, ATTENTION) for y in (q, k, v))
        pin = self.rules.constrain
        return (
            pin(q, "batch", "seq", "heads", None),
            pin(k, "batch", "seq", "kv_heads", None),
            pin(v, "batch", "seq", "kv_heads", None),
        )

    def _finish(self, mixed: jax.Array) -> jax.Array:
        mixed = self.rules.constrain(mixed, "batch", "seq", "heads", None)
        return self.out(mixed)
