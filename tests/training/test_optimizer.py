"""Update rule and schedule: closed forms, and what decay may touch (cases S11, S15)."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxfound.config.model import ModelConfig
from jaxfound.config.train import OptimizerConfig
from jaxfound.models import describe
from jaxfound.models.build import Frame
from jaxfound.training.optimizer import RULES, decayed, make_optimizer, make_schedule
from tests.models.tiny import jit, weights_of
from tests.training.tiny import DENSE, MOE, tiny


def rates(cfg, steps):
    return jax.vmap(make_schedule(cfg))(jnp.arange(steps)).tolist()


def test_warm_up_is_linear_and_reaches_the_peak_with_its_last_step(tmp_path):
    cfg = tiny(tmp_path)
    assert rates(cfg, 4) == pytest.approx([2.5e-3, 5e-3, 7.5e-3, 1e-2])


def test_cosine_falls_from_the_peak_to_its_final_share(tmp_path):
    cfg = tiny(tmp_path)
    found = rates(cfg, 21)
    expected = [1e-3 + 9e-3 * 0.5 * (1 + math.cos(math.pi * n / 16)) for n in range(17)]
    assert found[4:] == pytest.approx(expected)


def test_wsd_is_flat_and_then_falls_in_a_line(tmp_path):
    cfg = tiny(tmp_path, "optimizer.schedule=wsd", "optimizer.decay_steps=4")
    found = rates(cfg, 21)
    assert found[4:17] == pytest.approx([1e-2] * 13)
    assert found[17:] == pytest.approx([7.75e-3, 5.5e-3, 3.25e-3, 1e-3])


def test_constant_stays(tmp_path):
    cfg = tiny(tmp_path, "optimizer.schedule=constant")
    assert rates(cfg, 21)[4:] == pytest.approx([1e-2] * 17)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("model", [DENSE, MOE, {**DENSE, "tie_embeddings": True}])
def test_decay_shrinks_every_matrix_and_leaves_everything_else_to_the_bit(tmp_path, model, name):
    cfg = tiny(tmp_path, "optimizer.weight_decay=0.5", f"optimizer.name={name}", model=model)
    table = describe(cfg.model)
    tx = make_optimizer(cfg.optimizer, table)
    params = weights_of(Frame(cfg.model)).params

    @jit
    def after_zeros(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        moves, _ = tx.update(zeros, tx.init(params), params)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, moves)

    after = after_zeros(params)
    norms = [path for path in params if path.endswith("scale")]
    assert norms
    for path, before in params.items():
        if path in norms:
            assert np.array_equal(after[path], before)
        else:
            np.testing.assert_allclose(after[path], 0.95 * before, rtol=1e-6)


def test_decay_looks_at_one_layers_array_and_not_at_the_stack():
    cfg = ModelConfig.model_validate({**MOE, "moe": {"num_experts": 4, "expert_dim": 16}})
    rule = decayed(describe(cfg))
    assert rule["layers.mixer_norm.scale"] is False
    assert rule["layers.mixer.latent_norm.scale"] is False
    assert rule["layers.ffn.experts.gate"] is True
    assert rule["layers.ffn.router.kernel"] is True
    assert rule["embedding.table"] is True
    assert not any(path.endswith("router.bias") for path in rule)


def test_every_update_rule_has_a_name_in_the_config():
    names = OptimizerConfig.model_json_schema()["properties"]["name"]["enum"]
    assert list(RULES) == names


def test_the_update_is_optaxs_adamw(tmp_path):
    cfg = tiny(tmp_path)
    params = {"w": jnp.linspace(-1, 1, 12).reshape(3, 4)}
    table_free = optax.adamw(1e-2, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
    ours = optax.chain(optax.scale_by_adam(0.9, 0.95, 1e-8), optax.add_decayed_weights(0.1))
    a, b = params, params
    state_a, state_b = table_free.init(a), ours.init(b)
    for n in range(3):
        grads = {"w": jnp.sin(params["w"] * (n + 1))}
        moves, state_a = table_free.update(grads, state_a, a)
        a = optax.apply_updates(a, moves)
        moves, state_b = ours.update(grads, state_b, b)
        b = jax.tree.map(lambda p, m: p - 1e-2 * m, b, moves)
    np.testing.assert_allclose(a["w"], b["w"], rtol=1e-6)
    assert cfg.optimizer.beta2 == 0.95
