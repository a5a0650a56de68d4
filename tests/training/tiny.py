"""Runs small enough to compile and train in seconds, on traceable text."""

from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from jaxfound.config import RunConfig, parse
from jaxfound.resources.checkpoint import CheckpointManager
from jaxfound.training import start, train
from jaxfound.training.state import abstract_train_state

DATA = Path(__file__).resolve().parent.parent / "data" / "S10" / "single.jsonl"
DENSE = {
    "vocab_size": 259,
    "vocab_multiple": 1,
    "embed_dim": 16,
    "num_layers": 2,
    "num_heads": 2,
    "gqa": {"num_kv_heads": 1, "head_dim": 8},
    "ffn_dim": 32,
    "max_positions": 64,
}
MOE = {
    **DENSE,
    "mixer": "mla",
    "mla": {
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
    "ffn": "moe",
    "num_dense_layers": 1,
    "moe": {"num_experts": 4, "top_k": 2, "expert_dim": 16},
    "mtp_depth": 1,
}


def tiny(folder: Path, *overrides: str, model: dict | None = None) -> RunConfig:
    """Return a run of 20 steps of 8 rows x 16 tokens in `folder`."""
    values = {
        "name": "tiny",
        "runs_dir": str(folder / "runs"),
        "model": model or DENSE,
        "precision": {"compute": "float32"},
        "data": {"source": str(DATA), "prepared_dir": str(folder / "data"), "eval_fraction": 0.1},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 4},
        "train": {"steps": 20, "batch_size": 8, "seq_len": 16, "log_every": 1, "eval_every": 0},
        "checkpoint": {"every": 0, "keep": 0, "mode": "sync"},
    }
    return parse(values, overrides)


@dataclass
class StopAfter:
    """Asks the loop to stop when it asks for the `step`-th time, which is once a step."""

    step: int
    asked: int = 0

    def __call__(self) -> str:
        self.asked += 1
        return "TEST" if self.asked >= self.step else ""


def run(cfg: RunConfig, *, stop_after: int | None = None, num_devices: int = 1) -> list:
    """Train and return the events; `stop_after` counts the steps of this call."""
    stop = StopAfter(stop_after if stop_after is not None else 10**9)
    return list(train(cfg, stop=stop, devices=jax.devices()[:num_devices]))


def of_kind(events: list, kind: str, key: str) -> list:
    """Return one value of every event of a kind, in order."""
    return [e.values[key] for e in events if e.kind == kind]


def state_at(cfg: RunConfig, step: int, *, num_devices: int = 1) -> dict:
    """Return a saved state as numpy arrays by dotted path."""
    ready = start(cfg, devices=jax.devices()[:num_devices])
    like = abstract_train_state(ready.frame, ready.tx, mesh=ready.mesh)
    with CheckpointManager(ready.directory.checkpoints, keep=0) as checkpoints:
        state = checkpoints.restore(step, like=like._asdict()).state
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def same(a: dict, b: dict) -> bool:
    """Return whether two states are equal to the last bit."""
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)
