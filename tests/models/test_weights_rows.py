"""The table between our arrays and the published ones, at the sizes of the published models."""

import json
import math
from functools import cache

import numpy as np
import pytest

from jaxfound.config.model import ModelConfig
from jaxfound.config.presets import PRESETS
from jaxfound.models import describe
from jaxfound.models.weights.fp8 import scale_shape
from jaxfound.models.weights.rows import copies, entries
from tests.models.tiny import MODELS, model_config

# Published shapes, and those of the fp8 scales where there are any.
V3 = {
    "model.embed_tokens.weight": (129280, 7168),
    "model.layers.0.mlp.gate_proj.weight": (18432, 7168),
    "model.layers.0.mlp.down_proj.weight": (7168, 18432),
    "model.layers.2.self_attn.q_a_proj.weight": (1536, 7168),
    "model.layers.3.self_attn.q_b_proj.weight": (24576, 1536),
    "model.layers.3.self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
    "model.layers.60.self_attn.kv_b_proj.weight": (32768, 512),
    "model.layers.60.self_attn.o_proj.weight": (7168, 16384),
    "model.layers.3.mlp.gate.weight": (256, 7168),
    "model.layers.3.mlp.gate.e_score_correction_bias": (256,),
    "model.layers.3.mlp.experts.255.up_proj.weight": (2048, 7168),
    "model.layers.60.mlp.experts.0.down_proj.weight": (7168, 2048),
    "model.layers.60.mlp.shared_experts.gate_proj.weight": (2048, 7168),
    "model.layers.61.eh_proj.weight": (7168, 14336),
    "model.layers.61.shared_head.norm.weight": (7168,),
    "model.layers.61.mlp.experts.17.gate_proj.weight": (2048, 7168),
    "lm_head.weight": (129280, 7168),
}
V2_LITE = {
    "model.layers.1.self_attn.q_proj.weight": (3072, 2048),
    "model.layers.26.self_attn.kv_a_proj_with_mqa.weight": (576, 2048),
    "model.layers.26.self_attn.kv_b_proj.weight": (4096, 512),
    "model.layers.0.mlp.up_proj.weight": (10944, 2048),
    "model.layers.26.mlp.experts.63.down_proj.weight": (2048, 1408),
    "model.layers.1.mlp.shared_experts.down_proj.weight": (2048, 2816),
    "model.layers.1.mlp.gate.weight": (64, 2048),
}
LLAMA3 = {
    "model.layers.31.self_attn.k_proj.weight": (1024, 4096),
    "model.layers.31.self_attn.o_proj.weight": (4096, 4096),
    "model.layers.31.mlp.down_proj.weight": (4096, 14336),
    "lm_head.weight": (128256, 4096),
}
PUBLISHED = {"deepseek-v3": V3, "deepseek-v2-lite": V2_LITE, "llama3-8b": LLAMA3}


@cache
def shapes_of(preset):
    model = ModelConfig.model_validate_json(json.dumps(PRESETS[preset]))
    return model, {e.hub: e.shape for e in entries(model, describe(model))}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_names_and_shapes_are_those_of_the_published_model(preset):
    model, shapes = shapes_of(preset)
    assert {name: shapes.get(name) for name in PUBLISHED[preset]} == PUBLISHED[preset]
    layers = {int(name.split(".")[2]) for name in shapes if name.startswith("model.layers.")}
    assert layers == set(range(model.num_layers + model.mtp_depth))


def test_the_published_arrays_of_deepseek_v3_are_671_billion_numbers_without_the_extra_layer():
    model, shapes = shapes_of("deepseek-v3")
    main = sum(math.prod(s) for n, s in shapes.items() if not n.startswith("model.layers.61."))
    assert main == 671_026_419_200
    assert copies(model) == {
        "model.layers.61.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.61.shared_head.head.weight": "lm_head.weight",
    }
    assert scale_shape(
        shapes["model.layers.3.self_attn.kv_a_proj_with_mqa.weight"], (128, 128)
    ) == (
        5,
        56,
    )


@pytest.mark.parametrize("name", MODELS)
def test_every_number_of_ours_is_in_one_published_place(name):
    """Numbered elements: written into published arrays, each is there exactly once."""
    model = model_config(name, vocab_size=64)
    table = describe(model)
    starts, position = {}, 0
    for spec in table:
        starts[spec.path], position = position, position + spec.size
    tensors = {}
    for entry in entries(model, table):
        tensor = tensors.setdefault(entry.hub, np.full(entry.shape, -1, np.int64))
        spec = table[entry.path]
        numbered = np.arange(spec.size).reshape(spec.shape) + starts[entry.path]
        entry.view(tensor)[...] = numbered[entry.at]
    found = np.concatenate([t.reshape(-1) for t in tensors.values()])
    assert np.array_equal(np.sort(found), np.arange(position))
