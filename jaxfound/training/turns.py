"""A run and a peer timed in turn, each in a process of its own that has the device to itself.

Both would not fit on one device: JAX and PyTorch keep what they have allocated until their process
ends. So the process that asks never starts a backend, and each side is started anew in every turn,
the order turned, so that what a device's heat or a neighbour does to one side it does to both.
`python -m jaxfound.training.turns` is our side: it reads a run and what is asked of it as JSON and
writes a `Measured`.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from jaxfound.config.run import RunConfig
from jaxfound.training.events import TrainingError
from jaxfound.training.measure import Asked, Measured, measure_training
from jaxfound.training.torch_peer import PeerModel, PeerTimes

OURS, PEER = "jaxfound.training.turns", "jaxfound.training.torch_peer"
# Of the device's memory, what is ours while nobody else is on it: all but the plan's margin.
MEMORY_SHARE = "0.95"
TAIL_LINES = 3


class SideError(TrainingError):
    """A side that gave no figures; says why."""


def peer_model(cfg: RunConfig, asked: Asked) -> PeerModel:
    """Return a run's model as the peer is told of it.

    Raises:
        TrainingError: if the peer cannot do the same work; names each reason.
    """
    model = cfg.model
    reasons = {
        f"model.mixer={model.mixer}": model.mixer != "gqa",
        f"model.ffn={model.ffn}": model.ffn != "dense",
        f"model.mtp_depth={model.mtp_depth}": model.mtp_depth > 0,
        f"model.rope.scaling={model.rope.scaling}": model.rope.scaling != "none",
        f"model.dropout={model.dropout}": model.dropout > 0,
        f"optimizer.name={cfg.optimizer.name}": cfg.optimizer.name != "adamw",
        f"train.documents={cfg.train.documents}": cfg.train.documents != "joined",
        f"precision.compute={cfg.precision.compute}": cfg.precision.compute != "bfloat16",
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise TrainingError(
            f"the peer is a dense decoder with grouped-query attention over whole rows, AdamW and "
            f"bfloat16, on one device; it does not do {', '.join(found)}. Change that, e.g. "
            "train.documents=joined, or leave --peer out"
        )
    return PeerModel(
        embed_dim=model.embed_dim,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.gqa.num_kv_heads,
        head_dim=model.gqa.head_dim,
        ffn_dim=model.ffn_dim,
        vocab_size=model.vocab_size,
        ties_embeddings=model.tie_embeddings,
        batch_size=cfg.train.batch_size,
        seq_len=cfg.train.seq_len,
        rounds=asked.rounds,
        steps_per_round=asked.steps,
    )


def in_turns(
    cfg: RunConfig, asked: Asked, *, turns: int, peer: PeerModel | None, limit_s: float | int
) -> Iterator[Measured | PeerTimes | SideError]:
    """Yield what each side measured as soon as it has; a peer that failed, and why, once.

    Args:
        cfg: the run.
        asked: of both sides in each turn; the loop and a breakdown in the first alone.
        turns: how often each side is started.
        peer: the other side; None for ours alone.
        limit_s: that the peer may take in one turn, its compilation included.

    Raises:
        SideError: if our own side gave no figures.
    """
    with tempfile.TemporaryDirectory() as folder:
        env = {
            "JAX_COMPILATION_CACHE_DIR": folder,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": MEMORY_SHARE,
        }
        for turn, side in order_of(turns, with_peer=peer is not None):
            if side == OURS:
                once = asked if turn == 0 else asked._replace(profiled=0, loop_rounds=0)
                ours = Measured.from_data(run_side(OURS, question(cfg, once), env=env))
                yield ours
                found = alone_on_one(ours) if peer is not None else None
            else:
                found = timed_peer(peer, limit_s=limit_s) if peer is not None else None
            peer = None if isinstance(found, SideError) else peer
            if found is not None:
                yield found


def order_of(turns: int, *, with_peer: bool) -> Iterator[tuple[int, str]]:
    """Yield the number of each turn with a side: ours first, and then whoever was last."""
    for turn in range(turns):
        sides = (OURS, PEER) if turn % 2 == 0 else (PEER, OURS)
        yield from ((turn, side) for side in sides if side == OURS or with_peer)


def alone_on_one(ours: Measured) -> SideError | None:
    """Return why a peer on one device says nothing beside ours; None where it does."""
    if ours.num_devices == 1:
        return None
    return SideError(f"it runs on one device, ours on {ours.num_devices}")


def timed_peer(peer: PeerModel, *, limit_s: float | int) -> PeerTimes | SideError:
    """Return what the peer measured, or why it did not: our own figures stand without it."""
    try:
        data = run_side(PEER, asdict(peer), env={}, limit_s=limit_s)
    except SideError as error:
        return error
    return PeerTimes(**{**data, "step_s": tuple(data["step_s"])})


def run_side(
    module: str,
    asked: Mapping[str, Any],
    *,
    env: Mapping[str, str],
    limit_s: float | int | None = None,
) -> dict[str, Any]:
    """Run a module as a process, hand it JSON, and return what it writes last.

    Raises:
        SideError: if it ends with an error, or takes longer than `limit_s`.
    """
    # A choice that was made outside stands.
    around = {**env, **os.environ}
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=around,
        # With what it starts in turn, so that a compiler's workers do not outlive it.
        start_new_session=True,
    )
    try:
        told, said = process.communicate(json.dumps(asked), timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise SideError(f"{module} had not finished after {limit_s:g} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode:
        tail = "; ".join(line for line in said.strip().splitlines()[-TAIL_LINES:])
        raise SideError(f"{module} ended with {process.returncode}: {tail}")
    return json.loads(told.strip().splitlines()[-1])


def question(cfg: RunConfig, asked: Asked) -> dict[str, Any]:
    """Return what our side reads."""
    return {"config": cfg.model_dump_json(), "asked": asked._asdict()}


def main() -> None:
    """Read a run from standard input, time it, write the measurement to standard output."""
    from jaxfound.resources.platform import default_to_cpu

    default_to_cpu()
    told = json.load(sys.stdin)
    found = measure_training(RunConfig.model_validate_json(told["config"]), Asked(**told["asked"]))
    sys.stdout.write(f"\n{json.dumps(found.as_data())}\n")


if __name__ == "__main__":
    main()
