"""What timing a run's step found, as plain data: rows that join, and how each figure is made."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxfound.config.parallel import AXES
from jaxfound.config.run import RunConfig
from jaxfound.models import describe
from jaxfound.parallelism.compute import PASSES, TokenFlops, token_flops
from jaxfound.parallelism.legal import layout_of
from jaxfound.training.events import TrainingError
from jaxfound.training.measure import NUM_BATCHES, RATE, Measured
from jaxfound.training.spread import Spread
from jaxfound.training.torch_peer import PeerTimes
from pallas_kernels import hardware

FORMAT_VERSION = 1
# How far the sum of a breakdown's parts may be from the step that nobody looked at.
CLOSURE = 0.02
EXPLAINED: Mapping[str, str] = {
    "step_s": f"seconds of a bare step: steps back to back on {NUM_BATCHES} resident batches of "
    f"random ids in turn, at a rate of {RATE:g}; one mean a round",
    "loop": "the same step inside the loop of `jaxfound train`: median from completion to "
    "completion, input and logging included, plus a save over checkpoint.every",
    "outside_share": "1 - bare / in the loop, the median over the rounds that timed both",
    "tokens_per_s": "tokens of a step over the median of step_s",
    "flops": "of a training step: 3 forward passes; a forward pass is 2 FLOPs for each element of "
    "a matrix and token, of the experts the chosen ones, and attention's 2 products; what is "
    "computed again does not count",
    "mfu": "FLOPs of a step / (step_s x published dense bfloat16 peak x devices): `full` counts "
    "every pair of tokens of a row, as most published figures do, `causal` those that a token sees",
    "ceiling": "a bfloat16 product of size^3 of random numbers, back to back, in the same process "
    "before training; `of_ceiling` is the step's FLOP/s (full) over it",
    "peer": "the same model in PyTorch: torch.compile, fused AdamW, bfloat16 autocast over float32 "
    "weights, nothing computed again; in its own process, with as many tokens a step, fresh random "
    "rows and the same rate. It leaves out the gradient's norm, clipping and the check for numbers "
    "that are not finite",
    "ratio": "tokens a second of ours over the peer's, by the medians",
    "turns": "each side in a process of its own, which has the device to itself; the order turns",
    "compile": "cold: trace, lower and compile the step with an empty cache; cached: the same "
    "again from the cache. Of the peer: its first step",
    "parts": "seconds of a profiled step by the part that an operation was written for; they are "
    "all of the time from the first operation to the last",
    "closure": "profiled step / bare step - 1",
    "planned": "what the plan said beside what was measured",
}


@dataclass(frozen=True)
class TrainRow:
    """A run's step timed, with what it was timed beside.

    Attributes:
        cfg: the run.
        ours: a measurement each turn.
        peer: the peer's, a turn each; empty where none was asked for.
        why_no_peer: why a peer that was asked for has no figures.
    """

    cfg: RunConfig
    ours: tuple[Measured, ...]
    peer: tuple[PeerTimes, ...] = ()
    why_no_peer: str = ""

    @property
    def step_s(self) -> Spread:
        """Seconds of our bare step, over the rounds of all turns."""
        return Spread.of([s for one in self.ours for s in one.step_alone_s])

    @property
    def peer_step_s(self) -> Spread | None:
        """Seconds of the peer's step; None without one."""
        rounds = [s for one in self.peer for s in one.step_s]
        return Spread.of(rounds) if rounds else None

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step."""
        return self.cfg.train.batch_size * self.cfg.train.seq_len

    @property
    def flops(self) -> TokenFlops:
        """Forward FLOPs of a token."""
        return flops_of(self.cfg)

    @property
    def peak_flops(self) -> float | None:
        """Published dense bfloat16 FLOP/s of one device; None where none are, as for a CPU."""
        return published_peak(self.ours[0].device)

    @property
    def ceiling_flops(self) -> Spread | None:
        """FLOP/s of a bare product, over the rounds of all turns; None when not asked for."""
        rounds = [f for one in self.ours for f in one.ceiling_flops]
        return Spread.of(rounds) if rounds else None

    @property
    def ratio(self) -> float | None:
        """Tokens a second of ours over the peer's; None without one."""
        return self.peer_step_s and self.peer_step_s.median / self.step_s.median

    @property
    def profiled(self) -> Measured | None:
        """The measurement that has a breakdown; None when none was asked for."""
        return next((one for one in self.ours if one.breakdown is not None), None)

    @property
    def verdicts(self) -> tuple[str, ...]:
        """What takes the time and should not, a sentence each."""
        return (self.profiled or self.ours[0]).verdicts

    @property
    def closure(self) -> float | None:
        """By how much a profiled step is longer than a bare one; None without a breakdown."""
        one = self.profiled
        if one is None or one.breakdown is None:
            return None
        return one.breakdown.step_s / one.step_s - 1

    def speed(self, step_s: Spread) -> dict[str, object]:
        """Return what a step's seconds come to, as plain data."""
        a_second = PASSES * self.tokens_per_step / (step_s.median * self.ours[0].num_devices)
        full, causal = a_second * self.flops.full, a_second * self.flops.causal
        peak, ceiling = self.peak_flops, self.ceiling_flops
        return {
            "step_s": step_s._asdict(),
            "tokens_per_s": self.tokens_per_step / step_s.median,
            "flops_full": full,
            "flops_causal": causal,
            "mfu_full": peak and full / peak,
            "mfu_causal": peak and causal / peak,
            "of_ceiling": ceiling and full / ceiling.median,
        }

    def as_data(self, **made: str) -> dict[str, Any]:
        """Return the row as plain data for JSON, with what the caller knows of how it was made."""
        first, cfg = self.ours[0], self.cfg
        return {
            **made,
            "device": first.device,
            "num_devices": first.num_devices,
            "versions": dict(first.versions),
            "shapes": shapes_of(cfg),
            "formula": formula(self.flops, self.tokens_per_step),
            "flops": {**self.flops._asdict(), "full": self.flops.full, "causal": self.flops.causal},
            "peak_flops": self.peak_flops,
            "ceiling_flops": self.ceiling_flops and self.ceiling_flops._asdict(),
            "ours": {
                **self.speed(self.step_s),
                "turns": [list(one.step_alone_s) for one in self.ours],
                "steps_per_round": first.steps_per_round,
                "compile": [one.compiles._asdict() for one in self.ours],
                "loop": [loop._asdict() for one in self.ours for loop in one.loop],
                "outside_share": first.outside_share,
                "loss": first.loss,
            },
            "peer": self._peer_data(),
            "ratio": self.ratio,
            "breakdown": self.profiled and self.profiled.as_data()["breakdown"],
            "closure": self.closure,
            "planned": (self.profiled or first).checked.as_data(),
            "verdicts": list(self.verdicts),
        }

    def _peer_data(self) -> dict[str, object] | None:
        if self.peer_step_s is None:
            return {"why_not": self.why_no_peer} if self.why_no_peer else None
        return {
            **self.speed(self.peer_step_s),
            "turns": [list(one.step_s) for one in self.peer],
            "compile_s": [one.compile_s for one in self.peer],
            "peak_bytes": max(one.peak_bytes for one in self.peer),
            "parameters": self.peer[0].parameters,
            "loss": self.peer[0].loss,
            "torch": self.peer[0].torch,
            **({"why_not_all": self.why_no_peer} if self.why_no_peer else {}),
        }


