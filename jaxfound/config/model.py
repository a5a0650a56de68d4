"""What a model is: the part of a config that a checkpoint stores."""

from typing import Literal

from pydantic import model_validator

from jaxfound.config.schema import Section, key


class GqaConfig(Section):
    """Grouped-query attention: `num_heads` query heads share `num_kv_heads` key/value heads."""

    num_kv_heads: int = key(1, "key/value heads; divides num_heads", ge=1)
    head_dim: int = key(64, "channels of one head; never derived from embed_dim", ge=2)


class MlaConfig(Section):
    """Multi-head latent attention (DeepSeek-V2, section 2.1)."""

    q_lora_rank: int = key(0, "rank of the query's down-projection; 0 = a full query matrix", ge=0)
    kv_lora_rank: int = key(64, "rank C of the latent that keys and values share", ge=1)
    qk_nope_head_dim: int = key(32, "channels of a head that carry no position", ge=1)
    qk_rope_head_dim: int = key(16, "channels R of a head that RoPE rotates; even", ge=2)
    v_head_dim: int = key(32, "channels of a value head", ge=1)

    @property
    def qk_head_dim(self) -> int:
        """Channels of one query/key head, with and without position."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


class RopeConfig(Section):
    """Rotary position embedding and how it is stretched to longer contexts."""

    theta: float = key(10_000.0, "base of the geometric series of wavelengths", gt=1.0)
    pairing: Literal["half", "interleaved"] = key(
        "half", "which channels rotate together: i with i+H/2 (Llama) or 2i with 2i+1 (DeepSeek)"
    )
    scaling: Literal["none", "linear", "llama3", "yarn"] = key("none", "rule for longer contexts")
    factor: float = key(1.0, "how many times longer the context became", ge=1.0)
    original_max_positions: int = key(4096, "context before scaling", unit="tokens", ge=1)
    low_freq_factor: float = key(1.0, "llama3: wavelengths above original/low are divided", gt=0)
    high_freq_factor: float = key(4.0, "llama3: wavelengths below original/high are kept", gt=0)
    beta_fast: float = key(32.0, "yarn: rotations above which a channel is kept", gt=0)
    beta_slow: float = key(1.0, "yarn: rotations below which a channel is divided", gt=0)
    mscale: float = key(1.0, "yarn: numerator of the factor on cos and sin", ge=0)
    mscale_all_dim: float = key(
        0.0, "yarn: denominator of that factor, and the softmax scale's factor squared", ge=0
    )


class MoeConfig(Section):
    """A mixture of experts: router, routed experts and shared experts (DeepSeek-V3, 2.1.2)."""

    num_experts: int = key(8, "routed experts E", ge=1)
    num_shared_experts: int = key(1, "experts that see every token, fused into one", ge=0)
    top_k: int = key(2, "routed experts a token uses", ge=1)
    expert_dim: int = key(64, "hidden channels F of one expert", ge=1)
    scoring: Literal["softmax", "sigmoid"] = key("sigmoid", "how logits become scores")
    num_groups: int = key(1, "groups the experts are split into", ge=1)
    top_groups: int = key(1, "groups a token may use; the others are excluded", ge=1)
    group_score: Literal["max", "top2_sum"] = key(
        "top2_sum", "a group's score: its best expert (V2) or the sum of its best two (V3)"
    )
    normalize_weights: bool = key(True, "make a token's weights sum to one before scaling")
    routed_scaling: float = key(1.0, "factor on the routed experts' output", gt=0)
    bias_update_rate: float = key(
        0.001, "step of the selection bias towards balance; 0 = no bias update", ge=0
    )
    balance_loss_weight: float = key(
        0.0001, "weight of the sequence-wise balance loss (V3, equation 17)", ge=0
    )

    @model_validator(mode="after")
    def _groups_fit(self) -> "MoeConfig":
        e, g = self.num_experts, self.num_groups
        if e % g:
            raise ValueError(f"num_groups={g} does not divide num_experts={e}")
        if self.top_groups > g:
            raise ValueError(f"top_groups={self.top_groups} is more than num_groups={g}")
        if self.top_k > self.top_groups * (e // g):
            raise ValueError(
                f"top_k={self.top_k} is more than the {self.top_groups * (e // g)} experts in "
                f"top_groups={self.top_groups} groups of {e // g}"
            )
        if self.group_score == "top2_sum" and g > 1 and e // g < 2:
            raise ValueError(
                f"group_score=top2_sum needs groups of two experts or more; num_experts={e} in "
                f"num_groups={g} leaves {e // g}. Use group_score=max"
            )
        return self


class ModelConfig(Section):
    """One decoder: sizes, mixer, feed-forward, position, heads. No mesh, no dtype."""

    vocab_size: int = key(..., "ids the tokenizer can produce, V", ge=2)
    vocab_multiple: int = key(
        128, "embedding and head rows are padded to a multiple of this; padding never counts", ge=1
    )
    embed_dim: int = key(..., "channels D of the residual stream", ge=1)
    num_layers: int = key(..., "decoder layers, multi-token-prediction layers apart", ge=1)
    num_heads: int = key(..., "query heads N", ge=1)
    mixer: Literal["gqa", "mla"] = key("gqa", "how tokens see each other")
    gqa: GqaConfig = key(GqaConfig(), "used when mixer is gqa")
    mla: MlaConfig = key(MlaConfig(), "used when mixer is mla")
    rope: RopeConfig = key(RopeConfig(), "positions")
    ffn: Literal["dense", "moe"] = key("dense", "feed-forward of the layers after the dense ones")
    ffn_dim: int = key(..., "hidden channels F of a dense feed-forward (SwiGLU)", ge=1)
    num_dense_layers: int = key(0, "leading layers that stay dense when ffn is moe", ge=0)
    moe: MoeConfig = key(MoeConfig(), "used when ffn is moe")
    mtp_depth: int = key(0, "multi-token-prediction modules (DeepSeek-V3, 2.2)", ge=0, le=8)
    dropout: float = key(
        0.0,
        "chance that training drops a channel of an embedding or of what a block adds",
        ge=0,
        lt=1,
    )
    tie_embeddings: bool = key(False, "the output head is the embedding, transposed")
    norm_eps: float = key(1e-6, "added to the mean square in RMSNorm", gt=0)
    max_positions: int = key(4096, "longest sequence the model is meant for", unit="tokens", ge=1)
    init_std: float = key(0.02, "standard deviation of initial weights", gt=0)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and the head: vocab_size rounded up to vocab_multiple."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts, multi-token-prediction layers apart."""
        return self.num_layers - self.num_dense_layers if self.ffn == "moe" else 0

    @property
    def num_leading_layers(self) -> int:
        """Layers of the first homogeneous stack: dense ones before the experts begin."""
        return self.num_dense_layers if self.ffn == "moe" else 0

    @model_validator(mode="after")
    def _parts_fit(self) -> "ModelConfig":
        if self.mixer == "gqa" and self.num_heads % self.gqa.num_kv_heads:
            raise ValueError(
                f"gqa.num_kv_heads={self.gqa.num_kv_heads} does not divide "
                f"num_heads={self.num_heads}"
            )
        rotated = self.gqa.head_dim if self.mixer == "gqa" else self.mla.qk_rope_head_dim
        if rotated % 2:
            raise ValueError(f"RoPE rotates pairs: {rotated} rotated channels of a head are odd")
        if self.ffn == "moe" and self.num_dense_layers >= self.num_layers:
            raise ValueError(
                f"num_dense_layers={self.num_dense_layers} leaves no layer with experts out of "
                f"num_layers={self.num_layers}. Lower it, or use ffn=dense"
            )
        return self
