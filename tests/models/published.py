"""A reader of small published checkpoints: the oracle for the decoder's numbers, tests only.

Stored weights are the published ones rounded to 15-19 bits of mantissa and compressed, and rows
of an untied embedding that no reference sequence reads are zero; that moves logits by at most
3e-4. The reference logits are untouched.
"""

import io
import json
import lzma
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxfound.config.model import ModelConfig
from jaxfound.models import Decoder, Execution
from jaxfound.models.build import Frame

DATA = Path(__file__).resolve().parents[1] / "data"
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}

# One layer's arrays: our path after the stack's name, the published name, and how the published
# [outputs, inputs] matrix becomes ours.
BLOCK = {
    "mixer_norm.scale": ("input_layernorm.weight", "same"),
    "ffn_norm.scale": ("post_attention_layernorm.weight", "same"),
    "mixer.out.kernel": ("self_attn.o_proj.weight", "from_heads"),
}
GQA = {
    "mixer.query.kernel": ("self_attn.q_proj.weight", "to_heads"),
    "mixer.key.kernel": ("self_attn.k_proj.weight", "to_heads"),
    "mixer.value.kernel": ("self_attn.v_proj.weight", "to_heads"),
}
MLA = {
    "mixer.query_down.kernel": ("self_attn.q_a_proj.weight", "turned"),
    "mixer.query_norm.scale": ("self_attn.q_a_layernorm.weight", "same"),
    "mixer.query_up.kernel": ("self_attn.q_b_proj.weight", "to_heads"),
    "mixer.latent_down.kernel": ("self_attn.kv_a_proj_with_mqa.weight", "first_rows"),
    "mixer.rope_key.kernel": ("self_attn.kv_a_proj_with_mqa.weight", "last_rows"),
    "mixer.latent_norm.scale": ("self_attn.kv_a_layernorm.weight", "same"),
    "mixer.key_up.kernel": ("self_attn.kv_b_proj.weight", "first_of_heads"),
    "mixer.value_up.kernel": ("self_attn.kv_b_proj.weight", "last_of_heads"),
}
DENSE = {
    f"ffn.{name}.kernel": (f"mlp.{name}_proj.weight", "turned") for name in ("gate", "up", "down")
}
MOE = {
    "ffn.router.kernel": ("mlp.gate.weight", "turned"),
    "ffn.router.bias": ("mlp.gate.e_score_correction_bias", "same"),
    **{
        f"ffn.shared.{name}.kernel": (f"mlp.shared_experts.{name}_proj.weight", "turned")
        for name in ("gate", "up", "down")
    },
}
TOP = {
    "embedding.table": ("model.embed_tokens.weight", "same"),
    "final_norm.scale": ("model.norm.weight", "same"),
    "head.kernel": ("lm_head.weight", "turned"),
}


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """The arrays of one file: an u64 header length, a JSON header, raw little-endian bytes."""
    raw = lzma.decompress(path.read_bytes())
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    start = 8 + length
    return {
        name: np.frombuffer(raw[start + begin : start + end], DTYPES[info["dtype"]])
        .astype(np.float32)
        .reshape(info["shape"])
        for name, info in header.items()
        for begin, end in [info["data_offsets"]]
    }


def read_logits(path: Path) -> np.ndarray:
    logits = np.load(io.BytesIO(lzma.decompress(path.read_bytes())))
    return logits.reshape(-1, logits.shape[-1])


