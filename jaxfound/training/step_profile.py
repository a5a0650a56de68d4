"""Where the time of a step goes: each operation that the profiler saw, by the part it belongs to.

The parts of a step are told apart by the names that JAX's transformations leave at operations, so a
fusion that spans two parts counts for that of its root.
"""

import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from jaxfound.communication.hlo import KINDS
from jaxfound.communication.program import Operation, Program
from jaxfound.communication.work import ATTENTION, flops_of
from jaxfound.models.layers.expert_tiles import ROUTING
from jaxfound.training.step import ACCUMULATION
from pallas_kernels.quantize import SCOPE

Part = Literal[
    "forward", "recompute", "backward", "accumulation", "update", "collectives", "copies", "idle"
]
PARTS: Mapping[Part, str] = {
    "forward": "loss of the batch",
    "recompute": "what the backward pass computes again, as parallel.remat says",
    "backward": "gradients",
    "accumulation": "adding up the gradients of micro-batches",
    "update": "gradient norm, clipping and optimizer",
    "collectives": "waiting for other devices while nothing is computed",
    "copies": "what the compiler added: copies, slices and loops' own work",
    "idle": "nothing runs",
}
Kind = Literal["products", "attention", "rounding", "routing", "memory", "collectives", "idle"]
KINDS_OF_WORK: Mapping[Kind, str] = {
    "products": "matrix products, and kernels whose arithmetic the program does not tell",
    "attention": "cuDNN's attention; elsewhere its products are among the others",
    "rounding": "operands of products into 8 bits",
    "routing": "tokens to their experts and back, products apart",
    "memory": "all else that multiplies no matrices: it is as fast as memory",
    "collectives": "waiting for other devices while nothing is computed",
    "idle": "nothing runs",
}
# The kinds of work that a plan counts as memory.
AS_MEMORY: tuple[Kind, ...] = ("rounding", "routing", "memory")
# Words in the targets of custom calls that are kernels: the text does not tell their arithmetic.
KERNELS = ("mosaic", "triton")
# Collectives give way: beside arithmetic they cost nothing.
COLLECTIVES, IDLE = "collectives", "idle"
CONTAINERS = frozenset({"while", "conditional", "call"})
GPU_PLANE, CPU_PLANE = "/device:GPU", "/host:CPU"
NS = 1e-9


class Seen(NamedTuple):
    """An operation that ran.

    Attributes:
        operation: its name in the program.
        begin_s: by the profiler's clock.
        end_s: by the profiler's clock.
    """

    operation: str
    begin_s: float
    end_s: float


class Edge(NamedTuple):
    """A moment at which one operation more, or one fewer, of a part runs."""

    at_s: float
    change: int
    part: str


@dataclass(frozen=True)
class Costly:
    """An operation of the program with the time of all its calls in a step.

    Attributes:
        operation: its name.
        part: of the step.
        calls: in a step.
        seconds: in a step, whatever else ran beside it.
        source: `file:line` it was written at; empty where the program does not say.
    """

    operation: str
    part: Part
    calls: float
    seconds: float
    source: str


@dataclass(frozen=True)
class Breakdown:
    """The time of a step on one device.

    Attributes:
        step_s: from the first operation of the profiled steps to the last, over their number.
        parts: seconds a step; they add up to step_s.
        kinds: the same seconds by the kind of work.
        operations: the costliest ones.
    """

    step_s: float
    parts: Mapping[Part, float]
    kinds: Mapping[Kind, float]
    operations: tuple[Costly, ...]

    @property
    def by_plan(self) -> dict[str, float]:
        """The kinds as a plan has them: what memory decides is one."""
        others = {str(k): s for k, s in self.kinds.items() if k not in AS_MEMORY}
        return others | {"memory": sum(self.kinds[kind] for kind in AS_MEMORY)}


def profiled(
    take: Callable[[], object], program: Program, *, steps: int, most: int = 20
) -> Breakdown:
    """Return the breakdown of steps on this process's first device.

    Args:
        take: begins a step and returns what it makes; compiled already.
        program: of the step.
        steps: to profile.
        most: operations to name.

    Raises:
        ValueError: if the profiler saw no operation of the program.
    """
    jax.block_until_ready(take())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([take() for _ in range(steps)][-1])
        seen = [s for s in read_profile(Path(folder)) if program.operation(s.operation)]
    return breakdown(seen, program, steps=steps, most=most)


def breakdown(seen: Sequence[Seen], program: Program, *, steps: int, most: int) -> Breakdown:
    """Return the breakdown of what ran on one device.

    Raises:
        ValueError: if nothing did.
    """
    if not seen:
        raise ValueError("the profiler saw no operation of the step: on this platform it says none")
    part_of = dict(parts_of(program, {s.operation for s in seen}))
    # A loop or a branch spans its operations, which are seen themselves.
    seen = [s for s in seen if s.operation in part_of]
    begin_s, end_s = min(s.begin_s for s in seen), max(s.end_s for s in seen)
    kind_of: dict[str, Kind] = {name: kind_of_work(name, program) for name in part_of}
    parts = shares(seen, part_of, of=tuple(PARTS))
    kinds = shares(seen, kind_of, of=tuple(KINDS_OF_WORK))
    return Breakdown(
        step_s=(end_s - begin_s) / steps,
        parts={part: seconds / steps for part, seconds in parts.items()},
        kinds={kind: seconds / steps for kind, seconds in kinds.items()},
        operations=tuple(costliest(seen, program, part_of, steps=steps))[:most],
    )


