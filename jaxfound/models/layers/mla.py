"""Multi-head latent attention: expanded form for training, absorbed form for decoding."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxfound.config.model import ModelConfig
from jaxfound.models.cache import HeadCache, LatentCache, write_at
from jaxfound.models.execution import Execution
from jaxfound.models.layers.attention import CachedView, View, attend, attend_rows
from jaxfound.models.layers.embedding import NEG_INF
from jaxfound.models.layers.linear import Linear, products_of
from jaxfound.models.layers.norm import RMSNorm
from jaxfound.models.layers.paged_attention import ReadPages, attend_pages
from jaxfound.models.layers.parameter import Dims
from jaxfound.models.layers.rope import (
    angles_of,
    frequencies,
    rotate,
    rotation_factor,
    softmax_factor,
)
from jaxfound.models.pages import LatentPages, PagedView, written
from jaxfound.parallelism.context import whole_rows
from pallas_kernels.mla_decode import SPLIT_LEN, fp8_cache, mla_decode


def mla_scale(cfg: ModelConfig) -> float:
    """Return the softmax scale: (nope + rope channels)^-1/2 times YaRN's factor.

    The absorbed form contracts latent + rope channels instead; its scale is the same number.
    """
    return cfg.mla.qk_head_dim**-0.5 * softmax_factor(cfg.rope)


class LatentAttention(nnx.Module):
    """Keys and values of all heads come from one latent a token (DeepSeek-V2, section 2.1)."""

    def __init__(
        self, cfg: ModelConfig, *, rngs: nnx.Rngs, execution: Execution, path: str
    ) -> None:
        mla, std = cfg.mla, cfg.init_std
        embed: Dims = (("embed", cfg.embed_dim),)
        q_latent: Dims = (("latent", mla.q_lora_rank),)
        latent: Dims = (("latent", mla.kv_lora_rank),)
        heads = ("heads", cfg.num_heads)

        def make(name: str, inputs: Dims, outputs: Dims, scaled: float = std) -> Linear:
            return Linear(
                inputs, outputs, rngs=rngs, execution=execution, path=f"{path}.{name}", std=scaled
            )

        low_rank = mla.q_lora_rank > 0
        self.query_down = make("query_down", embed, q_latent) if low_rank else None
        self.query_norm = RMSNorm(mla.q_lora_rank, eps=cfg.norm_eps) if low_rank else None
        queries: Dims = (heads, ("head_dim", mla.qk_head_dim))
        self.query_up = make("query_up", q_latent if low_rank else embed, queries)
        self.latent_down = make("latent_down", embed, latent)
        self.rope_key = make("rope_key", embed, ((None, mla.qk_rope_head_dim),))
        self.latent_norm = RMSNorm(mla.kv_lora_rank, eps=cfg.norm_eps)
        self.key_up = make("key_up", latent, (heads, ("head_dim", mla.qk_nope_head_dim)))
        self.value_up = make("value_up", latent, (heads, ("head_dim", mla.v_head_dim)))
        values: Dims = (heads, ("head_dim", mla.v_head_dim))
        self.out = make("out", values, embed, std / math.sqrt(2 * cfg.num_layers))
        self.cfg = cfg
        self.rules = execution.rules
        self.execution = execution

    def __call__(self, x: Float[Array, "B T D"], view: View) -> Float[Array, "B T D"]:
        """Return the attention of x over its own row, in the expanded form."""
        q_nope, q_rope = self._queries(x, view.positions)
        # What a device of the context axis lacks of a row is sent as latents, not as heads.
        parts = self._latents(x, view.positions)
        latent_BSC, rope_BSR = (whole_rows(part, None, rules=self.rules) for part in parts)
        k_BSNH, v_BSNV = self._heads_of(latent_BSC, rope_BSR)
        pin = self.rules.constrain
        q = pin(jnp.concatenate([q_nope, q_rope], axis=-1), "batch", "seq", "heads", None)
        k = pin(k_BSNH, "copies", None, "heads", None)
        v = pin(v_BSNV, "copies", None, "heads", None)
        scale = mla_scale(self.cfg)
        mixed = attend_rows(q, k, v, view=view, scale=scale, execution=self.execution)
        return self._finish(mixed)

    def extend(
        self, x: Float[Array, "B T D"], cache: LatentCache | HeadCache, view: CachedView
    ) -> tuple[Float[Array, "B T D"], LatentCache | HeadCache]:
        """Append T tokens to the cache and attend over all of it, latents in the absorbed form.

        The key's up-projection moves to the query and the value's to the output, so that what is
        read for each cached token is C + R numbers, whatever the number of heads.
        """
        q_nope, q_rope = self._queries(x, view.positions)
        latent, rope_key = self._latents(x, view.positions)
        if isinstance(cache, HeadCache):
            q = jnp.concatenate([q_nope, q_rope], axis=-1)
            k, v = self._heads_of(latent, rope_key)
            cache = put_heads(cache, k, v, view.positions)
            mixed = attend_heads(q, cache, mask=view.mask, scale=mla_scale(self.cfg))
            return self._finish(mixed), cache
        cache = LatentCache(
            write_at(cache.latent, latent, view.positions),
            write_at(cache.rope_key, rope_key, view.positions),
        )
        q = self._absorbed(q_nope, q_rope)
        latent_BS1C = cache.latent.astype(x.dtype)[:, :, None, :]
        rope_BS1R = cache.rope_key.astype(x.dtype)[:, :, None, :]
        k = jnp.concatenate([latent_BS1C, rope_BS1R], axis=-1)
        mixed_BTNC = attend(q, k, latent_BS1C, mask=view.mask, scale=mla_scale(self.cfg))
        return self._finish(self._values_of(mixed_BTNC)), cache

    def extend_pages(
        self, x: Float[Array, "B T D"], cache: LatentPages, view: PagedView
    ) -> tuple[Float[Array, "B T D"], LatentPages]:
        """Write T tokens of each row to its pages and return their attention over all of it.

        Decoding is absorbed and reads the pages where they lie; a chunk of a prompt takes the form
        that multiplies less.
        """
        q_nope, q_rope = self._queries(x, view.positions)
        token_BTW = jnp.concatenate(self._latents(x, view.positions), axis=-1)
        if cache.tokens.dtype == jnp.uint8:
            token_BTW = fp8_cache.pack(token_BTW)
        cache = LatentPages(written(cache.tokens, token_BTW, view))
        if not view.decoding and self._expanding_is_less(x.shape[1]):
            q = jnp.concatenate([q_nope, q_rope], axis=-1)
            return self._finish(self._attend_expanded(q, cache, view)), cache
        attend = self._attend_decoding if view.decoding else self._attend_absorbed
        mixed_BTNC = attend(self._absorbed(q_nope, q_rope), cache, view)
        return self._finish(self._values_of(mixed_BTNC)), cache

    def _attend_decoding(self, q: jax.Array, cache: LatentPages, view: PagedView) -> jax.Array:
        """Return the mixed latents of absorbed queries [B T N C], by the decode kernel."""
        page_size = cache.tokens.shape[1]
        return mla_decode(
            q,
            cache.tokens,
            block_table=view.block_table,
            lengths=view.lengths,
            latent=self.cfg.mla.kv_lora_rank,
            sm_scale=mla_scale(self.cfg),
            split_len=max(SPLIT_LEN // page_size, 1) * page_size,
        ).out

    def _attend_absorbed(self, q: jax.Array, cache: LatentPages, view: PagedView) -> jax.Array:
        """Return the mixed latents of absorbed queries [B T N C], all heads on one key a token."""
        latent = self.cfg.mla.kv_lora_rank

        def read(ids: Int[Array, "B n"]) -> tuple[jax.Array, jax.Array]:
            token_BS1W = tokens_of(cache, ids, q.dtype)[:, :, None, :]
            return token_BS1W, token_BS1W[..., :latent]

        return self._attend(q, read, cache, view, kv_heads=1, value_dim=latent)

    def _attend_expanded(self, q: jax.Array, cache: LatentPages, view: PagedView) -> jax.Array:
        """Return the attention of queries [B T N H + R] over keys and values of all heads."""
        mla = self.cfg.mla

        def read(ids: Int[Array, "B n"]) -> tuple[jax.Array, jax.Array]:
            parts = jnp.split(tokens_of(cache, ids, q.dtype), [mla.kv_lora_rank], axis=-1)
            k, v = self._heads_of(parts[0], parts[1])
            pin = self.rules.constrain
            return pin(k, "batch", None, "heads", None), pin(v, "batch", None, "heads", None)

        return self._attend(
            q, read, cache, view, kv_heads=self.cfg.num_heads, value_dim=mla.v_head_dim
        )

    def _attend(
        self,
        q: jax.Array,
        read: ReadPages,
        cache: LatentPages,
        view: PagedView,
        *,
        kv_heads: int,
        value_dim: int,
    ) -> jax.Array:
        return attend_pages(
            q,
            read,
            view=view,
            page_size=cache.tokens.shape[1],
            kv_heads=kv_heads,
            value_dim=value_dim,
            scale=mla_scale(self.cfg),
        )

    def _expanding_is_less(self, num_queries: int) -> bool:
        """Whether keys and values of all heads cost less than absorbed queries do.

        Multiplications a cached token and head: absorbed, T queries times 2C + R; expanded, once
        the up-projections and then T times the channels of the heads.
        """
        mla = self.cfg.mla
        absorbed = num_queries * (2 * mla.kv_lora_rank + mla.qk_rope_head_dim)
        up = mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim)
        return up + num_queries * (mla.qk_head_dim + mla.v_head_dim) < absorbed

    def _absorbed(self, q_nope: jax.Array, q_rope: jax.Array) -> Float[Array, "B T N W"]:
        """Return queries that score latents: the key's up-projection is moved into them."""
        full = jax.lax.Precision.HIGHEST if q_nope.dtype == jnp.float32 else None
        key_up = self._up_kernel(self.key_up)
        q_BTNC = jnp.einsum("BTNH,CNH->BTNC", q_nope, key_up, precision=full)
        return jnp.concatenate([q_BTNC, q_rope], axis=-1)

    def _values_of(self, mixed: Float[Array, "B T N C"]) -> Float[Array, "B T N V"]:
        """Return the values that mixed latents stand for."""
        full = jax.lax.Precision.HIGHEST if mixed.dtype == jnp.float32 else None
        value_up = self._up_kernel(self.value_up)
        return jnp.einsum("BTNC,CNV->BTNV", mixed, value_up, precision=full)

    def _queries(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the parts of the queries without and with position, [B T N H] and [B T N R]."""
        if self.query_down is not None and self.query_norm is not None:
            x = self.query_norm(self.query_down(x))
        q_BTNH = self.rules.constrain(self.query_up(x), "batch", "seq", "heads", None)
        q_nope, q_rope = jnp.split(q_BTNH, [self.cfg.mla.qk_nope_head_dim], axis=-1)
        return q_nope, self._rotated(q_rope, positions)

    def _latents(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return what is cached: the normalised latent [B T C] and the rotated key [B T R]."""
        rope_BT1R = self.rope_key(x)[:, :, None, :]
        rotated_BTR = self._rotated(rope_BT1R, positions)[:, :, 0, :]
        return self.latent_norm(self.latent_down(x)), rotated_BTR

    def _heads_of(
        self, latent: Float[Array, "B S C"], rope_key: Float[Array, "B S R"]
    ) -> tuple[Float[Array, "B S N H"], Float[Array, "B S N V"]]:
        """Return the keys and values of every head."""
        ups = (self.key_up, self.value_up)
        k_nope_BSNH, v_BSNV = products_of(ups, latent, execution=self.execution)
        shape = (*k_nope_BSNH.shape[:3], rope_key.shape[-1])
        k_rope_BSNR = jnp.broadcast_to(rope_key[:, :, None, :], shape)
        return jnp.concatenate([k_nope_BSNH, k_rope_BSNR], axis=-1), v_BSNV

    def _rotated(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        rope = self.cfg.rope
        angles = angles_of(positions, frequencies(rope, self.cfg.mla.qk_rope_head_dim))
        return rotate(x, angles, pairing=rope.pairing, factor=rotation_factor(rope))

    def _up_kernel(self, layer: Linear) -> jax.Array:
        return self.rules.gather(layer.kernel[...].astype(layer.dtype), *layer.dims)

    def _finish(self, mixed: jax.Array) -> jax.Array:
        mixed = self.rules.constrain(mixed, "batch", "seq", "heads", None)
        return self.out(mixed)


def put_heads(
    cache: HeadCache, k: jax.Array, v: jax.Array, positions: Int[Array, "B T"]
) -> HeadCache:
    """Return the cache with keys and values of new tokens [B T N H] at their positions."""
    rows = jnp.arange(len(positions))[:, None]
    put = lambda slots, new: slots.at[rows, :, positions].set(new.astype(slots.dtype), mode="drop")
    return HeadCache(put(cache.keys, k), put(cache.values, v))


def attend_heads(
    q: Float[Array, "B T N H"], cache: HeadCache, *, mask: Bool[Array, "B T S"], scale: float
) -> Float[Array, "B T N V"]:
    """Return softmax(q·k·scale) v over the slots of each row, with a float32 softmax."""
    full = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    product = partial(jnp.einsum, precision=full, preferred_element_type=jnp.float32)
    scores = product("BTNH,BNSH->BNTS", q, cache.keys.astype(q.dtype)) * scale
    weights = jax.nn.softmax(jnp.where(mask[:, None, :, :], scores, NEG_INF), axis=-1)
    mixed = product("BNTS,BNSV->BTNV", weights.astype(q.dtype), cache.values.astype(q.dtype))
    return mixed.astype(q.dtype)


def tokens_of(
    cache: LatentPages, ids: Int[Array, "B n"], dtype: DTypeLike
) -> Float[Array, "B S W"]:
    """Return the tokens of pages, side by side, in `dtype`."""
    pages = cache.tokens[ids]
    pages = fp8_cache.unpack(pages) if pages.dtype == jnp.uint8 else pages
    return pages.reshape(len(ids), -1, pages.shape[-1]).astype(dtype)
