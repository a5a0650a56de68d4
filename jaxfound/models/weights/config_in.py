"""From a published config.json to a ModelConfig; what would change the numbers is refused by name.

Three tables say what a key is: read by the functions below, `FIXED` to the one value that a model
here computes, or `NEUTRAL`, which is kept for the way back. A key in none of them is told.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from jaxfound.config.model import ModelConfig
from jaxfound.models.weights.errors import WeightsError
from jaxfound.models.weights.folder import HubFolder, Json
from jaxfound.models.weights.keys import Keys
from jaxfound.models.weights.rope import read_rope

LLAMA, V2, V3 = "LlamaForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
MODEL_TYPES = {LLAMA: "llama", V2: "deepseek_v2", V3: "deepseek_v3"}
FORMATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}

ATTENTION_DROPOUT = "attention_dropout"
# Key, the values that change nothing, and what another value would ask for.
FIXED: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("hidden_act", ("silu",), "the feed-forward is SwiGLU"),
    ("attention_bias", (False,), "projections have no bias"),
    ("mlp_bias", (False,), "projections have no bias"),
    ("sliding_window", (), "attention sees the whole row"),
    ("use_sliding_window", (False,), "attention sees the whole row"),
    ("attention_chunk_size", (), "attention sees the whole row"),
    ("partial_rotary_factor", (1, 1.0), "all channels rotate"),
    ("logit_scale", (1, 1.0), "logits are not scaled"),
    ("logits_scaling", (1, 1.0), "logits are not scaled"),
    ("final_logit_softcapping", (), "logits are not capped"),
    ("attn_logit_softcapping", (), "scores are not capped"),
    ("embedding_multiplier", (1, 1.0), "embeddings are not scaled"),
    ("residual_multiplier", (1, 1.0), "the residual is not scaled"),
    ("attention_multiplier", (), "scores are scaled by the head's channels"),
    ("use_qk_norm", (False,), "queries and keys are not normalised"),
    ("qk_layernorm", (False,), "queries and keys are not normalised"),
    ("rope_interleaved", (False,), "halves of a head rotate together"),
    ("index_topk", (), "attention is dense"),
)
# Kept, and without influence on what the model computes.
NEUTRAL = frozenset(
    (
        *("architectures", "model_type", "torch_dtype", "dtype", "transformers_version"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "pretraining_tp"),
        *("ep_size", "seq_aux", "_name_or_path", "auto_map", "return_dict"),
        *("output_router_logits", "router_aux_loss_coef"),
        *("output_attentions", "output_hidden_states", "is_decoder", "add_cross_attention"),
        *("quantization_config", "chunk_size_feed_forward", "pruned_heads", "is_llama_config"),
    )
)


@dataclass(frozen=True)
class HubConfig:
    """What a published config.json says, in our words.

    Attributes:
        model: the model it describes.
        architecture: the class that published code would load.
        dtype: format that the file names for its weights.
        fp8_block: rows and columns that share a scale, None when nothing is fp8.
        notes: what a reader should know, a sentence each.
    """

    model: ModelConfig
    architecture: str
    dtype: str
    fp8_block: tuple[int, int] | None
    notes: tuple[str, ...]


def read_config(folder: HubFolder) -> HubConfig:
    """Return the model of a folder's config.json.

    Raises:
        WeightsError: for an architecture, a RoPE type or an option that no model here computes, a
            missing key, or sizes that do not fit together; names the key.
    """
    keys = Keys(folder.config, place=folder.place)
    architecture = _architecture(keys)
    for key, allowed, why in FIXED:
        keys.must_be(key, allowed, why)
    values = _shared(keys)
    own, notes = READERS[architecture](keys, architecture)
    fp8_block = _fp8_block(keys)
    dtype = keys.word("dtype", tuple(FORMATS), default=_old_dtype(keys))
    notes += _dropout_notes(keys)
    unknown = [key for key in keys.unread() if key not in NEUTRAL]
    if unknown:
        notes.append(f"kept, but not known here: {', '.join(unknown)}")
    try:
        model = ModelConfig.model_validate({**values, **own})
    except ValueError as error:
        raise WeightsError(f"{folder.place} does not make a model: {_told(error)}") from error
    return HubConfig(model, architecture, dtype, fp8_block, tuple(n for n in notes if n))


def _dropout_notes(keys: Keys) -> list[str]:
    """Return what a file says of dropout that no model here does."""
    rate = keys.take(ATTENTION_DROPOUT, float, 0.0)
    if not rate:
        return []
    return [
        f"{ATTENTION_DROPOUT}={rate} drops weights of attention, which no training here does: "
        "model.dropout, of embeddings and of what blocks add, stays 0"
    ]


def _told(error: ValueError) -> str:
    """Return what a config section says is wrong, on one line and without its validator's links."""
    text = re.sub(r"\[type=.*\]|For further information visit \S+", "", str(error))
    return " ".join(text.split())


