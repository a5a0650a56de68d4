"""Presets of published models have the published sizes, exactly, and cost nothing to count."""

import json
import math

import jax
import numpy as np
import pytest

from jaxfound.config import PRESETS, ModelConfig, load, parse
from jaxfound.models import describe
from jaxfound.models.layers.mla import mla_scale
from jaxfound.models.layers.rope import frequencies, rotation_factor
from jaxfound.models.summary import summarize
from jaxfound.parallelism import make_plan
from tests.architecture.source_tree import ROOT

# Main model, what a token uses of it, multi-token prediction apart, cache bytes a token (bfloat16).
COUNTS = {
    "smollm2-135m": (134_515_008, 134_515_008, 0, 30 * 2 * 3 * 64 * 2),
    "llama3-8b": (8_030_261_248, 8_030_261_248, 0, 131_072),
    "deepseek-v2-lite": (15_706_484_224, 2_661_150_208, 0, 27 * 576 * 2),
    "deepseek-v3": (671_026_404_352, 37_552_282_624, 11_610_067_968, 70_272),
    "50b": (50_034_023_424, 50_034_023_424, 0, 48 * 2 * 8 * 128 * 2),
}
# Shapes that DeepSeek's files hold, [outputs inputs], and how many of each; routers' biases apart.
V3_ATTENTION = [(1536, 7168), (1536,), (24576, 1536), (576, 7168), (512,), (32768, 512),
                (7168, 16384), (7168,), (7168,)]  # fmt: skip
V3_EXPERT = [(2048, 7168), (2048, 7168), (7168, 2048)]
V3_MOE = [(256, 7168), *V3_EXPERT, *(256 * V3_EXPERT)]
LITE_ATTENTION = [(3072, 2048), (576, 2048), (512,), (4096, 512), (2048, 2048), (2048,), (2048,)]
LITE_EXPERT = [(1408, 2048), (1408, 2048), (2048, 1408)]
LITE_MOE = [(64, 2048), (2816, 2048), (2816, 2048), (2048, 2816), *(64 * LITE_EXPERT)]
FILES = {
    "deepseek-v3": [
        *(2 * [(129_280, 7168)]), (7168,), *(61 * V3_ATTENTION), *(58 * V3_MOE),
        *(3 * [(18_432, 7168), (18_432, 7168), (7168, 18_432)]),
    ],
    "deepseek-v2-lite": [
        *(2 * [(102_400, 2048)]), (2048,), *(27 * LITE_ATTENTION), *(26 * LITE_MOE),
        (10_944, 2048), (10_944, 2048), (2048, 10_944),
    ],
}  # fmt: skip
# Devices that the comment of each YAML is about.
DEVICES = {"smollm2-135m": 1, "llama3-8b": 8, "deepseek-v2-lite": 8, "deepseek-v3": 256, "50b": 24}


def model(name):
    return ModelConfig.model_validate_json(json.dumps(PRESETS[name]))


@pytest.mark.parametrize("name", COUNTS)
def test_a_preset_has_its_published_size(name):
    cost = summarize(model(name), seq_len=4096)
    assert (cost.total, cost.active, cost.ahead, cost.cache_bytes) == COUNTS[name]
    assert cost.padding == 0


@pytest.mark.parametrize("name", FILES)
def test_a_deepseek_preset_holds_as_much_as_the_published_shapes(name):
    assert summarize(model(name), seq_len=1).total == sum(math.prod(s) for s in FILES[name])


def test_the_module_that_looks_ahead_is_one_more_layer_and_what_joins_it():
    """A layer with experts, the join [14336 7168], three norms; embedding and head are shared."""
    layer = sum(math.prod(s) for s in [*V3_ATTENTION, *V3_MOE])
    ahead = summarize(model("deepseek-v3"), seq_len=1).ahead
    assert ahead == layer + 2 * 7168 * 7168 + 3 * 7168


