"""Named models: the differences from `ModelConfig`'s defaults, as plain data.

The sources of published numbers, and how each count compares, are in docs/howto/add-a-preset.md.
"""

from typing import Any

# DeepSeek's attention, the same from V2-Lite to V3 but for the query.
DEEPSEEK_MLA: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
# 4,096 tokens in pre-training, then YaRN to 40 times that; `mscale` of a model is added below.
DEEPSEEK_ROPE: dict[str, Any] = {
    "theta": 10_000.0,
    "pairing": "interleaved",
    "scaling": "yarn",
    "factor": 40.0,
    "original_max_positions": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}

PRESETS: dict[str, dict[str, Any]] = {
    # Llama's shape, small enough for a laptop CPU.
    "tiny-dense": {
        "vocab_size": 259,
        "embed_dim": 128,
        "num_layers": 4,
        "num_heads": 4,
        "mixer": "gqa",
        "gqa": {"num_kv_heads": 2, "head_dim": 32},
        "ffn_dim": 344,
        "tie_embeddings": True,
        "max_positions": 2048,
    },
    # DeepSeek-V3's shape: latent attention, one dense layer, experts in groups, one extra head.
    "tiny-mla-moe": {
        "vocab_size": 259,
        "embed_dim": 128,
        "num_layers": 4,
        "num_dense_layers": 1,
        "num_heads": 4,
        "mixer": "mla",
        "mla": {
            "q_lora_rank": 48,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 24,
            "qk_rope_head_dim": 8,
            "v_head_dim": 24,
        },
        "rope": {"pairing": "interleaved"},
        "ffn": "moe",
        "ffn_dim": 344,
        "moe": {
            "num_experts": 8,
            "num_shared_experts": 1,
            "top_k": 2,
            "expert_dim": 96,
            "num_groups": 4,
            "top_groups": 2,
            # Ten times the published rate: a run of some hundred steps has no time for less.
            "bias_update_rate": 0.01,
        },
        "mtp_depth": 1,
        "max_positions": 2048,
    },
    # HuggingFaceTB/SmolLM2-135M, config.json: 134,515,008 parameters.
    "smollm2-135m": {
        "vocab_size": 49_152,
        "embed_dim": 576,
        "num_layers": 30,
        "num_heads": 9,
        "mixer": "gqa",
        "gqa": {"num_kv_heads": 3, "head_dim": 64},
        "rope": {"theta": 100_000.0},
        "ffn_dim": 1536,
        "tie_embeddings": True,
        "norm_eps": 1e-5,
        "max_positions": 8192,
        # 576^-1/2
        "init_std": 1 / 24,
    },
    # meta-llama/Meta-Llama-3-8B, config.json: 8,030,261,248 parameters. Llama 3 does not scale its
    # RoPE; 3.1 is the same shape with `rope: {scaling: llama3, factor: 8,
    # original_max_positions: 8192}` and `max_positions: 131072`.
    "llama3-8b": {
        "vocab_size": 128_256,
        "embed_dim": 4096,
        "num_layers": 32,
        "num_heads": 32,
        "mixer": "gqa",
        "gqa": {"num_kv_heads": 8, "head_dim": 128},
        "rope": {"theta": 500_000.0},
        "ffn_dim": 14_336,
        "norm_eps": 1e-5,
        "max_positions": 8192,
    },
    # deepseek-ai/DeepSeek-V2-Lite, config.json: 15,706,484,224 parameters. Its router has no
    # selection bias, so ours stays at zero; the balance loss weighs 0.001 (model page, training).
    "deepseek-v2-lite": {
        "vocab_size": 102_400,
        "embed_dim": 2048,
        "num_layers": 27,
        "num_dense_layers": 1,
        "num_heads": 16,
        "mixer": "mla",
        "mla": {"q_lora_rank": 0, **DEEPSEEK_MLA},
        "rope": {**DEEPSEEK_ROPE, "mscale": 0.707, "mscale_all_dim": 0.707},
        "ffn": "moe",
        "ffn_dim": 10_944,
        "moe": {
            "num_experts": 64,
            "num_shared_experts": 2,
            "top_k": 6,
            "expert_dim": 1408,
            "scoring": "softmax",
            "num_groups": 1,
            "top_groups": 1,
            "group_score": "max",
            "normalize_weights": False,
            "routed_scaling": 1.0,
            "bias_update_rate": 0.0,
            "balance_loss_weight": 0.001,
        },
        "norm_eps": 1e-6,
        "max_positions": 163_840,
    },
    # deepseek-ai/DeepSeek-V3, config.json: 671,026,404,352 parameters and, apart, 11,610,067,968 of
    # one multi-token-prediction module. Its report (4.2) has the bias rate 0.001, the balance loss
    # 0.0001 and the initial deviation 0.006, of which config.json says nothing or another number.
    "deepseek-v3": {
        "vocab_size": 129_280,
        "embed_dim": 7168,
        "num_layers": 61,
        "num_dense_layers": 3,
        "num_heads": 128,
        "mixer": "mla",
        "mla": {"q_lora_rank": 1536, **DEEPSEEK_MLA},
        "rope": {**DEEPSEEK_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0},
        "ffn": "moe",
        "ffn_dim": 18_432,
        "moe": {
            "num_experts": 256,
            "num_shared_experts": 1,
            "top_k": 8,
            "expert_dim": 2048,
            "scoring": "sigmoid",
            "num_groups": 8,
            "top_groups": 4,
            "group_score": "top2_sum",
            "normalize_weights": True,
            "routed_scaling": 2.5,
            "bias_update_rate": 0.001,
            "balance_loss_weight": 0.0001,
        },
        "mtp_depth": 1,
        "norm_eps": 1e-6,
        "max_positions": 163_840,
        "init_std": 0.006,
    },
    # No published model: hidden 7168 and 48 layers, dense, 50,034,023,424 parameters. Its heads are
    # together as wide as the residual stream (56 x 128 = 7168) and share 8 of keys and values, so
    # that tensor = 2, 4 and 8 divide both. What is left of 50 B is the feed-forward's:
    # 48 x (2·7168·7168 + 2·7168·8·128 + 3·7168·F) + 2·129,280·7168 = 50e9 gives F = 41,183.7, and
    # 41,216 = 5.75 x 7168 = 161 x 256 is the next that two tensor devices cut into whole blocks of
    # 128. The usual F = 4 x 7168 or 8/3 x 7168 would make 37.1 or 27.2 B.
    "50b": {
        "vocab_size": 129_280,
        "embed_dim": 7168,
        "num_layers": 48,
        "num_heads": 56,
        "mixer": "gqa",
        "gqa": {"num_kv_heads": 8, "head_dim": 128},
        "rope": {"theta": 500_000.0},
        "ffn_dim": 41_216,
        "norm_eps": 1e-5,
        "max_positions": 8192,
        # As DeepSeek-V3, which is as wide.
        "init_std": 0.006,
    },
}