def _architecture(keys: Keys) -> str:
    """Return the one architecture that `architectures` and `model_type` agree on."""
    listed, kind = keys.raw("architectures"), keys.raw("model_type")
    named = cast(list[object], listed) if isinstance(listed, list) else []
    by_type = next((a for a, t in MODEL_TYPES.items() if t == kind), None)
    found = str(named[0]) if len(named) == 1 else by_type
    if len(named) > 1 or found not in MODEL_TYPES or (kind and MODEL_TYPES[found] != kind):
        raise WeightsError(
            f"{keys.place}: architectures={listed!r} with model_type={kind!r} is not supported; "
            f"known are {', '.join(f'{a} ({t})' for a, t in MODEL_TYPES.items())}"
        )
    return found


def _shared(keys: Keys) -> Json:
    """Return what every architecture says with the same keys."""
    layer_types = keys.raw("layer_types")
    if isinstance(layer_types, list) and set(layer_types) - {"full_attention"}:
        raise WeightsError(
            f"{keys.place}: layer_types={layer_types!r} is not supported; only full_attention"
        )
    return {
        "vocab_size": keys.take("vocab_size", int),
        "embed_dim": keys.take("hidden_size", int),
        "num_layers": keys.take("num_hidden_layers", int),
        "num_heads": keys.take("num_attention_heads", int),
        "ffn_dim": keys.take("intermediate_size", int),
        "tie_embeddings": keys.take("tie_word_embeddings", bool, False),
        "norm_eps": keys.take("rms_norm_eps", float, 1e-6),
        "max_positions": keys.take("max_position_embeddings", int, 2048),
        "init_std": keys.take("initializer_range", float, 0.02),
    }