def test_rounded_as_publications_do_the_counts_are_theirs():
    """What others call activated leaves the embedding out: 36.6 B of V3, 2.4 B of V2-Lite."""
    cost = summarize(model("deepseek-v3"), seq_len=1)
    embedding = next(p.total for p in cost.parts if p.name == "embedding")
    assert round(cost.total / 1e9) == 671
    assert round((cost.active - embedding) / 1e9, 1) == 36.6
    lite = summarize(model("deepseek-v2-lite"), seq_len=1)
    embedding = next(p.total for p in lite.parts if p.name == "embedding")
    assert round(lite.total / 1e9, 1) == 15.7
    assert f"{(lite.active - embedding) / 1e9:.4f}"[:3] == "2.4"


def test_counting_the_largest_preset_allocates_no_array():
    before = len(jax.live_arrays())
    table = describe(model("deepseek-v3"))
    assert table.size > 6e11
    assert len(jax.live_arrays()) == before


def test_llama_3_does_not_scale_its_rope_and_3_1_does():
    plain = model("llama3-8b").rope
    expected = [500_000.0 ** (-2 * i / 128) for i in range(64)]
    np.testing.assert_allclose(frequencies(plain, 128), expected, rtol=1e-6)
    cfg = load(
        ROOT / "configs" / "llama3-8b.yaml",
        [
            "model.rope={scaling: llama3, factor: 8, original_max_positions: 8192}",
            "model.max_positions=131072",
        ],
    )
    scaled = frequencies(cfg.model.rope, 128)
    # Wavelengths under 8192/4 stay, those over 8192 are eight times longer.
    wavelengths = 2 * np.pi / np.array(expected)
    np.testing.assert_allclose(scaled[wavelengths < 2048], np.array(expected)[wavelengths < 2048])
    long = wavelengths > 8192
    np.testing.assert_allclose(scaled[long], np.array(expected)[long] / 8, rtol=1e-6)
    assert 0 < long.sum() < 64


@pytest.mark.parametrize(
    ("name", "scale"), [("deepseek-v3", 0.1352338), ("deepseek-v2-lite", 0.1147214)]
)
def test_a_deepseek_preset_has_the_published_softmax_scale(name, scale):
    cfg = model(name)
    np.testing.assert_allclose(mla_scale(cfg), scale, rtol=1e-6)
    assert rotation_factor(cfg.rope) == 1.0
    assert cfg.rope.pairing == "interleaved"


def test_v2_lite_routes_by_unnormalised_probabilities_of_all_experts():
    cfg = model("deepseek-v2-lite")
    moe = cfg.moe
    assert (moe.scoring, moe.num_groups, moe.top_groups) == ("softmax", 1, 1)
    assert not moe.normalize_weights
    assert (moe.routed_scaling, moe.bias_update_rate, cfg.mla.q_lora_rank) == (1.0, 0.0, 0)


def test_50b_is_what_its_name_says():
    cfg = model("50b")
    assert (cfg.embed_dim, cfg.num_layers) == (7168, 48)
    assert cfg.num_heads * cfg.gqa.head_dim == cfg.embed_dim
    assert abs(describe(cfg).size / 50e9 - 1) < 1e-3
    # One step of F less would be under 50 B.
    smaller = cfg.model_copy(update={"ffn_dim": cfg.ffn_dim - 256})
    assert describe(smaller).size < 50e9


@pytest.mark.parametrize("name", DEVICES)
def test_the_yaml_of_a_preset_has_a_plan_on_the_devices_it_is_for(name):
    cfg = load(ROOT / "configs" / f"{name}.yaml")
    assert cfg.preset == name
    plan = make_plan(cfg, DEVICES[name], params=describe(cfg.model))
    assert plan.num_devices == DEVICES[name]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_config_with_nothing_but_a_length(name):
    cfg = parse({"preset": name, "train": {"steps": 1, "batch_size": 1, "seq_len": 128}})
    assert cfg.model == model(name)