def flops_of(cfg: RunConfig) -> TokenFlops:
    """Return the forward FLOPs of one token of a run, whatever its layout."""
    # Of one device with one micro-batch: degrees change who multiplies, not what.
    alone = cfg.model_copy(update={"parallel": type(cfg.parallel)()})
    layout, _ = layout_of(alone, dict.fromkeys(AXES, 1), describe(cfg.model))
    return token_flops(layout)


def published_peak(device: str) -> float | None:
    """Return the published dense bfloat16 FLOP/s of a kind; None where none are, as for a CPU."""
    row = hardware.find(device)
    return None if row.platform == "cpu" else row.peak_flops.get("bfloat16")


def formula(flops: TokenFlops, tokens: int) -> str:
    """Return how the FLOPs of a step are counted, with its numbers."""
    full, causal = (PASSES * tokens * a_token / 1e12 for a_token in (flops.full, flops.causal))
    return (
        f"{PASSES} x {tokens:,} tokens x ({flops.products / 1e9:.4g} G of products + "
        f"{flops.scores / 1e9:.4g} G of scores) = {full:.4g} T full; scores of earlier tokens "
        f"alone {(flops.causal - flops.products) / 1e9:.4g} G = {causal:.4g} T causal"
    )


def shapes_of(cfg: RunConfig) -> dict[str, object]:
    """Return what decides the speed of a run, as plain data."""
    model, parallel = cfg.model, cfg.parallel
    return {
        "params": describe(model).size,
        "mixer": model.mixer,
        "ffn": model.ffn,
        "layers": model.num_layers,
        "embed_dim": model.embed_dim,
        "ffn_dim": model.ffn_dim,
        "vocab_size": model.vocab_size,
        "batch_size": cfg.train.batch_size,
        "seq_len": cfg.train.seq_len,
        "documents": cfg.train.documents,
        "loss_chunk": cfg.train.loss_chunk,
        "num_microbatches": parallel.num_microbatches,
        "layers_per_scan_step": parallel.layers_per_scan_step,
        "remat": parallel.remat,
        "mesh": {a: getattr(parallel, a) for a in AXES},
        "compute": cfg.precision.compute,
        "rules": [rule.model_dump() for rule in cfg.precision.rules],
        "optimizer": cfg.optimizer.name,
    }


def as_record(before: Mapping[str, Any], row: TrainRow, **made: str) -> dict[str, Any]:
    """Return a record with this row in it; rows of other names stay.

    Args:
        before: what was written before; empty for nothing.
        row: the new one, under its run's name.
        made: what the caller knows of how it was made: commit, date, note.

    Raises:
        TrainingError: if the earlier record is of another device.
    """
    check_device(before, row.ours[0].device)
    rows = {**before.get("rows", {}), row.cfg.name: row.as_data(**made)}
    return {
        "format_version": FORMAT_VERSION,
        "device": row.ours[0].device,
        "explained": dict(EXPLAINED),
        "rows": rows,
    }


def check_device(before: Mapping[str, Any], device: str) -> None:
    """Refuse to add to a record of another device.

    Raises:
        TrainingError: names both.
    """
    if before.get("device", device) != device:
        raise TrainingError(
            f"the record is of {before['device']}, this is {device}: write to another file"
        )
