"""Chooses the next token from logits, on the device."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxfound.config.schema import ConfigError


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn.

    Attributes:
        temperature: divides the logits; 0 = the most likely token.
        top_k: only the k most likely tokens; 0 = all.
        top_p: only the smallest set of tokens whose probabilities reach this sum (Holtzman et
            al., 2020); 1 = all.
        seed: of the draws.

    Raises:
        ConfigError: a value is out of its range.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature={self.temperature} must be 0 or more, and finite")
        if self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k} must be 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} must be above 0 and at most 1")


def sample(logits: Float[Array, "B V"], key: jax.Array, *, sampling: Sampling) -> Int[Array, " B"]:
    """Return a token of each row; ids with logit -1e30 (padding) are never drawn."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1)
    logits = logits.astype(jnp.float32) / sampling.temperature
    if sampling.top_k:
        k = min(sampling.top_k, logits.shape[-1])
        weakest = jax.lax.top_k(logits, k)[0][:, -1:]
        logits = jnp.where(logits < weakest, -jnp.inf, logits)
    if sampling.top_p < 1:
        logits = jnp.where(inside_top_p(logits, sampling.top_p), logits, -jnp.inf)
    return jax.random.categorical(key, logits, axis=-1)


def inside_top_p(logits: Float[Array, "B V"], top_p: float) -> Array:
    """Return True for the tokens of the smallest set that reaches `top_p`; never empty."""
    order = jnp.argsort(-logits, axis=-1)
    sorted_p = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
    before = jnp.cumsum(sorted_p, axis=-1) - sorted_p
    rows = jnp.arange(logits.shape[0])[:, None]
    return jnp.zeros(logits.shape, bool).at[rows, order].set(before < top_p)