def _llama(keys: Keys, architecture: str) -> tuple[Json, list[str]]:
    heads, embed = keys.take("num_attention_heads", int), keys.take("hidden_size", int)
    keys.must_be("rope_interleave", (False,), "halves of a head rotate together")
    if "head_dim" not in keys and embed % max(heads, 1):
        raise WeightsError(
            f"{keys.place}: head_dim is not in the file, and hidden_size={embed} is no multiple of "
            f"num_attention_heads={heads}. Give head_dim"
        )
    rope, note = read_rope(keys, pairing="half")
    gqa: Json = {
        "num_kv_heads": keys.take("num_key_value_heads", int, heads),
        "head_dim": keys.take("head_dim", int, embed // max(heads, 1)),
    }
    return {"mixer": "gqa", "gqa": gqa, "rope": rope}, [note]


def _deepseek(keys: Keys, architecture: str) -> tuple[Json, list[str]]:
    heads, layers = keys.take("num_attention_heads", int), keys.take("num_hidden_layers", int)
    keys.must_be("num_key_value_heads", (heads,), "every head has its own key and value")
    keys.must_be("moe_layer_freq", (1,), "every layer after the dense ones has experts")
    nope, rotated = (keys.take(k, int) for k in ("qk_nope_head_dim", "qk_rope_head_dim"))
    # Derived by some writers, and of no effect.
    keys.must_be("qk_head_dim", (nope + rotated,), "it is qk_nope_head_dim + qk_rope_head_dim")
    keys.must_be("head_dim", (rotated, nope + rotated), "the other keys give the head's channels")
    interleaved = keys.take("rope_interleave", bool, True)
    if architecture == V2 and not interleaved:
        raise WeightsError(f"{keys.place}: rope_interleave=false is no option of {V2}")
    rope, note = read_rope(keys, pairing="interleaved" if interleaved else "half")
    dense = keys.take("first_k_dense_replace", int, 0)
    has_experts = "n_routed_experts" in keys and dense < layers
    mla: Json = {
        "q_lora_rank": keys.take("q_lora_rank", int, 0),
        "kv_lora_rank": keys.take("kv_lora_rank", int),
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rotated,
        "v_head_dim": keys.take("v_head_dim", int),
    }
    experts = _experts(keys, architecture)
    ffn: Json = (
        {"ffn": "moe", "num_dense_layers": dense, "moe": experts}
        if has_experts
        else {"ffn": "dense"}
    )
    depth = keys.take("num_nextn_predict_layers", int, 0)
    return {"mixer": "mla", "mla": mla, "rope": rope, "mtp_depth": depth, **ffn}, [note]


def _experts(keys: Keys, architecture: str) -> Json:
    """Return our section on experts, and refuse routers that published code does not agree on."""
    methods = METHODS[architecture]
    method = keys.word("topk_method", tuple(methods), default=next(iter(methods)))
    scoring, group_score = methods[method]
    keys.must_be("scoring_func", (scoring,), f"topk_method={method} scores by it")
    normalize = keys.take("norm_topk_prob", bool, architecture == V3)
    scaling = keys.take("routed_scaling_factor", float, 1.0)
    if architecture == V2 and normalize and scaling != 1.0:
        raise WeightsError(
            f"{keys.place}: norm_topk_prob=true with routed_scaling_factor={scaling}: published "
            f"code of {V2} does not agree on whether normalised weights are scaled"
        )
    groups, kept = keys.take("n_group", int, 1), keys.take("topk_group", int, 1)
    section: Json = {
        "num_experts": keys.take("n_routed_experts", int, 1),
        "num_shared_experts": keys.take("n_shared_experts", int, 0),
        "top_k": keys.take("num_experts_per_tok", int, 1),
        "expert_dim": keys.take("moe_intermediate_size", int, 1),
        "scoring": scoring,
        "group_score": group_score,
        # `greedy` looks at all experts, whatever the groups.
        "num_groups": 1 if method == "greedy" else groups,
        "top_groups": 1 if method == "greedy" else kept,
        "normalize_weights": normalize,
        "routed_scaling": scaling,
    }
    if architecture == V2:
        # Its file has no place for a bias that training would move.
        section["bias_update_rate"] = 0.0
    if "aux_loss_alpha" in keys:
        section["balance_loss_weight"] = keys.take("aux_loss_alpha", float)
    return section


def _fp8_block(keys: Keys) -> tuple[int, int] | None:
    """Return the block of an fp8 checkpoint's scales, None for one that is not quantised."""
    value = keys.raw("quantization_config")
    if value is None:
        return None
    if not isinstance(value, dict):
        raise WeightsError(f"{keys.place}: quantization_config={value!r} is not an object")
    section = Keys(cast(Json, value), place=f"{keys.place}: quantization_config")
    section.word("quant_method", ("fp8",), default="none given")
    section.word("fmt", ("e4m3",), default="e4m3")
    section.must_be("activation_scheme", ("dynamic",), "activations have no scale in the file")
    block = section.raw("weight_block_size")
    sizes = cast(list[object], block) if isinstance(block, list) else []
    if len(sizes) != 2 or not all(type(n) is int and n > 0 for n in sizes):
        raise WeightsError(
            f"{section.place}: weight_block_size={block!r} is not two whole numbers >= 1; without "
            "it nobody knows which elements a scale belongs to"
        )
    return cast(int, sizes[0]), cast(int, sizes[1])


def _old_dtype(keys: Keys) -> str:
    """Return the format under its older key; files without any mean float32."""
    return keys.word("torch_dtype", tuple(FORMATS), default="float32")


# A router's name: how it scores experts, and groups. The first is what a file means that has none.
METHODS: dict[str, dict[str, tuple[str, str]]] = {
    V2: {"greedy": ("softmax", "max"), "group_limited_greedy": ("softmax", "max")},
    V3: {"noaux_tc": ("sigmoid", "top2_sum")},
}
Reader = Callable[[Keys, str], tuple[Json, list[str]]]
READERS: dict[str, Reader] = {LLAMA: _llama, V2: _deepseek, V3: _deepseek}
