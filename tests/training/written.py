"""A run that nobody trained, and text that its float32 model itself would write."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxfound.config import RunConfig, save
from jaxfound.data import ByteTokenizer
from jaxfound.models.build import Arrays, Frame
from jaxfound.resources.checkpoint import CheckpointManager
from jaxfound.training.run import run_directory
from tests.models.tiny import forward, weights_of
from tests.training.tiny import DENSE, tiny

LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)
STEP = 3


def config(folder: Path, *overrides: str) -> RunConfig:
    """Rows of 16 tokens; a vocabulary with a row of padding, so that two devices can split it."""
    return tiny(folder, "train.loss_chunk=5", *overrides, model={**DENSE, "vocab_multiple": 4})


def weights(frame: Frame) -> Arrays:
    """Weights that are sure of the next letter; the feed-forward does not read channel 0."""
    params, buffers = weights_of(frame)
    is_letter = np.isin(np.arange(frame.cfg.padded_vocab_size), LETTERS)[None, :]
    scale = params["layers.ffn_norm.scale"]
    changed = {
        "head.kernel": 10 * params["head.kernel"] * is_letter,
        "layers.ffn_norm.scale": scale.at[:, 0].set(0.0),
    }
    return Arrays({**params, **changed}, buffers)


def with_outlier(arrays: Arrays) -> Arrays:
    """The same function in float32; in fp8 the outlier's scale leaves nothing of the others."""
    kernels = {
        path: arrays.params[path].at[:, 0].set(1e6)
        for path in ("layers.ffn.gate.kernel", "layers.ffn.up.kernel")
    }
    return Arrays({**arrays.params, **kernels}, arrays.buffers)


def written_by(frame: Frame, arrays: Arrays, *, num: int = 48, length: int = 15) -> list[str]:
    """Documents that begin with `num` different pairs and go on with the likeliest letters."""
    model = frame.bind(*arrays)
    tokens = np.zeros((num, length + 1), np.int32)
    tokens[:, 0] = ByteTokenizer.bos_id
    tokens[:, 1], tokens[:, 2] = LETTERS[np.arange(num) % 26], LETTERS[np.arange(num) // 26]
    for t in range(2, length):
        logits = np.asarray(forward(model, jnp.asarray(tokens)))[:, t]
        tokens[:, t + 1] = LETTERS[logits[:, LETTERS].argmax(axis=-1)]
    return [bytes(row[1:].tolist()).decode() for row in tokens]


def write_texts(path: Path, texts: list[str]) -> Path:
    """A jsonl file of these documents."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def save_run(cfg: RunConfig, arrays: Arrays, *, steps: tuple[int, ...] = (STEP,)) -> Path:
    """The folder of a run whose checkpoints, of these steps, all hold these weights."""
    there = run_directory(cfg)
    save(cfg, there.config)
    here = jax.tree.map(jnp.asarray, arrays._asdict())
    with CheckpointManager(there.checkpoints, keep=0, mode="sync") as checkpoints:
        for step in steps:
            checkpoints.save(step, here, {})
    return there.path
