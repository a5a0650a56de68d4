"""From a ModelConfig to a config.json that published code reads, old or new."""

from collections.abc import Mapping

from jaxfound.config.model import ModelConfig
from jaxfound.models.weights.config_in import LLAMA, METHODS, MODEL_TYPES, V2, V3
from jaxfound.models.weights.errors import WeightsError
from jaxfound.models.weights.folder import Json
from jaxfound.models.weights.rope import write_rope

# Keys of the file that the weights came from which are no longer true of the file that is written.
NOT_KEPT = ("quantization_config", "auto_map", "_name_or_path", "transformers_version",
            "qk_head_dim", "layer_types")  # fmt: skip


def architecture_of(cfg: ModelConfig) -> str:
    """Return the published class that computes this model.

    Raises:
        WeightsError: if there is none; names the keys that it lacks.
    """
    if cfg.mixer == "gqa":
        if cfg.ffn != "dense" or cfg.rope.pairing != "half" or cfg.mtp_depth:
            raise WeightsError(
                f"no published class computes mixer=gqa with ffn={cfg.ffn}, rope.pairing="
                f"{cfg.rope.pairing}, mtp_depth={cfg.mtp_depth}: {LLAMA} is dense, rotates halves "
                "and predicts one token"
            )
        return LLAMA
    if cfg.ffn == "dense" or cfg.moe.scoring == "sigmoid":
        if cfg.ffn == "moe" and cfg.moe.num_groups > 1 and cfg.moe.group_score != "top2_sum":
            raise WeightsError(f"{V3} scores groups by their best two experts; "
                               f"moe.group_score={cfg.moe.group_score}")  # fmt: skip
        return V3
    _check_v2(cfg)
    return V2


def _check_v2(cfg: ModelConfig) -> None:
    """Refuse softmax routers that DeepSeek-V2's code does not compute."""
    moe = cfg.moe
    faults = []
    if moe.num_groups > 1 and moe.group_score != "max":
        faults.append(f"moe.group_score={moe.group_score} (only max)")
    if moe.normalize_weights and moe.routed_scaling != 1.0:
        faults.append(f"moe.routed_scaling={moe.routed_scaling} of normalised weights (only 1)")
    if cfg.rope.pairing != "interleaved":
        faults.append(f"rope.pairing={cfg.rope.pairing} (only interleaved)")
    if cfg.mtp_depth:
        faults.append(f"mtp_depth={cfg.mtp_depth} (only 0)")
    if faults:
        raise WeightsError(f"{V2} does not compute {'; '.join(faults)}")


def write_config(
    cfg: ModelConfig,
    *,
    dtype: str,
    fp8_block: tuple[int, int] | None = None,
    kept: Mapping[str, object] | None = None,
) -> Json:
    """Return the config.json of a model.

    Args:
        cfg: the model.
        dtype: format of the weights, as torch names it.
        fp8_block: block of the scales; None when nothing is fp8.
        kept: the config.json that the weights came from; its other keys stay.
    Raises:
        WeightsError: if no published class computes this model.
    """
    architecture = architecture_of(cfg)
    written: Json = {
        "architectures": [architecture],
        "model_type": MODEL_TYPES[architecture],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": cfg.embed_dim,
        "initializer_range": cfg.init_std,
        "intermediate_size": cfg.ffn_dim,
        "max_position_embeddings": cfg.max_positions,
        "num_attention_heads": cfg.num_heads,
        "num_hidden_layers": cfg.num_layers,
        "rms_norm_eps": cfg.norm_eps,
        "tie_word_embeddings": cfg.tie_embeddings,
        "use_cache": True,
        "vocab_size": cfg.vocab_size,
        # Both spellings, as with RoPE: each is all that some reader knows.
        "torch_dtype": dtype,
        "dtype": dtype,
        **write_rope(cfg.rope),
        **(_llama(cfg) if architecture == LLAMA else _deepseek(cfg, architecture)),
    }
    if fp8_block is not None:
        written["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": list(fp8_block),
        }
    others = {k: v for k, v in (kept or {}).items() if k not in written and k not in NOT_KEPT}
    return dict(sorted({**others, **written}.items()))


def _llama(cfg: ModelConfig) -> Json:
    return {
        "head_dim": cfg.gqa.head_dim,
        "mlp_bias": False,
        "num_key_value_heads": cfg.gqa.num_kv_heads,
    }


def _deepseek(cfg: ModelConfig, architecture: str) -> Json:
    mla, moe = cfg.mla, cfg.moe
    method = next(iter(METHODS[architecture]))
    if architecture == V2 and moe.num_groups > 1:
        method = "group_limited_greedy"
    keys: Json = {
        "num_key_value_heads": cfg.num_heads,
        "q_lora_rank": mla.q_lora_rank or None,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "head_dim": mla.qk_rope_head_dim,
        "first_k_dense_replace": cfg.num_dense_layers if cfg.ffn == "moe" else cfg.num_layers,
        "moe_layer_freq": 1,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.num_shared_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.expert_dim,
        "n_group": moe.num_groups,
        "topk_group": moe.top_groups,
        "topk_method": method,
        "scoring_func": METHODS[architecture][method][0],
        "norm_topk_prob": moe.normalize_weights,
        "routed_scaling_factor": moe.routed_scaling,
        "aux_loss_alpha": moe.balance_loss_weight,
        "num_nextn_predict_layers": cfg.mtp_depth,
    }
    if architecture == V3:
        keys["rope_interleave"] = cfg.rope.pairing == "interleaved"
    return keys
