"""The largest buffers of a compiled program, from what the compiler writes of its memory."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jaxfound.communication.program import Operation, Program, arrays_of

# Files that the compiler writes into a folder of its own, when it is asked to.
DUMP_OPTIONS: Mapping[str, str | bool] = {"xla_dump_hlo_as_text": True}
DUMP_FOLDER = "xla_dump_to"
ASSIGNMENT = "*after_optimizations-buffer-assignment.txt"
_ALLOCATION = re.compile(r"^allocation \d+: .*$", re.MULTILINE)
_VALUE = re.compile(
    r"^ value: <\d+ (?P<name>[\w.\-]+)(?:\{[\d,]*\})?(?P<phi> \(phi\))? @\d+> "
    r"\(size=(?P<size>\d+),offset=(?P<offset>\d+)\): (?P<type>.*)$",
    re.MULTILINE,
)
_NUMBER = re.compile(r"[.\d]*(?:remat\d*)?$")
# What is moved or filled, not computed.
MOVES = ("broadcast_fusion", "copy", "transpose", "transpose_fusion", "bitcast")
# Folders above the packages, and what a line of a layer reaches the compiler through.
_ROOM = re.compile(r"^.*/(?=(?:jaxfound|pallas_kernels)/)")
PASSED = (
    "pallas_kernels/",
    "jaxfound/parallelism/",
    "jaxfound/models/layers/linear.py",
    "jaxfound/models/layers/parameter.py",
)


class Value(NamedTuple):
    """An array that the program makes, and the memory it lies in."""

    operation: str
    type: str
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Buffer:
    """Memory that arrays of one line of source code take.

    Attributes:
        num_bytes: of all of them.
        count: how many.
        type: of the largest, as the compiler prints it.
        source: `file:line`; the compiler's word for what makes them where no line is known.
    """

    num_bytes: int
    count: int
    type: str
    source: str


def largest_buffers(folder: Path, program: Program, *, limit: int = 12) -> tuple[Buffer, ...]:
    """Return what takes the most of a program's temporary memory, by source line.

    Every byte is counted once, for the largest array that ever lies there; so the sum is at most
    the temporary memory, though not all of it need be alive at one time.

    Args:
        folder: where the compiler wrote its files; nothing is returned when it wrote none.
        program: the program's text, which knows the lines.
        limit: lines to return.
    """
    found: dict[str, list[Value]] = {}
    for path in folder.glob(ASSIGNMENT):
        for values in widest(temporaries(path.read_text(encoding="utf-8"))):
            source, value = told_of(values, program)
            found.setdefault(source, []).append(value)
    lines = (
        Buffer(sum(v.num_bytes for v in values), len(values), values[0].type, source)
        for source, values in found.items()
    )
    return tuple(sorted(lines, key=lambda b: -b.num_bytes)[:limit])


def temporaries(text: str) -> Iterator[Value]:
    """Yield the arrays of the temporary allocation of a buffer assignment's text."""
    heads = list(_ALLOCATION.finditer(text))
    ends = [*(head.start() for head in heads[1:]), len(text)]
    for head, end in zip(heads, ends, strict=True):
        if "preallocated-temp" not in head[0]:
            continue
        for found in _VALUE.finditer(text, head.end(), end):
            # A tuple is a table of addresses; a phi is another name of a value.
            if not found["type"].startswith("(") and not found["phi"]:
                name, size, offset = found["name"], int(found["size"]), int(found["offset"])
                yield Value(name, found["type"], offset, size)


def widest(values: Iterable[Value]) -> list[list[Value]]:
    """Return values by falling size, each in memory that no larger one ever lies in.

    Those of one size that lie in one place, one after the other, come as one list.
    """
    taken: dict[tuple[int, int], list[Value]] = {}
    for value in sorted(values, key=lambda v: (-v.num_bytes, v.offset)):
        begin, end = value.offset, value.offset + value.num_bytes
        if (begin, end) in taken:
            taken[begin, end].append(value)
        elif value.num_bytes and all(end <= a or b <= begin for a, b in taken):
            taken[begin, end] = [value]
    return list(taken.values())


def told_of(values: Sequence[Value], program: Program) -> tuple[str, Value]:
    """Return the source line of what lies in one place, and the value that says the most.

    Where no line is known it is the compiler's word for what makes it. Zeros to add to and copies
    say less than what is computed.
    """
    told: list[tuple[bool, str, Value]] = []
    for value in values:
        operation = program.operation(value.operation) or _started(value, program)
        source = source_line(program.stack(operation)) if operation is not None else ""
        word = _NUMBER.sub("", value.operation)
        said = source or f"the compiler's {word}"
        told.append((not source or word.endswith(MOVES), said, value))
    # The first of those that say most: of equals, the one that the compiler lists first.
    _, source, value = min(told, key=lambda t: t[0])
    return source, value


def source_line(stack: Sequence[str]) -> str:
    """Return the line that a reader should look at, empty for an empty stack.

    That is the innermost one outside of what every layer passes through.
    """
    shown = [_ROOM.sub("", place) for place in stack if "/site-packages/" not in place]
    return next((p for p in shown if not p.startswith(PASSED)), shown[0] if shown else "")


def _started(value: Value, program: Program) -> Operation | None:
    """Return the start that a value's operation is printed as, found by kind and type."""
    wanted = arrays_of(value.type)
    for operations in program.computations.values():
        for operation in operations:
            kind = operation.opcode.removesuffix("-start")
            starts = kind != operation.opcode
            named = kind == "fusion" or value.operation.startswith(kind)
            if starts and named and set(wanted) & set(arrays_of(operation.type)):
                return operation
    return None
