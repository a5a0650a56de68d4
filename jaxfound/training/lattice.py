"""Every layout of a few devices: meshes, ZeRO stages, micro-batches and schedules."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import combinations, product
from pathlib import Path

import jax

from jaxfound.config.parallel import AXES, AxisName, ParallelConfig
from jaxfound.config.run import RunConfig
from jaxfound.parallelism.pipeline.builders import SCHEDULES
from jaxfound.resources.platform import source_commit
from jaxfound.resources.topology import Device
from jaxfound.training.trial import Parallel, Trial
from jaxfound.training.verify import Finding, findings

FORMAT_VERSION = 1
# Axes of a layout, at most: two devices along each make eight.
MOST_AXES = 3
STAGES = (0, 1, 2, 3)
MICROBATCHES = (1, 2)
# Of a pipeline of two ranks: what its schedules need, and stages it can have.
PIPELINE_MICROBATCHES = 4
PIPELINE_STAGES = (0, 1, 2)
# Layers of the main stack: with two stages and with four the last one is short.
MAIN_LAYERS = 5

DEFAULT_SCHEDULE = ParallelConfig().schedule

type Slice = tuple[int, int]


def layouts(cfg: RunConfig) -> list[Parallel]:
    """Return every layout of up to eight devices that a model can have, in a fixed order.

    Expert is left out for a model without experts. Pipelines run every schedule on every mesh, and
    the default one with every ZeRO stage that stages can have.
    """
    axes: list[AxisName] = [a for a in AXES if a != "expert" or cfg.model.ffn == "moe"]
    meshes = [m for n in range(1, MOST_AXES + 1) for m in combinations(axes, n)]
    flat = [
        {**dict.fromkeys(mesh, 2), "num_microbatches": pieces, **stage}
        for mesh, pieces in product(meshes, MICROBATCHES)
        if "pipeline" not in mesh
        for stage in stages_of(mesh)
    ]
    return flat + [one for mesh in meshes if "pipeline" in mesh for one in pipelines(mesh)]


def pipelines(mesh: Sequence[str]) -> Iterator[Parallel]:
    """Yield the layouts of a mesh with two pipeline ranks."""
    last = PIPELINE_STAGES[-1]
    for name in SCHEDULES:
        for stage in PIPELINE_STAGES:
            if stage == last or (name == DEFAULT_SCHEDULE and "fsdp" in mesh):
                pieces = PIPELINE_MICROBATCHES
                yield {
                    **dict.fromkeys(mesh, 2),
                    "num_microbatches": pieces,
                    "zero_stage": stage,
                    "schedule": name,
                }


def stages_of(mesh: Sequence[str]) -> list[dict[str, int]]:
    """Return the ZeRO stages to try on a mesh: without fsdp there is nothing to cut."""
    return [{"zero_stage": stage} for stage in STAGES] if "fsdp" in mesh else [{}]


def in_slice[T](items: Sequence[T], part: Slice) -> list[T]:
    """Return slice `number` of `count`, from 1: every count-th item, so that slices cost alike.

    Raises:
        ValueError: if there is no such slice.
    """
    number, count = part
    if not 1 <= number <= count:
        raise ValueError(f"slice {number}/{count}: the number must be from 1 to {count}")
    return list(items[number - 1 :: count])


def verify_lattice(
    cfg: RunConfig, *, part: Slice = (1, 1), devices: Sequence[Device] | None = None
) -> Iterator[tuple[Parallel, list[Finding]]]:
    """Yield each layout of a slice with what holds of it; one device runs once for each setting.

    Args:
        cfg: the run; its model is made small, with sizes that two devices along any axis divide.
        part: which slice of how many.
        devices: at least eight; all there are by default.
    """
    devices = jax.devices() if devices is None else devices
    # Layouts name their own stage of ZeRO where there is something to cut.
    changes = {"num_microbatches": PIPELINE_MICROBATCHES, "zero_stage": PIPELINE_STAGES[-1]}
    several = cfg.parallel.model_copy(update=changes)
    cfg = cfg.model_copy(update={"parallel": several})
    trial = Trial(cfg, dict.fromkeys(AXES, 2), main_layers=MAIN_LAYERS)
    one = trial.run({"num_microbatches": 1}, devices)
    for parallel in in_slice(layouts(trial.cfg), part):
        yield parallel, list(findings(trial, parallel, devices, one=one))
        # Nothing of one layout helps the next; hundreds of programs would fill the memory.
        jax.clear_caches()


def layout_text(parallel: Parallel) -> str:
    """Return a layout as overrides of a config."""
    return " ".join(f"parallel.{key}={value}" for key, value in parallel.items())


def write_lattice(
    found: Sequence[tuple[Parallel, Sequence[Finding]]],
    path: Path,
    *,
    name: str,
    part: Slice,
) -> None:
    """Add the results of a slice to a file, which names the commit of each.

    Args:
        found: layouts with their findings.
        path: a JSON file, made if it is not there.
        name: of the config.
        part: which slice of how many.
    """
    before: Mapping[str, object] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    slices = before.get("slices", [])
    if not isinstance(slices, list):
        raise ValueError(f"{path} holds no lattice; write to another file")
    record = {
        "config": name,
        "slice": "/".join(str(n) for n in part),
        "commit": source_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "jax": jax.__version__,
        "layouts": [
            {
                "layout": layout_text(parallel),
                "devices": math.prod(int(parallel.get(axis, 1)) for axis in AXES),
                "fails": [f"{f.question}: {f.detail}" for f in some if not f.holds],
            }
            for parallel, some in found
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"format_version": FORMAT_VERSION, "slices": [*slices, record]}, indent=1)
    path.write_text(text + "\n", "utf-8")
