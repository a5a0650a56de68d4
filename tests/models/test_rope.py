"""Rotary frequencies against closed forms, and what a rotation keeps."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jaxfound.config.model import ModelConfig, RopeConfig
from jaxfound.models.layers.mla import mla_scale
from jaxfound.models.layers.rope import (
    angles_of,
    frequencies,
    magnitude,
    rotate,
    rotation_factor,
    softmax_factor,
)

PLAIN = RopeConfig()
LLAMA31 = RopeConfig(
    theta=500_000.0,
    scaling="llama3",
    factor=8.0,
    original_max_positions=8192,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)
V3 = RopeConfig(scaling="yarn", factor=40.0, mscale=1.0, mscale_all_dim=1.0)
V2_LITE = RopeConfig(scaling="yarn", factor=40.0, mscale=0.707, mscale_all_dim=0.707)

HEADS = arrays(np.float32, (1, 3, 2, 8), elements=st.floats(-4, 4, width=32))
PLACES = st.integers(0, 1000)
PAIRINGS = ("half", "interleaved")


def rotated(x, position, pairing, *, factor=1.0):
    positions = jnp.full((1, x.shape[1]), position)
    angles = angles_of(positions, frequencies(PLAIN, x.shape[-1]))
    return np.asarray(rotate(jnp.asarray(x), angles, pairing=pairing, factor=factor))


def test_plain_frequencies_are_the_geometric_series():
    expected = [10_000.0 ** (-2 * i / 64) for i in range(32)]
    np.testing.assert_allclose(frequencies(PLAIN, 64), expected, rtol=1e-6)


def test_linear_scaling_turns_a_position_as_far_as_a_nearer_one_without():
    """Position interpolation (arXiv 2306.15595, equation 4): position p is p / factor."""
    linear = RopeConfig(scaling="linear", factor=4.0)
    expected = [10_000.0 ** (-2 * i / 64) / 4 for i in range(32)]
    np.testing.assert_allclose(frequencies(linear, 64), expected, rtol=1e-6)
    assert rotation_factor(linear) == softmax_factor(linear) == 1.0
    far, near = jnp.array([[0, 4, 48, 400]]), jnp.array([[0, 1, 12, 100]])
    np.testing.assert_allclose(
        angles_of(far, frequencies(linear, 64)), angles_of(near, frequencies(PLAIN, 64)), rtol=1e-6
    )


def test_llama3_keeps_short_wavelengths_divides_long_ones_and_blends_between():
    plain = 500_000.0 ** -(np.arange(0, 128, 2) / 128)
    wavelengths = 2 * math.pi / plain
    scaled = frequencies(LLAMA31, 128)
    short, long = wavelengths < 8192 / 4, wavelengths > 8192 / 1
    np.testing.assert_allclose(scaled[short], plain[short], rtol=1e-6)
    np.testing.assert_allclose(scaled[long], plain[long] / 8, rtol=1e-6)
    blend = ((8192 / wavelengths - 1) / 3)[~short & ~long]
    expected = (1 - blend) * plain[~short & ~long] / 8 + blend * plain[~short & ~long]
    assert len(expected) > 3
    np.testing.assert_allclose(scaled[~short & ~long], expected, rtol=1e-5)


def test_yarn_ramps_between_the_channels_of_32_turns_and_of_one_turn():
    """Closed form at DeepSeek's sizes: channels below 10 are kept, from 23 on divided by 40."""
    plain = 10_000.0 ** -(np.arange(0, 64, 2) / 64)
    scaled = frequencies(V3, 64)
    np.testing.assert_allclose(scaled[:11], plain[:11], rtol=1e-6)
    np.testing.assert_allclose(scaled[23:], plain[23:] / 40, rtol=1e-6)
    ramp = (np.arange(11, 23) - 10) / (23 - 10)
    expected = plain[11:23] * (1 - ramp) + plain[11:23] / 40 * ramp
    np.testing.assert_allclose(scaled[11:23], expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("rope", "scale"),
    [(V3, 0.1352338), (V2_LITE, 0.1147214), (PLAIN, 0.0721688)],
    ids=["DeepSeek-V3", "DeepSeek-V2-Lite", "no yarn"],
)
def test_the_softmax_scale_is_the_published_number(rope, scale):
    cfg = ModelConfig(
        vocab_size=2,
        embed_dim=8,
        num_layers=1,
        num_heads=1,
        ffn_dim=8,
        mixer="mla",
        mla={"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "kv_lora_rank": 512},
        rope=rope,
    )
    np.testing.assert_allclose(mla_scale(cfg), scale, rtol=1e-6)


def test_equal_magnitudes_leave_cos_and_sin_alone():
    assert rotation_factor(V3) == rotation_factor(V2_LITE) == rotation_factor(PLAIN) == 1.0
    assert softmax_factor(V3) == pytest.approx(1.873854, rel=1e-6)
    assert softmax_factor(V2_LITE) == pytest.approx(1.589626, rel=1e-6)


def test_without_mscale_all_dim_the_whole_magnitude_is_on_cos_and_sin():
    rope = RopeConfig(scaling="yarn", factor=40.0, mscale=1.0, mscale_all_dim=0.0)
    assert rotation_factor(rope) == pytest.approx(0.1 * math.log(40) + 1)
    assert softmax_factor(rope) == 1.0
    assert magnitude(1.0, 1.0) == 1.0
    x = np.random.default_rng(0).normal(size=(1, 3, 2, 8)).astype(np.float32)
    twice = rotated(x, 5, "half", factor=2.0)
    np.testing.assert_allclose(twice, 2 * rotated(x, 5, "half"), rtol=1e-6)


def test_halves_and_neighbours_are_the_same_rotation_of_permuted_channels():
    x = np.random.default_rng(0).normal(size=(1, 3, 2, 8)).astype(np.float32)
    to_halves = np.concatenate([np.arange(0, 8, 2), np.arange(1, 8, 2)])
    np.testing.assert_array_equal(
        rotated(x, 7, "interleaved")[..., to_halves], rotated(x[..., to_halves], 7, "half")
    )


@pytest.mark.parametrize("pairing", PAIRINGS)
@settings(max_examples=25, deadline=None)
@given(x=HEADS, position=PLACES)
def test_a_rotation_keeps_the_length_of_every_head(pairing, x, position):
    lengths = np.linalg.norm(rotated(x, position, pairing), axis=-1)
    np.testing.assert_allclose(lengths, np.linalg.norm(x, axis=-1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pairing", PAIRINGS)
@settings(max_examples=25, deadline=None)
@given(q=HEADS, k=HEADS, near=PLACES, far=PLACES, shift=PLACES)
def test_scores_depend_on_the_distance_of_positions_alone(pairing, q, k, near, far, shift):
    """float32 angles of positions up to 2,000 are good to 1e-4 radians; scores are up to 130."""

    def score(a, b):
        return (rotated(q, a, pairing) * rotated(k, b, pairing)).sum(axis=-1)

    np.testing.assert_allclose(score(near, far), score(near + shift, far + shift), atol=0.05)


def test_bfloat16_inputs_are_rotated_in_float32():
    """Position 257 is 256 in bfloat16: the angle must not go through it."""
    x = jnp.ones((1, 1, 1, 8), jnp.bfloat16)
    angles = angles_of(jnp.array([[257]]), frequencies(PLAIN, 8))
    turned = rotate(x, angles, pairing="half")
    assert turned.dtype == jnp.bfloat16
    exact = math.cos(257) - math.sin(257)
    assert float(turned[0, 0, 0, 0]) == pytest.approx(exact, abs=4e-3)
