"""What a published config.json means, what is refused by name, and what is written back."""

import pytest

from jaxfound.config.model import ModelConfig
from jaxfound.models.weights import WeightsError
from jaxfound.models.weights.config_in import LLAMA, V2, V3, read_config
from jaxfound.models.weights.config_out import write_config
from jaxfound.models.weights.folder import HubFolder
from tests.models import published
from tests.models.tiny import LATENT, MODELS, SIZES, model_config

LLAMA_FILE = published.read_config("S09/llama_headdim24")
DEEPSEEK_FILE = published.read_config("S02/ds_default")
YARN_FILE = published.read_config("S03/ds_yarn")
V2_FILE = published.read_config("transformers/deepseek_v2")
YARN = YARN_FILE["rope_scaling"]


def test_dropout_of_attention_is_told_and_no_dropout_is_taken_from_a_file(tmp_path):
    found = read({**LLAMA_FILE, "attention_dropout": 0.1}, tmp_path)
    assert found.model.dropout == 0
    assert any("attention_dropout=0.1 drops weights of attention" in note for note in found.notes)
    assert not any("dropout" in note for note in read(LLAMA_FILE, tmp_path).notes)


def read(config, tmp_path):
    return read_config(HubFolder(tmp_path, config, {}))


def without(config, *keys):
    return {k: v for k, v in config.items() if k not in keys}


# File, changes to it (None removes), key of the message, what else it says.
REFUSED = {
    "unknown class": (LLAMA_FILE, {"architectures": ["MambaForCausalLM"]}, "architectures", V3),
    "class and type disagree": (LLAMA_FILE, {"model_type": "qwen3"}, "model_type", "qwen3"),
    "two classes": (LLAMA_FILE, {"architectures": [LLAMA, V3]}, "architectures", V3),
    "no class": (LLAMA_FILE, {"architectures": None, "model_type": None}, "architectures", LLAMA),
    "linear rope without its factor": (LLAMA_FILE, {"rope_scaling": {"type": "linear"}},
                                       "rope_scaling: factor", "missing"),
    "linear rope with another factor": (
        LLAMA_FILE, {"rope_scaling": {"type": "linear", "factor": 2.0, "attention_factor": 1.1}},
        "rope_scaling", "attention_factor"),
    "numbers without a rule": (LLAMA_FILE, {"rope_scaling": {"factor": 2.0}},
                               "rope_scaling: factor", "without a rope_type"),
    "dynamic rope": (LLAMA_FILE, {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
                     "rope_scaling", "'dynamic' is not supported"),
    "dynamic rope, new spelling": (
        LLAMA_FILE, {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 5e5}},
        "rope_parameters", "'dynamic' is not supported"),
    "longrope": (LLAMA_FILE, {"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling",
                 "'longrope'"),
    "two bases": (LLAMA_FILE, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
                  "rope_theta", "rope_parameters.rope_theta=10000.0 disagree"),
    "two rules": (YARN_FILE, {"rope_parameters": {**YARN, "factor": 8}}, "rope_scaling",
                  "disagree"),
    "type and rope_type": (YARN_FILE, {"rope_scaling": {**YARN, "rope_type": "llama3"}},
                           "rope_scaling", "rope_type and type disagree"),
    "a rule for each kind of layer": (
        LLAMA_FILE, {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "rope_parameters", "one rule for all layers"),
    "a number of yarn nobody knows": (YARN_FILE, {"rope_scaling": {**YARN, "beta_mid": 3}},
                                      "rope_scaling", "beta_mid"),
    "yarn without its length": (
        YARN_FILE, {"rope_scaling": without(YARN, "original_max_position_embeddings")},
        "original_max_position_embeddings", "missing"),
    "half of yarn's magnitudes": (YARN_FILE, {"rope_scaling": without(YARN, "mscale_all_dim")
                                              | {"mscale": 0.7}}, "mscale", "two ways"),
    "another attention factor": (YARN_FILE, {"rope_scaling": {**YARN, "attention_factor": 1.5}},
                                 "attention_factor", "1.5"),
    "missing size": (LLAMA_FILE, {"hidden_size": None}, "hidden_size", "missing"),
    "size as text": (LLAMA_FILE, {"hidden_size": "64"}, "hidden_size", "whole number; got '64'"),
    "flag as number": (LLAMA_FILE, {"tie_word_embeddings": 1}, "tie_word_embeddings", "got 1"),
    "head_dim that cannot be derived": (LLAMA_FILE, {"head_dim": None, "hidden_size": 66},
                                        "head_dim", "no multiple"),
    "biased projections": (LLAMA_FILE, {"attention_bias": True}, "attention_bias", "True"),
    "biased feed-forward": (LLAMA_FILE, {"mlp_bias": True}, "mlp_bias", "True"),
    "another activation": (LLAMA_FILE, {"hidden_act": "gelu"}, "hidden_act", "'gelu'"),
    "sliding window": (LLAMA_FILE, {"sliding_window": 4096}, "sliding_window", "4096"),
    "part of the channels": (LLAMA_FILE, {"partial_rotary_factor": 0.5}, "partial_rotary_factor",
                             "0.5"),
    "scaled embeddings": (LLAMA_FILE, {"embedding_multiplier": 12.0}, "embedding_multiplier",
                          "12.0"),
    "capped logits": (LLAMA_FILE, {"final_logit_softcapping": 30.0}, "final_logit_softcapping",
                      "30.0"),
    "mixed layers": (LLAMA_FILE, {"layer_types": ["full_attention", "linear"]}, "layer_types",
                     "linear"),
    "another quantisation": (LLAMA_FILE, {"quantization_config": {"quant_method": "gptq"}},
                             "quantization_config: quant_method", "'gptq'"),
    "fp8 without a block": (LLAMA_FILE, {"quantization_config": {"quant_method": "fp8"}},
                            "weight_block_size", "None"),
    "fp8 with blocks of nothing": (
        LLAMA_FILE, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 128]}},
        "weight_block_size", "[0, 128] is not two"),
    "fp8 with scales of activations": (
        LLAMA_FILE, {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}},
        "activation_scheme", "'static'"),
    "another format": (LLAMA_FILE, {"torch_dtype": "int8"}, "torch_dtype", "'int8'"),
    "sparse attention": (DEEPSEEK_FILE, {"index_topk": 2048}, "index_topk", "2048"),
    "experts in every second layer": (DEEPSEEK_FILE, {"moe_layer_freq": 2}, "moe_layer_freq", "2"),
    "shared keys": (DEEPSEEK_FILE, {"num_key_value_heads": 2}, "num_key_value_heads", "only 4"),
    "another router": (DEEPSEEK_FILE, {"topk_method": "greedy"}, "topk_method", "noaux_tc"),
    "another score": (DEEPSEEK_FILE, {"scoring_func": "softmax"}, "scoring_func", "'sigmoid'"),
    "v2 with a v3 router": (V2_FILE, {"topk_method": "noaux_tc"}, "topk_method", "greedy"),
    "v2 that rotates halves": (V2_FILE, {"rope_interleave": False}, "rope_interleave", V2),
    "v2 with scaled, normalised weights": (V2_FILE, {"norm_topk_prob": True}, "norm_topk_prob",
                                           "does not agree"),
    "groups that do not divide": (DEEPSEEK_FILE, {"n_group": 3}, "config.json", "num_groups=3"),
}  # fmt: skip


