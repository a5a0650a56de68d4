"""What timing pipeline schedules found, as plain data: rows, their sums, how each is worked out."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

import jax

from jaxfound.config.run import RunConfig
from jaxfound.models import describe
from jaxfound.parallelism.pipeline.facts import RECOMPUTED, Pipeline
from jaxfound.parallelism.pipeline.schedule import Step
from jaxfound.parallelism.pipeline.simulate import Costs, Number
from jaxfound.parallelism.pipeline.ticks import place_ticks
from jaxfound.resources.platform import package_versions
from jaxfound.resources.topology import Device
from jaxfound.training.compiled_step import Compared, Memory

FORMAT_VERSION = 1
# Steps before the timed ones: the first allocates, and the second is still behind it.
DROPPED = 2
# With remat=full B runs a stage once to find what enters its layers, and each layer once more.
LAYERS_AGAIN = Costs(forward=1, input_grad=3, weight_grad=1)
EXPLAINED: Mapping[str, str] = {
    "alone": "the same model with 1/P of its main layers and no pipeline, ends and other axes as "
    "they are, the same rows and micro-batches",
    "fsdp": "no pipeline, P times the fsdp, ZeRO stage 3, the same rows, in 1/P of the "
    "micro-batches where P divides them",
    "step_ms": f"wall time of a step over the rounds; {DROPPED} steps before them are dropped",
    "compile_s": "tracing, lowering and compiling, without a cache of programs",
    "losses": "of the first steps on one batch of random tokens, with no warm-up of the rate",
    "efficiency": "step alone / step",
    "bound": "lockstep(schedule, Costs(F=1, I=2, W=1)).efficiency: the part of the ranks' time "
    "that is work, recomputation being work and the last stage's F counted",
    "expected": "passes of the stage alone / passes of the busiest rank of each tick, without the "
    "last stage's F, which its B runs: F=1, W=1 and I=2, or I=3 with remat=full, where B runs its "
    "stage and then each layer again; alone 3 a micro-batch, or 4 with remat=full. A layer's last "
    "product, which is not run again, counts as if it were; ends, optimizer and traffic do not "
    "count: a step can be faster",
    "planned": "bytes of one device by the plan beside the compiler's",
}

type Kind = Literal["alone", "schedule", "fsdp"]


class Candidate(NamedTuple):
    """What is timed.

    Attributes:
        name: for a reader.
        kind: what its numbers are compared as.
        cfg: its run.
        num_devices: how many of the devices it takes.
    """

    name: str
    kind: Kind
    cfg: RunConfig
    num_devices: int


@dataclass(frozen=True)
class Timed:
    """What was measured of a candidate.

    Attributes:
        compile_s: seconds of tracing, lowering and compiling.
        rounds_ms: wall time of each timed step, in order.
        losses: of the first steps, nats a token.
        grad_norms: of the first steps, before clipping.
        memory: the compiler's bytes of one device.
        planned: the plan's beside them.
        ledger: the plan's bytes by kind.
        remat: policy that the plan has chosen.
    """

    compile_s: float
    rounds_ms: tuple[float, ...]
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    memory: Memory
    planned: tuple[Compared, ...]
    ledger: dict[str, int]
    remat: str

    @property
    def median_ms(self) -> float:
        """Median of the rounds."""
        return statistics.median(self.rounds_ms)


@dataclass(frozen=True)
class Row:
    """One line of a measurement.

    Attributes:
        candidate: what it is of.
        timed: its figures; None where there are none.
        note: why there are none; empty where there are.
        efficiency: step alone over this step; None where one of them is missing.
        bound: the part of the ranks' time that is work in lockstep; None without a schedule.
        expected: efficiency by counting passes alone; None without a schedule.
    """

    candidate: Candidate
    timed: Timed | None
    note: str = ""
    efficiency: float | None = None
    bound: float | None = None
    expected: float | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of a step over its median."""
        train = self.candidate.cfg.train
        if self.timed is None:
            return None
        return 1e3 * train.batch_size * train.seq_len / self.timed.median_ms

    def as_data(self) -> dict[str, object]:
        """Return the row as plain data for JSON."""
        name, kind, cfg, num_devices = self.candidate
        found: dict[str, object] = {
            "name": name,
            "kind": kind,
            "num_devices": num_devices,
            "num_layers": cfg.model.num_layers,
            "parallel": cfg.parallel.model_dump(mode="json"),
            "note": self.note,
        }
        if self.timed is None:
            return found
        times = self.timed.rounds_ms
        return found | {
            "step_ms": {"median": self.timed.median_ms, "low": min(times), "high": max(times)},
            "tokens_per_s": self.tokens_per_s,
            "efficiency": self.efficiency,
            "bound": self.bound,
            "expected": self.expected,
            **asdict(self.timed),
            "planned": [row._asdict() for row in self.timed.planned],
        }


def expected(pipeline: Pipeline, *, remat: str) -> float:
    """Return step alone over step if passes through layers were all that takes time.

    A tick is as long as its busiest rank. The last stage's F is not run: its B does it.
    """
    costs = LAYERS_AGAIN if remat == "full" else RECOMPUTED
    schedule, end = pipeline.schedule, pipeline.schedule.num_stages - 1

    def busy(step: Step) -> Number:
        run = (action for action in step if action.op != "F" or action.stage < end)
        return sum(costs.duration((action,)) for action in run)

    passes = sum(max(busy(step) for step in row) for row in place_ticks(schedule))
    # Without stages, the forward pass that B runs again is the one of F.
    alone = costs.backward * schedule.num_microbatches
    layers = pipeline.num_layers / schedule.num_ranks
    return alone * layers / (passes * pipeline.stages.layers_a_chunk)


def as_record(
    cfg: RunConfig,
    rows: Sequence[Row],
    *,
    commit: str,
    date: str,
    devices: Sequence[Device] | None = None,
) -> dict[str, object]:
    """Return a measurement as plain data for JSON, with its format_version.

    Args:
        cfg: the run.
        rows: what is known so far.
        commit: of the source; empty where it is not known.
        date: of the measurement, ISO 8601.
        devices: that there were; all there are by default.
    """
    model, devices = cfg.model, jax.devices() if devices is None else devices
    return {
        "format_version": FORMAT_VERSION,
        "commit": commit,
        "date": date,
        "versions": package_versions(),
        "device": devices[0].device_kind,
        "num_devices": len(devices),
        "config": cfg.name,
        "shapes": {
            "params": describe(model).size,
            "layers": model.num_layers,
            "embed_dim": model.embed_dim,
            "vocab_size": model.vocab_size,
            "seq_len": cfg.train.seq_len,
            "batch_size": cfg.train.batch_size,
            "num_microbatches": cfg.parallel.num_microbatches,
            "compute": cfg.precision.compute,
        },
        "explained": dict(EXPLAINED),
        "rows": [row.as_data() for row in rows],
    }
