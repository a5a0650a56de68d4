"""What the plan says the layers keep for their backward pass is what their residuals hold."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfound.config.model import ModelConfig
from jaxfound.config.parallel import AXES
from jaxfound.models.build import Frame, describe
from jaxfound.models.decoder import walk
from jaxfound.models.execution import Execution
from jaxfound.models.layers import expert_parallel, expert_tiles
from jaxfound.models.layers.dropout import Noise
from jaxfound.parallelism.activations import (
    KEPT,
    MAX_SEGMENTS,
    MIN_SEGMENTS,
    PIECE_BYTES,
    TILE_ROWS,
    TOKENS_PER_SEGMENT,
)
from jaxfound.parallelism.backward import CHUNK_SCORES, MIN_CHUNK_ROWS, WHOLE_SCORES
from jaxfound.parallelism.compute import PASSES_OF_ARRAYS
from jaxfound.parallelism.legal import layout_of
from jaxfound.parallelism.remat import POLICIES
from pallas_kernels import hardware
from pallas_kernels.flash_attention import op, xla
from tests.models.tiny import run_config

ROWS, LENGTH, LAYERS = 2, 512, 3
SIZES = {"vocab_size": 512, "embed_dim": 256, "num_layers": LAYERS, "num_heads": 4,
         "ffn_dim": 704, "max_positions": 512}  # fmt: skip
GQA = {"gqa": {"num_kv_heads": 2, "head_dim": 128}}
MLA = {"mixer": "mla", "mla": {"q_lora_rank": 96, "kv_lora_rank": 160, "qk_nope_head_dim": 128,
                               "qk_rope_head_dim": 64, "v_head_dim": 128}}  # fmt: skip
MOE = {"ffn": "moe", "moe": {"num_experts": 8, "top_k": 2, "expert_dim": 192}}
MODELS = {"gqa": GQA, "mla": MLA, "gqa_moe": {**GQA, **MOE}, "gqa_dropout": {**GQA, "dropout": 0.1}}
CASES = [
    *(("gqa", policy) for policy in KEPT),
    *(("mla", policy) for policy in ("none", "matmul_outputs")),
    *(("gqa_moe", policy) for policy in ("none", "matmul_outputs")),
    *(("gqa_dropout", policy) for policy in KEPT),
]


def residual_bytes(cfg, policy):
    """Bytes that the layers' forward pass hands to their backward pass, weights apart."""
    execution = Execution(precision=cfg.precision, remat=policy)
    frame = Frame(cfg.model, execution=execution)
    params, buffers = frame.shapes()

    def pull(params, buffers, tokens):
        model = frame.bind(params, buffers)
        noise = Noise(jnp.zeros(2, jnp.uint32), tokens[:, 0]) if cfg.model.dropout else None
        row = model.row(tokens, tokens, tokens, noise=noise)

        def run(layers, x):
            return walk(layers, x, row, execution=execution)[0]

        return jax.vjp(run, model.layers, model.embedding(tokens))[1]

    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
    with hardware.target("NVIDIA H200"):
        held = jax.tree.leaves(jax.eval_shape(pull, params, buffers, tokens))
    weights = Counter((a.shape, a.dtype) for a in params.values())
    held = [a for a in held if a.shape[:1] == (LAYERS,)]
    kept = Counter((a.shape, a.dtype) for a in held) - weights
    return sum(n * int(np.prod(shape)) * dtype.itemsize for (shape, dtype), n in kept.items())


@pytest.mark.parametrize(("name", "policy"), CASES)
def test_the_plan_counts_the_bytes_that_the_layers_keep(name, policy):
    model = {**SIZES, **MODELS[name]}
    cfg = config(model, policy)
    layout, _ = layout_of(cfg, dict.fromkeys(AXES, 1), describe(cfg.model))
    counted = LAYERS * KEPT[policy](layout, "moe" in name)
    # Sums of a row and positions of tiles are not counted.
    assert counted == pytest.approx(residual_bytes(cfg, policy), rel=5e-3)


def config(model, policy):
    return run_config(
        ModelConfig.model_validate(model),
        rows=ROWS,
        length=LENGTH,
        parallel={"remat": policy},
        precision={"compute": "bfloat16"},
    )


def test_the_plan_counts_every_policy_there_is():
    assert tuple(KEPT) == tuple(PASSES_OF_ARRAYS) == tuple(POLICIES)


def test_the_plan_has_the_sizes_of_the_kernels_it_counts():
    assert TILE_ROWS == expert_tiles.TILE_ROWS
    assert PIECE_BYTES == expert_parallel.PIECE_BYTES
    assert (WHOLE_SCORES, CHUNK_SCORES) == (xla.WHOLE_SCORES, xla.CHUNK_SCORES)
    assert MIN_CHUNK_ROWS == xla.MIN_CHUNK_ROWS
    assert TOKENS_PER_SEGMENT == op.TOKENS_PER_SEGMENT
    assert (MIN_SEGMENTS, MAX_SEGMENTS) == (op.MIN_SEGMENTS, op.MAX_SEGMENTS)