@pytest.mark.parametrize(("file", "changes", "key", "says"), REFUSED.values(), ids=list(REFUSED))
def test_what_would_change_the_numbers_is_refused_by_name(tmp_path, file, changes, key, says):
    with pytest.raises(WeightsError) as refused:
        read(file | changes, tmp_path)
    assert key in str(refused.value)
    assert says in str(refused.value)


def test_a_file_says_more_than_its_defaults(tmp_path):
    """Case S09: head_dim, eps and theta are the file's, and not derived."""
    model = read(LLAMA_FILE, tmp_path).model
    assert (model.gqa.head_dim, model.norm_eps, model.rope.theta) == (24, 0.01, 500_000)
    assert model.embed_dim // model.num_heads == 16


def test_what_a_file_leaves_out_is_what_its_class_means(tmp_path):
    """Real Llama files lack head_dim and theta, real DeepSeek ones the pairing."""
    found = read(without(LLAMA_FILE, "head_dim", "rope_theta", "num_key_value_heads"), tmp_path)
    assert (found.model.gqa.head_dim, found.model.gqa.num_kv_heads) == (16, 4)
    assert found.model.rope.theta == 10_000
    assert any("rope_theta is not in the file" in note for note in found.notes)
    assert read(DEEPSEEK_FILE, tmp_path).model.rope.pairing == "interleaved"
    assert read(DEEPSEEK_FILE | {"rope_interleave": False}, tmp_path).model.rope.pairing == "half"
    v2 = without(V2_FILE, "topk_method", "scoring_func") | {"n_group": 4}
    assert read(v2, tmp_path).model.moe.num_groups == 1
    assert read(v2, tmp_path).model.moe.scoring == "softmax"


