"""Multi-head latent attention: expanded form for training, absorbed form for decoding."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxfound.config.model import ModelConfig
from jaxfound.models.cache import LatentCache, write_at
from jaxfound.models.execution import Execution
from jaxfound.models.layers.attention import CachedView, View, attend, attend_rows
from jaxfound.models.layers.linear import Linear
from jaxfound.models.layers.norm import RMSNorm
from jaxfound.models.layers.parameter import Dims
from jaxfound.models.layers.rope import (
    angles_of,
    frequencies,
    rotate,
    rotation_factor,
    softmax_factor,
)
from jaxfound.parallelism.context import whole_rows


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

    def __call__(self, x: Float[Array, "B T D"], view: View) -> Float[Array, "B T D"]:
        """Return the attention of x over its own row, in the expanded form."""
        q_nope, q_rope = self._queries(x, view.positions)
        # What a device of the context axis lacks of a row is sent as latents, not as heads.
        parts = self._latents(x, view.positions)
        latent_BSC, rope_BSR = (whole_rows(part, None, rules=self.rules) for part in parts)
        k_nope_BSNH, v_BSNV = self.key_up(latent_BSC), self.value_up(latent_BSC)
        shape = (*k_nope_BSNH.shape[:3], rope_BSR.shape[-1])
        k_rope_BSNR = jnp.broadcast_to(rope_BSR[:, :, None, :], shape)
        pin = self.rules.constrain
        q = pin(jnp.concatenate([q_nope, q_rope], axis=-1), "batch", "seq", "heads", None)
        k = jnp.concatenate([k_nope_BSNH, k_rope_BSNR], axis=-1)
        k = pin(k, "copies", None, "heads", None)
        v = pin(v_BSNV, "copies", None, "heads", None)
        scale = mla_scale(self.cfg)
        return self._finish(attend_rows(q, k, v, view=view, scale=scale, rules=self.rules))

    def extend(
        self, x: Float[Array, "B T D"], cache: LatentCache, view: CachedView
    ) -> tuple[Float[Array, "B T D"], LatentCache]:
        """Append T tokens to the latent cache and attend over all of it, in the absorbed form.

        The key's up-projection moves to the query and the value's to the output, so that what is
        read for each cached token is C + R numbers, whatever the number of heads.
        """
        q_nope, q_rope = self._queries(x, view.positions)
        latent, rope_key = self._latents(x, view.positions)
        cache = LatentCache(
            write_at(cache.latent, latent, view.positions),
            write_at(cache.rope_key, rope_key, view.positions),
        )
        key_up, value_up = self._up_kernel(self.key_up), self._up_kernel(self.value_up)
        full = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        q_BTNC = jnp.einsum("BTNH,CNH->BTNC", q_nope, key_up, precision=full)
        q = jnp.concatenate([q_BTNC, q_rope], axis=-1)
        latent_BS1C = cache.latent.astype(x.dtype)[:, :, None, :]
        rope_BS1R = cache.rope_key.astype(x.dtype)[:, :, None, :]
        k = jnp.concatenate([latent_BS1C, rope_BS1R], axis=-1)
        mixed_BTNC = attend(q, k, latent_BS1C, mask=view.mask, scale=mla_scale(self.cfg))
        mixed_BTNV = jnp.einsum("BTNC,CNV->BTNV", mixed_BTNC, value_up, precision=full)
        return self._finish(mixed_BTNV), cache

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

    def _rotated(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        rope = self.cfg.rope
        angles = angles_of(positions, frequencies(rope, self.cfg.mla.qk_rope_head_dim))
        return rotate(x, angles, pairing=rope.pairing, factor=rotation_factor(rope))

    def _up_kernel(self, layer: Linear) -> jax.Array:
        return self.rules.gather(layer.kernel[...].astype(layer.dtype), *layer.dims)

    def _finish(self, mixed: jax.Array) -> jax.Array:
        mixed = self.rules.constrain(mixed, "batch", "seq", "heads", None)
        return self.out(mixed)
