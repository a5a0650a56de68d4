"""Models and rows small enough to compile in a second or two."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxfound.config import RunConfig
from jaxfound.config.model import ModelConfig
from jaxfound.data.batch import Batch
from jaxfound.models import Cache, Decoder
from jaxfound.models.build import Arrays, Frame

# Half the compile time. The machine code is worse; which operations there are, and in which
# format, stays.
FAST_TO_COMPILE = {"xla_backend_optimization_level": 0}
jit = partial(jax.jit, compiler_options=FAST_TO_COMPILE)

SIZES = {
    "vocab_size": 61,
    "vocab_multiple": 8,
    "embed_dim": 32,
    "num_layers": 2,
    "num_heads": 4,
    "ffn_dim": 48,
    "max_positions": 128,
}
GQA = {"gqa": {"num_kv_heads": 2, "head_dim": 8}}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
MLA = {"mixer": "mla", "mla": {"q_lora_rank": 24, **LATENT}, "rope": {"pairing": "interleaved"}}
EXPERTS = {
    "num_experts": 8,
    "top_k": 2,
    "expert_dim": 16,
    "num_groups": 4,
    "top_groups": 2,
    "routed_scaling": 2.5,
    "balance_loss_weight": 0.01,
}
MOE = {"ffn": "moe", "num_dense_layers": 1, "moe": EXPERTS}
LLAMA3 = {
    "scaling": "llama3",
    "factor": 8.0,
    "original_max_positions": 16,
    "high_freq_factor": 4.0,
}
YARN = {
    "pairing": "interleaved",
    "scaling": "yarn",
    "factor": 4.0,
    "original_max_positions": 8,
    "mscale_all_dim": 1.0,
}

# Every path a token can take through a decoder.
MODELS: dict[str, dict] = {
    "gqa": {**GQA, "rope": LLAMA3, "tie_embeddings": True},
    "mla": {**MLA, "mla": {"q_lora_rank": 0, **LATENT}},
    "mla_moe_yarn": {**MLA, **MOE, "rope": YARN},
    "mla_moe_mtp": {**MLA, **MOE, "mtp_depth": 2},
}


def model_config(name: str, **changes) -> ModelConfig:
    return ModelConfig.model_validate({**SIZES, **MODELS[name], **changes})


def run_config(model: ModelConfig, *, rows: int = 8, length: int = 16, **sections) -> RunConfig:
    train = {"steps": 1, "batch_size": rows, "seq_len": length, **sections.pop("train", {})}
    values = {"model": model.model_dump(), "precision": {"compute": "float32"}, "train": train}
    return RunConfig.model_validate({**values, **sections}, strict=False)


def model_of(name: str, **changes) -> Decoder:
    """A model with weights from numpy, which compiles nothing."""
    frame = Frame(model_config(name, **changes))
    return frame.bind(*weights_of(frame))


def weights_of(frame: Frame, *, seed: int = 3) -> Arrays:
    """Arrays of a frame, none of them trivial: norms away from 1, router biases away from 0."""
    rng = np.random.default_rng(seed)
    shapes = frame.shapes()

    def draw(path: str, shape: jax.ShapeDtypeStruct) -> jax.Array:
        middle = 1.0 if path.endswith("scale") else 0.0
        return jnp.asarray(rng.normal(middle, 0.2, shape.shape), shape.dtype)

    return Arrays(*({path: draw(path, s) for path, s in group.items()} for group in shapes))


def tokens_of(*shape: int, vocab: int = 61, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, shape, dtype=np.int32)


def packed_batch(lengths: list[list[int]], *, length: int, vocab: int = 61, seed: int = 0) -> Batch:
    """Rows of documents with these lengths; what is left of a row is padding."""
    tokens = tokens_of(len(lengths), length + 1, vocab=vocab, seed=seed)
    positions = np.zeros((len(lengths), length), np.int32)
    segments = np.zeros_like(positions)
    counted = np.zeros(positions.shape, bool)
    for row, documents in enumerate(lengths):
        start = 0
        for number, n in enumerate(documents, 1):
            positions[row, start : start + n] = np.arange(n)
            segments[row, start : start + n] = number
            counted[row, start : start + n - 1] = True
            start += n
    return Batch(
        tokens=np.where(segments > 0, tokens[:, :-1], 0),
        targets=np.where(segments > 0, tokens[:, 1:], 0),
        positions=positions,
        segment_ids=segments,
        loss_mask=counted,
    )


def on_device(batch: Batch) -> Batch:
    return jax.tree.map(jnp.asarray, batch)


def relative_error(a: jax.Array, b: jax.Array) -> float:
    """‖a − b‖₂ / ‖b‖₂, and ‖a‖₂ when b is zero."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0))


@jit
def forward(model: Decoder, tokens: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
    return model(tokens, segment_ids=segment_ids)


@jit
def extend(
    model: Decoder, tokens: jax.Array, cache: Cache, positions: jax.Array
) -> tuple[jax.Array, Cache]:
    return model.extend(tokens, cache, positions)
