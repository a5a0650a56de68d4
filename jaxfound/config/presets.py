"""Named models: the differences from `ModelConfig`'s defaults, as plain data."""

from typing import Any

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
}
