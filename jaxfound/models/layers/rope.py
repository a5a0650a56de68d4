"""Rotary position embedding, with the published ways to longer contexts."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxfound.config.model import RopeConfig


def frequencies(cfg: RopeConfig, num_channels: int) -> np.ndarray:
    """Return the angle per position of each rotated pair, float32 [num_channels / 2]."""
    exponents = np.arange(0, num_channels, 2, dtype=np.float64) / num_channels
    plain = cfg.theta**-exponents
    return SCALINGS[cfg.scaling](cfg, plain, num_channels).astype(np.float32)


def rotation_factor(cfg: RopeConfig) -> float:
    """Return YaRN's factor on cos and sin (1 for every other scaling)."""
    if cfg.scaling != "yarn":
        return 1.0
    below = magnitude(cfg.factor, cfg.mscale_all_dim) if cfg.mscale_all_dim else 1.0
    return magnitude(cfg.factor, cfg.mscale) / below


def softmax_factor(cfg: RopeConfig) -> float:
    """Return YaRN's separate factor on the softmax scale: the square of mscale_all_dim's magnitude.

    Position 0 rotates by nothing, so a model that forgets this one is right there and wrong after.
    """
    if cfg.scaling != "yarn" or not cfg.mscale_all_dim:
        return 1.0
    return magnitude(cfg.factor, cfg.mscale_all_dim) ** 2


def magnitude(factor: float, mscale: float) -> float:
    """Return 0.1 · mscale · ln(factor) + 1 (YaRN, section 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotate(x: jax.Array, angles: jax.Array, *, pairing: str, factor: float = 1.0) -> jax.Array:
    """Rotate every pair of the last dim of x [B T N H] by angles [B T H/2], in float32."""
    # float32: bfloat16 cannot tell position 257 from 256, and RoPE turns that into another angle.
    wide = x.astype(jnp.float32)
    cos_BT1P = factor * jnp.cos(angles)[:, :, None, :]
    sin_BT1P = factor * jnp.sin(angles)[:, :, None, :]
    if pairing == "half":
        first, second = jnp.split(wide, 2, axis=-1)
    else:
        first, second = wide[..., 0::2], wide[..., 1::2]
    turned = (first * cos_BT1P - second * sin_BT1P, second * cos_BT1P + first * sin_BT1P)
    if pairing == "half":
        out = jnp.concatenate(turned, axis=-1)
    else:
        out = jnp.stack(turned, axis=-1).reshape(x.shape)
    return out.astype(x.dtype)


def angles_of(positions: jax.Array, inverse: np.ndarray) -> jax.Array:
    """Return the float32 angle of each pair at positions [B T], as [B T H/2]."""
    return positions.astype(jnp.float32)[:, :, None] * jnp.asarray(inverse)[None, None, :]


def _linear(cfg: RopeConfig, plain: np.ndarray, num_channels: int) -> np.ndarray:
    """Divide frequencies by `factor`, which divides positions (Chen et al., 2306.15595, 2.3)."""
    return plain / cfg.factor


def _llama3(cfg: RopeConfig, plain: np.ndarray, num_channels: int) -> np.ndarray:
    """Divide long wavelengths by `factor`, keep short ones, blend between (Llama 3.1)."""
    wavelengths = 2 * math.pi / plain
    turns = cfg.original_max_positions / wavelengths
    blend = (turns - cfg.low_freq_factor) / (cfg.high_freq_factor - cfg.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return (1 - blend) * plain / cfg.factor + blend * plain


def _yarn(cfg: RopeConfig, plain: np.ndarray, num_channels: int) -> np.ndarray:
    """Interpolate slow channels, keep fast ones, ramp between two channel numbers (YaRN, 3.2)."""

    def channel_of(rotations: float) -> float:
        wavelength = cfg.original_max_positions / (rotations * 2 * math.pi)
        return num_channels * math.log(wavelength) / (2 * math.log(cfg.theta))

    low = max(math.floor(channel_of(cfg.beta_fast)), 0)
    high = min(math.ceil(channel_of(cfg.beta_slow)), num_channels - 1)
    span = max(high - low, 0.001)
    ramp = np.clip((np.arange(num_channels // 2) - low) / span, 0.0, 1.0)
    return plain / cfg.factor * ramp + plain * (1 - ramp)


def _unscaled(cfg: RopeConfig, plain: np.ndarray, num_channels: int) -> np.ndarray:
    """Keep the frequencies."""
    return plain


SCALINGS: dict[str, Callable[[RopeConfig, np.ndarray, int], np.ndarray]] = {
    "none": _unscaled,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
