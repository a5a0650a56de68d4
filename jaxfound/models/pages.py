"""A cache in pages that many requests share: tokens of a row stand where its block table says.

All layers live in one array, so that a step writes in place and no layer is sliced out: page p of
layer l is at l x num_pages + p. Nothing is ever cleared; what a finished request left behind a
row's length weighs nothing, NaN included.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int, Shaped

from jaxfound.config.model import ModelConfig
from jaxfound.config.schema import ConfigError
from jaxfound.parallelism.axes import ShardingRules
from pallas_kernels.mla_decode import fp8_cache

type CacheFormat = Literal["compute", "fp8"]

# An array; in pages that describe others, their shape or their place on the mesh.
Leaf = Any
# A page that no pool has: writes to it are dropped. Far enough from 2^31 for a layer's offset.
NOWHERE = 2**30


class KeyValuePages(NamedTuple):
    """Keys and values of all layers, [P page K H] each."""

    keys: Leaf
    values: Leaf


class LatentPages(NamedTuple):
    """MLA's cache of all layers: latent and rotated key side by side, as the kernels read them.

    Attributes:
        tokens: C + R numbers a token, or the bytes that `fp8_cache` packs them into [P page W].
    """

    tokens: Leaf


type Pages = KeyValuePages | LatentPages


class PagedView(NamedTuple):
    """Where the tokens of a step stand in the pages, and what they may see.

    Attributes:
        positions: place of each new token in its row [B T].
        real: False for padding, which is written nowhere [B T].
        lengths: tokens of each row, the new ones included; 0 for a row that is none [B].
        block_table: pages of each row in order; behind its last one anything [B max_pages].
        page_of_token: page that each new token is written to, `NOWHERE` for padding [B T].
        slot_of_token: its slot in that page [B T].
        num_pages: pages of one layer.
        decoding: whether T is small. A row's real tokens are then the last of its T, where the
            kernels expect them, and else the first.
    """

    positions: Int[Array, "B T"]
    real: Bool[Array, "B T"]
    lengths: Int[Array, " B"]
    block_table: Int[Array, "B max_pages"]
    page_of_token: Int[Array, "B T"]
    slot_of_token: Int[Array, "B T"]
    num_pages: int
    decoding: bool

    def of_layer(self, number: int | Int[Array, ""]) -> "PagedView":
        """Return the same with the pages of layer `number`; `self` is of layer 0."""
        first = number * self.num_pages
        return self._replace(
            block_table=self.block_table + first, page_of_token=self.page_of_token + first
        )


def paged_view(
    starts: Int[Array, " B"],
    counts: Int[Array, " B"],
    block_table: Int[Array, "B max_pages"],
    *,
    num_tokens: int,
    page_size: int,
    num_pages: int,
    decoding: bool,
) -> PagedView:
    """Return the view of `counts` new tokens behind `starts` cached ones, padded to `num_tokens`.

    Args:
        starts: tokens of each row that are cached already.
        counts: new tokens of each row, 0 for a row that is none; the first of its T, in decoding
            the last (`to_end` moves them there).
        block_table: pages of each row, enough for starts + counts tokens.
        num_tokens: T.
        page_size: tokens of a page.
        num_pages: pages of one layer.
        decoding: as `PagedView` says.
    """
    first = num_tokens - counts if decoding else jnp.zeros_like(counts)
    order_BT = jnp.arange(num_tokens)[None, :] - first[:, None]
    real = (order_BT >= 0) & (order_BT < counts[:, None])
    positions = jnp.where(real, starts[:, None] + order_BT, 0)
    page_of_token = jnp.take_along_axis(block_table, positions // page_size, axis=1)
    return PagedView(
        positions=positions,
        real=real,
        lengths=jnp.where(counts > 0, starts + counts, 0),
        block_table=block_table,
        page_of_token=jnp.where(real, page_of_token, NOWHERE),
        slot_of_token=positions % page_size,
        num_pages=num_pages,
        decoding=decoding,
    )


def to_end(x: Shaped[Array, "B T ..."], counts: Int[Array, " B"]) -> Shaped[Array, "B T ..."]:
    """Return each row with its first `counts` entries behind the others, as decoding has them."""
    return _turned(x, counts)


def to_head(x: Shaped[Array, "B T ..."], counts: Int[Array, " B"]) -> Shaped[Array, "B T ..."]:
    """Return each row with its last `counts` entries in front of the others: undoes `to_end`."""
    return _turned(x, -counts)


def _turned(x: Shaped[Array, "B T ..."], by: Int[Array, " B"]) -> Shaped[Array, "B T ..."]:
    length = x.shape[1]
    if length == 1:
        return x
    order = (jnp.arange(length)[None, :] + by[:, None]) % length
    return jnp.take_along_axis(x, order.reshape(*order.shape, *(1,) * (x.ndim - 2)), axis=1)


def written(
    pool: Shaped[Array, "P page ..."], new: Shaped[Array, "B T ..."], view: PagedView
) -> Shaped[Array, "P page ..."]:
    """Return `pool` with each new token in its page and slot; padding is written nowhere."""
    at = pool.at[view.page_of_token, view.slot_of_token]
    return at.set(new.astype(pool.dtype), mode="drop")


def page_shapes(
    cfg: ModelConfig,
    *,
    num_pages: int,
    page_size: int,
    dtype: DTypeLike,
    cache_format: CacheFormat = "compute",
    num_layers: int | None = None,
) -> Pages:
    """Return the shapes and formats of a pool's arrays.

    Args:
        cfg: the model.
        num_pages: pages of one layer.
        page_size: tokens of a page.
        dtype: of cached numbers, with cache_format "compute".
        cache_format: "fp8" packs a latent and its rotated key into 656 bytes.
        num_layers: layers that cache; those of the model by default.

    Raises:
        ConfigError: if the model's cache cannot be packed.
    """
    place = ((cfg.num_layers if num_layers is None else num_layers) * num_pages, page_size)
    if cache_format == "fp8":
        check_packable(cfg)
        return LatentPages(jax.ShapeDtypeStruct((*place, fp8_cache.TOKEN_BYTES), jnp.uint8))
    if cfg.mixer == "mla":
        width = cfg.mla.kv_lora_rank + cfg.mla.qk_rope_head_dim
        return LatentPages(jax.ShapeDtypeStruct((*place, width), dtype))
    heads = jax.ShapeDtypeStruct((*place, cfg.gqa.num_kv_heads, cfg.gqa.head_dim), dtype)
    return KeyValuePages(heads, heads)


def check_packable(cfg: ModelConfig) -> None:
    """Refuse an 8-bit cache for a model whose tokens do not fit its layout.

    Raises:
        ConfigError: names the model's sizes and the ones that are packed.
    """
    want = f"kv_lora_rank={fp8_cache.LATENT} and qk_rope_head_dim={fp8_cache.ROPE}"
    way_out = "Use serve.cache_format=compute"
    if cfg.mixer != "mla":
        raise ConfigError(
            f"serve.cache_format=fp8 packs MLA's latents, with {want}; this model has "
            f"mixer={cfg.mixer}, which caches keys and values. {way_out}"
        )
    sizes = (cfg.mla.kv_lora_rank, cfg.mla.qk_rope_head_dim)
    if sizes != (fp8_cache.LATENT, fp8_cache.ROPE):
        raise ConfigError(
            f"serve.cache_format=fp8 packs {want}; this model has kv_lora_rank={sizes[0]} and "
            f"qk_rope_head_dim={sizes[1]}. {way_out}"
        )


def page_specs(pages: Pages, rules: ShardingRules) -> Pages:
    """Return how a pool's arrays lie on the mesh: heads over tensor, latents whole everywhere."""
    if isinstance(pages, LatentPages):
        return LatentPages(PartitionSpec())
    spec = rules.activation_spec((None, None, "kv_heads", None))
    return KeyValuePages(spec, spec)


def page_bytes(shapes: Pages, *, num_pages: int) -> int:
    """Return the bytes of one page over all layers of a pool with these shapes."""
    return sum(s.size * s.dtype.itemsize for s in shapes) // num_pages


def empty_pages(shapes: Pages, make: Callable[..., jax.Array] = jnp.zeros) -> Pages:
    """Return a pool of zeros with these shapes."""
    return type(shapes)(*(make(s.shape, s.dtype) for s in shapes))
