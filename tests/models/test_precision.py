"""Which format each operation of a model computes in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxfound.config.layer_formats import check_precision
from jaxfound.config.precision import PrecisionConfig, PrecisionRule
from jaxfound.config.schema import ConfigError
from jaxfound.models import Execution, describe
from jaxfound.models.build import Frame
from jaxfound.models.layers.linear import Linear
from tests.models.tiny import forward, model_config, tokens_of, weights_of

RULES = PrecisionConfig(
    compute="bfloat16",
    rules=(
        PrecisionRule(pattern="layers.mixer.*", format="float32"),
        PrecisionRule(pattern="*.mixer.out", format="fp8"),
    ),
)


@pytest.mark.parametrize(
    ("path", "format"),
    [
        ("layers.mixer.query", "float32"),
        ("layers.mixer.out", "float32"),
        ("leading.mixer.out", "fp8"),
        ("layers.ffn.up", "bfloat16"),
    ],
)
def test_the_first_rule_that_matches_decides_and_compute_is_the_rest(path, format):
    assert RULES.format_of(path) == format


def linear(format):
    rules = (PrecisionRule(pattern="here", format=format),)
    execution = Execution(precision=PrecisionConfig(compute="bfloat16", rules=rules))
    dims = ((("embed", 24),), (("ffn", 40),))
    return Linear(*dims, rngs=nnx.Rngs(0), execution=execution, path="here", std=1.0)


def test_a_float32_product_in_a_bfloat16_model_keeps_its_weights_unrounded():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 24)), jnp.bfloat16)
    layer = linear("float32")
    expected = np.asarray(x, np.float64) @ np.asarray(layer.kernel[...], np.float64)
    assert layer(x).dtype == jnp.bfloat16
    # Half a unit in the last place of bfloat16: the result is rounded once, at the end.
    np.testing.assert_allclose(np.asarray(layer(x), np.float64), expected, rtol=2**-8)


def test_rounding_the_weights_shows_in_a_bfloat16_product():
    x = jnp.ones((1, 24), jnp.bfloat16)
    rounded = linear("bfloat16")
    kernel = np.asarray(rounded.kernel[...])
    as_bfloat16 = np.asarray(jnp.asarray(kernel, jnp.bfloat16), np.float64).sum(axis=0)
    np.testing.assert_allclose(np.asarray(rounded(x), np.float64)[0], as_bfloat16, rtol=2**-7)


@pytest.mark.parametrize("name", ["gqa", "mla_moe_yarn"])
def test_a_bfloat16_model_is_near_the_float32_one_and_gives_float32_logits(name):
    cfg = model_config(name)
    plain = Frame(cfg)
    rounded = Frame(cfg, execution=Execution(precision=PrecisionConfig(compute="bfloat16")))
    # Weights small enough that no router's choice hangs on a rounding.
    arrays = jax.tree.map(lambda a: 0.5 * a, weights_of(plain))
    tokens = jnp.asarray(tokens_of(2, 12))
    exact = forward(plain.bind(*arrays), tokens)
    near = forward(rounded.bind(*arrays), tokens)
    assert near.dtype == exact.dtype == jnp.float32
    error = np.linalg.norm((near - exact)[..., :61]) / np.linalg.norm(exact[..., :61])
    assert 0 < error < 0.05


def test_a_rule_that_matches_nothing_is_refused_with_what_there_is():
    table = describe(model_config("mla"))
    check_precision(rules_of("layers.mixer.*"), table)
    with pytest.raises(ConfigError, match=r"'layers.mixr.\*' matches no .* layers.mixer.out"):
        check_precision(rules_of("layers.mixr.*"), table)
    with pytest.raises(ConfigError, match="matches no operation"):
        check_precision(rules_of("layers.ffn.router"), table)


def rules_of(pattern):
    return PrecisionConfig(rules=(PrecisionRule(pattern=pattern, format="float32"),))