def shares[Label: str](
    seen: Sequence[Seen], part_of: Mapping[str, Label], *, of: Sequence[Label]
) -> dict[Label, float]:
    """Return the seconds of each part, which together are all from the first to the last.

    Where operations run beside each other the time is shared among those that compute; it is of
    the collectives where nothing else runs.

    Args:
        seen: what ran.
        part_of: the part of each operation.
        of: the parts, `collectives` and `idle` among them.
    """
    edges = sorted(
        chain.from_iterable(
            (Edge(s.begin_s, 1, part_of[s.operation]), Edge(s.end_s, -1, part_of[s.operation]))
            for s in seen
        )
    )
    running: dict[str, int] = dict.fromkeys(of, 0)
    totals: dict[str, float] = dict.fromkeys(of, 0.0)
    before_s = edges[0].at_s
    for at_s, change, part in edges:
        passed_s, before_s = at_s - before_s, at_s
        busy = {p: n for p, n in running.items() if n and p not in (COLLECTIVES, IDLE)}
        if busy:
            for one, count in busy.items():
                totals[one] += passed_s * count / sum(busy.values())
        else:
            totals[COLLECTIVES if running[COLLECTIVES] else IDLE] += passed_s
        running[part] += change
    return {part: totals[part] for part in of}


def costliest(
    seen: Iterable[Seen], program: Program, part_of: Mapping[str, Part], *, steps: int
) -> list[Costly]:
    """Return the operations with the time of their calls, the longest first."""
    spent: dict[str, list[float]] = {}
    for one in seen:
        spent.setdefault(one.operation, []).append(one.end_s - one.begin_s)
    rows = [
        Costly(
            operation=name,
            part=part_of[name],
            calls=len(times) / steps,
            seconds=sum(times) / steps,
            source=source_of(name, program),
        )
        for name, times in spent.items()
    ]
    return sorted(rows, key=lambda row: -row.seconds)


def source_of(name: str, program: Program) -> str:
    """Return `file:line` of an operation, empty where the program does not say.

    Files of a package are named from its folder on, so that records of two machines compare.
    """
    operation = program.operation(name)
    stack = () if operation is None else program.stack(operation)
    if not stack:
        return ""
    found = [stack[0].rfind(f"/{package}/") for package in ("jaxfound", "pallas_kernels")]
    return stack[0][max(found) + 1 :]


def parts_of(program: Program, names: Iterable[str]) -> Iterator[tuple[str, Part]]:
    """Yield operations with the part they belong to, those that only hold others left out."""
    for name in names:
        operation = program.operation(name)
        if operation is not None and operation.opcode not in CONTAINERS:
            yield name, part_of(operation)


def part_of(operation: Operation) -> Part:
    """Return the part of a step that an operation belongs to."""
    if operation.opcode.removesuffix("-start").removesuffix("-done") in KINDS:
        return "collectives"
    name = written_as(operation)
    if not name:
        return "copies"
    if f"/{ACCUMULATION}/" in name:
        return "accumulation"
    if "rematted_computation" in name:
        return "recompute"
    if "transpose(" in name:
        return "backward"
    return "forward" if "jvp(" in name else "update"


def kind_of_work(name: str, program: Program) -> Kind:
    """Return what an operation of a program spends its time on."""
    operation = program.operation(name)
    if operation is None:
        return "memory"
    if part_of(operation) == COLLECTIVES:
        return "collectives"
    if ATTENTION in operation.attributes:
        return "attention"
    name = written_as(operation)
    if SCOPE in name:
        return "rounding"
    if multiplies(operation, program):
        return "products"
    return "routing" if ROUTING in name else "memory"


def multiplies(operation: Operation, program: Program) -> bool:
    """Return whether an operation multiplies matrices, or is a kernel that may."""
    if flops_of(operation, program):
        return True
    target = operation.attributes.partition('custom_call_target="')[2].partition('"')[0]
    return any(word in target for word in KERNELS)


def written_as(operation: Operation) -> str:
    """Return the name that JAX gave an operation; empty where the compiler made it."""
    _, found, rest = operation.attributes.partition('op_name="')
    return rest.partition('"')[0] if found else ""


def read_profile(folder: Path) -> list[Seen]:
    """Return what ran on the first device, from what `jax.profiler.trace` wrote into a folder."""
    # A plane reads from the file's data, which it does not keep alive.
    files = [
        jax.profiler.ProfileData.from_file(str(path))
        for path in sorted(folder.rglob("*.xplane.pb"))
    ]
    planes = [
        plane
        for data in files
        for plane in data.planes
        if plane.name.startswith((GPU_PLANE, CPU_PLANE))
    ]
    # On a GPU the host's plane says when the host asked for operations, not when they ran.
    on_gpu = [plane for plane in planes if plane.name.startswith(GPU_PLANE)]
    first = sorted(on_gpu or planes, key=lambda plane: plane.name)[:1]
    with warnings.catch_warnings():
        # Of its own types, the first time; an error there would end the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        return [seen for plane in first for line in plane.lines for seen in operations_on(line)]


def operations_on(line: Any) -> Iterator[Seen]:
    """Yield the operations on one line of a profile: a stream, or a thread of the host."""
    # Lines that only sum others up say the same again.
    if line.name.startswith(("XLA ", "Steps", "Framework", "Source")):
        return
    for event in line.events:
        name = next((value for key, value in event.stats if key == "hlo_op"), None)
        if name is not None:
            begin_s = event.start_ns * NS
            yield Seen(str(name), begin_s, begin_s + event.duration_ns * NS)