LINEAR = {
    "old": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "new": {"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 500_000}},
    # What other rules ask for says nothing in this one.
    "with a length": {
        "rope_scaling": {"type": "linear", "factor": 2.0, "original_max_position_embeddings": 2048}
    },
}


@pytest.mark.parametrize("changes", LINEAR.values(), ids=list(LINEAR))
def test_linear_scaling_is_its_factor(tmp_path, changes):
    rope = read(LLAMA_FILE | changes, tmp_path).model.rope
    assert (rope.scaling, rope.factor, rope.theta) == ("linear", 2.0, 500_000)


def test_a_model_without_experts_is_dense(tmp_path):
    for changes in ({"n_routed_experts": None}, {"first_k_dense_replace": 3}):
        assert read(DEEPSEEK_FILE | changes, tmp_path).model.ffn == "dense"


def test_a_key_that_nobody_knows_is_told(tmp_path):
    found = read(LLAMA_FILE | {"flavour": 3, "bos_token_id": 1}, tmp_path)
    assert found.notes == ("kept, but not known here: flavour",)


SPELLINGS = {
    "old": ("rope_parameters",),
    "new": ("rope_theta", "rope_scaling"),
    "old and new": (),
}
WRITTEN = {
    **{name: model_config(name) for name in MODELS},
    "linear": model_config("gqa", rope={"scaling": "linear", "factor": 3.0}),
    "softmax": ModelConfig.model_validate({
        **SIZES, "mixer": "mla", "mla": LATENT, "rope": {"pairing": "interleaved"}, "ffn": "moe",
        "moe": {"num_experts": 8, "num_groups": 2, "top_groups": 1, "scoring": "softmax",
                "group_score": "max", "normalize_weights": False, "routed_scaling": 16.0},
    }),
}  # fmt: skip


@pytest.mark.parametrize("removed", SPELLINGS.values(), ids=list(SPELLINGS))
@pytest.mark.parametrize("model", WRITTEN.values(), ids=list(WRITTEN))
def test_a_written_config_is_read_as_the_same_model_by_readers_of_each_spelling(
    tmp_path, model, removed
):
    written = without(write_config(model, dtype="bfloat16"), *removed)
    found = read(written, tmp_path)
    # Not in a published file: our padding, and the rate of our bias update, which a softmax
    # router's file has no bias for.
    rate = 0.0 if model.moe.scoring == "softmax" else 0.001
    moe = model.moe.model_copy(update={"bias_update_rate": rate})
    expected = model.model_copy(update={"vocab_multiple": 128, "moe": moe})
    if model.ffn == "dense":
        expected = expected.model_copy(update={"moe": found.model.moe})
    assert found.model == expected
    assert found.dtype == "bfloat16"
    assert found.notes == ()


def test_keys_of_the_original_file_stay_unless_they_are_no_longer_true():
    model = model_config("mla_moe_yarn")
    kept = {
        "bos_token_id": 7,
        "flavour": 3,
        "hidden_size": 1,
        "quantization_config": {},
        "auto_map": {"AutoModel": "modeling.py"},
    }
    written = write_config(model, dtype="float32", kept=kept)
    assert (written["bos_token_id"], written["flavour"], written["hidden_size"]) == (7, 3, 32)
    assert not {"quantization_config", "auto_map"} & written.keys()


NOT_PUBLISHED = {
    "experts without latent attention": ({"ffn": "moe", "num_layers": 3}, "ffn=moe"),
    "neighbours in grouped-query attention": ({"rope": {"pairing": "interleaved"}}, "interleaved"),
    "prediction ahead without latent attention": ({"mtp_depth": 1}, "mtp_depth=1"),
    "yarn that is read in two ways": (
        {"rope": {"scaling": "yarn", "factor": 2.0, "mscale": 0.7}}, "mscale=0.7"),
    "best expert with sigmoid scores": (
        {**MODELS["mla_moe_yarn"], "moe": {"num_groups": 2, "group_score": "max"}},
        "group_score=max"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "says"), NOT_PUBLISHED.values(), ids=list(NOT_PUBLISHED))
def test_a_model_that_no_published_class_computes_is_refused(changes, says):
    model = ModelConfig.model_validate({**SIZES, "gqa": {"num_kv_heads": 2}, **changes})
    with pytest.raises(WeightsError, match=says):
        write_config(model, dtype="float32")
