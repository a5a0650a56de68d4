"""Dropout whose masks depend on what is dropped and never on where it is computed.

A mask's bits are those of a counter: run, step, layer, place in the layer, row of the global batch,
place in the row, channel. So one device, any mesh, any cut into micro-batches or stages, a forward
pass that is run again and a run that is resumed have the same masks.

Source: Vaswani et al., "Attention Is All You Need" (2017), section 5.4, for the places: the outputs
of a block's two parts before they are added, and the embeddings. The weights of attention are not
dropped.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxfound.parallelism.axes import ShardingRules
from jaxfound.parallelism.stream import in_stream

Place = Literal["embedding", "mixer", "ffn"]
PLACES: tuple[Place, ...] = ("embedding", "mixer", "ffn")
# The generator that a training state's key data are of; a counter through it gives 32 bits.
GENERATOR = "threefry2x32"
BITS = 2**32


class Noise(NamedTuple):
    """What the masks of some rows are drawn from.

    Attributes:
        key: key data of run and step, and of a layer when it is one layer's.
        rows: number of each row in the global batch [B].
        places: place of each token in its row [T]; None: tokens are in order.
    """

    key: UInt32[Array, "2"]
    rows: Int[Array, " B"]
    places: Int[Array, " T"] | None = None

    def of_layer(self, number: int | Int[Array, ""]) -> "Noise":
        """Return what the masks of one layer are drawn from; 0 is before the first layer."""
        return self._replace(key=folded(self.key, number))


def folded(key: UInt32[Array, "2"], number: int | Int[Array, ""]) -> UInt32[Array, "2"]:
    """Return the data of the key that is left after `number` went in."""
    return jax.random.key_data(jax.random.fold_in(wrapped(key), number))


def wrapped(key: UInt32[Array, "*keys 2"]) -> jax.Array:
    """Return key data as keys, whatever generator is the default."""
    return jax.random.wrap_key_data(key, impl=GENERATOR)


def drop(
    x: Float[Array, "B T D"],
    noise: Noise | None,
    *,
    place: Place,
    rate: float,
    rules: ShardingRules,
) -> Float[Array, "B T D"]:
    """Return x with channels dropped at `rate`, the others scaled to the same mean.

    Args:
        x: where the residual stream lies.
        noise: of the layer; None where nothing is dropped, as in evaluation.
        place: what of the layer x is.
        rate: chance to be dropped.
        rules: how x lies on the mesh.
    """
    if noise is None or rate == 0:
        return x
    mask = in_stream(kept(noise, x.shape[1:], place=place, rate=rate), rules)
    # float32: in bfloat16 1 / 0.9 is 0.2 % off, the same way every time.
    scaled = x.astype(jnp.float32) * (1.0 / (1.0 - rate))
    return jnp.where(mask, scaled, 0.0).astype(x.dtype)


def kept(
    noise: Noise, shape: tuple[int, ...], *, place: Place, rate: float
) -> Bool[Array, "B T D"]:
    """Return which channels of which tokens stay, each with a chance of 1 - rate.

    Args:
        noise: of the layer.
        shape: T and D.
        place: what of the layer is dropped.
        rate: chance to be dropped, in steps of 2^-32.
    """
    length, num_channels = shape
    places = jnp.arange(length) if noise.places is None else noise.places

    def of_token(key: jax.Array) -> jax.Array:
        return jax.random.bits(key, (num_channels,), jnp.uint32)

    of_place = wrapped(folded(noise.key, PLACES.index(place)))
    # One operation a channel, so that devices compute their own parts alone.
    with jax.threefry_partitionable(True):
        of_row_B = jax.vmap(jax.random.fold_in, (None, 0))(of_place, noise.rows)
        each = jax.vmap(jax.random.fold_in, (None, 0))
        of_token_BT = jax.vmap(each, (0, None))(of_row_B, places)
        bits_BTD = jax.vmap(jax.vmap(of_token))(of_token_BT)
    return bits_BTD >= jnp.uint32(min(round(rate * BITS), BITS - 1))
