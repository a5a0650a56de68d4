"""What decoding remembers: keys and values, or MLA's latent, in slots by position."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxfound.config.model import ModelConfig


class KeyValueCache(NamedTuple):
    """Keys and values of one layer (or of a stack of layers, with a leading dim)."""

    keys: Float[Array, "*L B S K H"]
    values: Float[Array, "*L B S K H"]


class LatentCache(NamedTuple):
    """MLA's cache: one normalised latent and one rotated key a token, shared by all heads."""

    latent: Float[Array, "*L B S C"]
    rope_key: Float[Array, "*L B S R"]


class HeadCache(NamedTuple):
    """Keys and values of every head of one MLA layer: what its latents stand for, heads first.

    No command serves from it; it is what MLA's cache is measured beside.
    """

    keys: Float[Array, "B N S H"]
    values: Float[Array, "B N S V"]


type LayerCache = KeyValueCache | LatentCache | HeadCache


class Cache(NamedTuple):
    """The cache of a whole decoder: the leading dense stack (or None) and the main stack."""

    leading: LayerCache | None
    layers: LayerCache


def empty_cache(cfg: ModelConfig, *, batch: int, num_slots: int, dtype: DTypeLike) -> Cache:
    """Return a cache of zeros with room for `num_slots` tokens in each of `batch` rows."""

    def stack(num_layers: int) -> LayerCache:
        shape = (num_layers, batch, num_slots)
        if cfg.mixer == "mla":
            return LatentCache(
                jnp.zeros((*shape, cfg.mla.kv_lora_rank), dtype),
                jnp.zeros((*shape, cfg.mla.qk_rope_head_dim), dtype),
            )
        heads = (cfg.gqa.num_kv_heads, cfg.gqa.head_dim)
        return KeyValueCache(jnp.zeros((*shape, *heads), dtype), jnp.zeros((*shape, *heads), dtype))

    first = cfg.num_leading_layers
    return Cache(stack(first) if first else None, stack(cfg.num_layers - first))


def write_at(
    slots: Float[Array, "B S ..."], new: Float[Array, "B T ..."], positions: Int[Array, "B T"]
) -> Float[Array, "B S ..."]:
    """Return `slots` with token t of row b at slot positions[b, t]; beyond the end is dropped."""
    rows = jnp.arange(slots.shape[0])[:, None]
    return slots.at[rows, positions].set(new.astype(slots.dtype), mode="drop")


def bytes_a_token(cfg: ModelConfig, *, bytes_a_value: int = 2) -> int:
    """Return the cache bytes of one token over all layers, multi-token prediction apart."""
    if cfg.mixer == "mla":
        values = cfg.mla.kv_lora_rank + cfg.mla.qk_rope_head_dim
    else:
        values = 2 * cfg.gqa.num_kv_heads * cfg.gqa.head_dim
    return cfg.num_layers * values * bytes_a_value


def slots_of(cache: Cache) -> int:
    """Return how many tokens a row of the cache can hold."""
    return jax.tree.leaves(cache.layers)[0].shape[2]