def published_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Every array of a checkpoint, whatever the number of its files."""
    files = sorted(folder.glob("*.safetensors.xz"))
    return {name: a for file in files for name, a in read_safetensors(file).items()}


def config_of(hub: dict) -> ModelConfig:
    """Our config of a published config.json (Llama or DeepSeek-V3)."""
    shared = {
        "vocab_size": hub["vocab_size"],
        "vocab_multiple": 1,
        "embed_dim": hub["hidden_size"],
        "num_layers": hub["num_hidden_layers"],
        "num_heads": hub["num_attention_heads"],
        "ffn_dim": hub["intermediate_size"],
        "tie_embeddings": hub["tie_word_embeddings"],
        "norm_eps": hub["rms_norm_eps"],
        "max_positions": hub["max_position_embeddings"],
    }
    if hub["model_type"] == "llama":
        head_dim = hub.get("head_dim", hub["hidden_size"] // hub["num_attention_heads"])
        return ModelConfig.model_validate(
            {
                **shared,
                "gqa": {"num_kv_heads": hub["num_key_value_heads"], "head_dim": head_dim},
                "rope": {"theta": float(hub["rope_theta"])},
            }
        )
    mla = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return ModelConfig.model_validate(
        {
            **shared,
            "mixer": "mla",
            "mla": {"q_lora_rank": hub["q_lora_rank"] or 0, **{k: hub[k] for k in mla}},
            "rope": rope_of(hub),
            "ffn": "moe",
            "num_dense_layers": hub["first_k_dense_replace"],
            "moe": {
                "num_experts": hub["n_routed_experts"],
                "num_shared_experts": hub["n_shared_experts"],
                "top_k": hub["num_experts_per_tok"],
                "expert_dim": hub["moe_intermediate_size"],
                "num_groups": hub["n_group"],
                "top_groups": hub["topk_group"],
                "normalize_weights": hub["norm_topk_prob"],
                "routed_scaling": hub["routed_scaling_factor"],
            },
        }
    )


def rope_of(hub: dict) -> dict:
    # DeepSeek's own files say nothing of the pairing, and mean neighbours.
    pairing = "interleaved" if hub.get("rope_interleave", True) else "half"
    scaling = hub["rope_scaling"] or {}
    rope = {"theta": float(hub["rope_theta"]), "pairing": pairing}
    if not scaling:
        return rope
    floats = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    return {
        **rope,
        "scaling": scaling["type"],
        "original_max_positions": scaling["original_max_position_embeddings"],
        **{k: float(scaling[k]) for k in floats},
    }


def arrays_from(published: dict[str, np.ndarray], cfg: ModelConfig) -> dict[str, np.ndarray]:
    """Our arrays by dotted path; every published array is used."""
    unused = set(published)

    def take(name: str, how: str) -> np.ndarray:
        unused.discard(name)
        return TURNS[how](published[name], cfg)

    def stacked(path: str, rows: dict, layers: range) -> dict[str, np.ndarray]:
        return {
            f"{path}.{ours}": np.stack([take(f"model.layers.{i}.{theirs}", how) for i in layers])
            for ours, (theirs, how) in rows.items()
        }

    mixer = dict(GQA if cfg.mixer == "gqa" else MLA)
    if cfg.mixer == "mla" and not cfg.mla.q_lora_rank:
        del mixer["mixer.query_down.kernel"], mixer["mixer.query_norm.scale"]
        mixer["mixer.query_up.kernel"] = ("self_attn.q_proj.weight", "to_heads")
    top = {k: v for k, v in TOP.items() if k != "head.kernel" or not cfg.tie_embeddings}
    ours = {path: take(*row) for path, row in top.items()}
    first = cfg.num_leading_layers
    main = range(first, cfg.num_layers)
    if first:
        ours |= stacked("leading", {**BLOCK, **mixer, **DENSE}, range(first))
    ours |= stacked("layers", {**BLOCK, **mixer, **(MOE if cfg.ffn == "moe" else DENSE)}, main)
    for name in ("gate", "up", "down") if cfg.ffn == "moe" else ():
        ours[f"layers.ffn.experts.{name}"] = np.stack(
            [
                [
                    take(f"model.layers.{i}.mlp.experts.{e}.{name}_proj.weight", "turned")
                    for e in range(cfg.moe.num_experts)
                ]
                for i in main
            ]
        )
    assert not unused, f"published arrays that nothing read: {sorted(unused)}"
    return ours


def load_published(config: Path, *, weights: Path, execution: Execution | None = None) -> Decoder:
    """The decoder of `config`/config.json with the arrays in `weights`."""
    cfg = config_of(json.loads((config / "config.json").read_text()))
    frame = Frame(cfg, execution=execution or Execution())
    return frame.bind(jax.tree.map(jnp.asarray, arrays_from(published_tensors(weights), cfg)))


def _to_heads(w: np.ndarray, cfg: ModelConfig) -> np.ndarray:
    size = cfg.gqa.head_dim if cfg.mixer == "gqa" else cfg.mla.qk_head_dim
    return w.reshape(-1, size, w.shape[1]).transpose(2, 0, 1)


def _from_heads(w: np.ndarray, cfg: ModelConfig) -> np.ndarray:
    return w.T.reshape(cfg.num_heads, -1, w.shape[0])


def _of_heads(w: np.ndarray, cfg: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """W_kvb holds, head by head, the rows of the key and then those of the value."""
    per_head = w.reshape(cfg.num_heads, -1, w.shape[1]).transpose(2, 0, 1)
    return per_head[..., : cfg.mla.qk_nope_head_dim], per_head[..., cfg.mla.qk_nope_head_dim :]


TURNS = {
    "same": lambda w, cfg: w,
    "turned": lambda w, cfg: w.T,
    "to_heads": _to_heads,
    "from_heads": _from_heads,
    "first_rows": lambda w, cfg: w[: cfg.mla.kv_lora_rank].T,
    "last_rows": lambda w, cfg: w[cfg.mla.kv_lora_rank :].T,
    "first_of_heads": lambda w, cfg: _of_heads(w, cfg)[0],
    "last_of_heads": lambda w, cfg: _of_heads(w, cfg)[1],
}
