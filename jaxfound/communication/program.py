"""The text of a compiled program, read once: computations in the order they run, types, sources."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%(?P<name>[\w.\-]+) .*\{$")
_OPERATION = re.compile(
    r"^\s+(?:ROOT )?%(?P<name>[\w.\-]+) = (?P<type>.*?) (?P<opcode>[a-z][a-z0-9\-]*)\((?P<rest>.*)$"
)
_NAME = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%([\w.\-]+)"
)
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_PARTITIONS = re.compile(r"^HloModule .*?num_partitions=(\d+)", re.MULTILINE)
# Where an operation comes from: written at it, or a number in the tables at the head of the text.
_PLACE = re.compile(r'source_file="([^"]*)"(?: source_line=(\d+))?')
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_TABLE = re.compile(r"^(FileNames|FileLocations|StackFrames)\n((?:\d+ .*\n)*)", re.MULTILINE)
_FILE_ROW = re.compile(r'^(\d+) "(.*)"$', re.MULTILINE)
_LOCATION_ROW = re.compile(r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", re.MULTILINE)
# A parent is written as its number plus one, so that 1 is none.
_FRAME_ROW = re.compile(r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", re.MULTILINE)
# Bytes of an element; formats of eight bits and fewer are read from their names.
ELEMENT_BYTES: Mapping[str, float] = {
    "pred": 1.0,
    "bf16": 2.0,
    "token": 0.0,
    "opaque": 0.0,
    "c64": 8.0,
    "c128": 16.0,
}
_BITS = re.compile(r"[a-z]+(\d+)")


@dataclass(frozen=True)
class Operation:
    """One operation of a program.

    Attributes:
        name: its own name, without the percent sign.
        opcode: what it does, e.g. `fusion`.
        type: of its result, as the compiler prints it.
        operands: names of what it reads, in order.
        attributes: what follows the operands.
        is_root: whether its result is the computation's.
    """

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the result."""
        return type_bytes(self.type)

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it runs, a loop's condition and body among them."""
        found = _CALLED.findall(self.attributes)
        branches = _BRANCHES.search(self.attributes)
        return (*found, *(_NAME.findall(branches[1]) if branches else ()))

    @property
    def trip_count(self) -> int | None:
        """How often a loop runs; None where the compiler does not know."""
        found = _TRIPS.search(self.attributes)
        return int(found[1]) if found else None

    def attribute(self, name: str) -> str | None:
        """Return the computation that an attribute names, e.g. a loop's `body`."""
        found = re.search(rf"\b{name}=%([\w.\-]+)", self.attributes)
        return found[1] if found else None

    def numbers(self, name: str) -> tuple[int, ...]:
        """Return the whole numbers of an attribute such as `lhs_contracting_dims={1}`."""
        found = re.search(rf"\b{name}=\{{([\d,]*)\}}", self.attributes)
        return numbers(found[1]) if found else ()


class Frame(NamedTuple):
    """A line of source code, and the frame that called it; 0 = none."""

    place: str
    parent: int


@dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
        computations: operations by the name of their computation, in the order they run.
        entry: the computation that is the program.
        num_devices: partitions it was compiled for.
        frames: of the source code, by number.
    """

    computations: Mapping[str, tuple[Operation, ...]]
    entry: str
    num_devices: int = 1
    frames: Mapping[int, Frame] = field(default_factory=dict)
    _by_name: dict[str, Operation] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for operations in self.computations.values():
            self._by_name.update((op.name, op) for op in operations)

    def operation(self, name: str) -> Operation | None:
        """Return the operation of that name, None when the text has none."""
        return self._by_name.get(name)

    def operand(self, operation: Operation, index: int) -> Operation | None:
        """Return what an operation reads at a place, None when the text does not say."""
        if index >= len(operation.operands):
            return None
        return self._by_name.get(operation.operands[index])

    def stack(self, operation: Operation) -> tuple[str, ...]:
        """Return `file:line` of what an operation was written for, then of each caller."""
        if found := _PLACE.search(operation.attributes):
            return (f"{found[1]}:{found[2]}" if found[2] else found[1],)
        found = _FRAME.search(operation.attributes)
        number, places = int(found[1]) if found else 0, []
        while number in self.frames:
            places.append(self.frames[number].place)
            # A frame's caller is numbered before it; anything else would go round for ever.
            number = min(self.frames[number].parent, number - 1)
        return tuple(places)


def read_program(text: str) -> Program:
    """Return the program of `compiled.as_text()`.

    Raises:
        ValueError: if the text has no entry computation.
    """
    computations: dict[str, list[Operation]] = {}
    entry, inside = "", None
    for line in text.splitlines():
        if opened := _COMPUTATION.match(line):
            inside = computations.setdefault(opened["name"], [])
            entry = opened["name"] if opened["entry"] else entry
        elif inside is not None and (operation := read_operation(line)):
            inside.append(operation)
    if not entry:
        raise ValueError("no ENTRY computation in the text: it is not a compiled program's")
    return Program(
        computations={name: tuple(found) for name, found in computations.items()},
        entry=entry,
        num_devices=num_devices(text),
        frames=dict(_frames(text)),
    )


def read_operation(line: str) -> Operation | None:
    """Return the operation that a line of a computation states, None when it states none."""
    found = _OPERATION.match(line)
    if found is None:
        return None
    operands, attributes = _closing(found["rest"])
    return Operation(
        name=found["name"],
        opcode=found["opcode"],
        type=found["type"].strip(),
        operands=tuple(_NAME.findall(operands)),
        attributes=attributes,
        is_root=line.lstrip().startswith("ROOT "),
    )


def num_devices(text: str) -> int:
    """Return the devices that a program's text says it was compiled for."""
    found = _PARTITIONS.search(text)
    return int(found[1]) if found else 1


def type_bytes(printed: str) -> int:
    """Return the bytes of a type as the compiler prints it; of a tuple, of all its parts."""
    return sum(int(math.prod(shape) * element_bytes(kind)) for kind, shape in arrays_of(printed))


def arrays_of(printed: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return format and shape of each array in a printed type, tuples opened."""
    found = _ARRAY.findall(printed)
    return tuple((kind, numbers(dims.replace("<=", ""))) for kind, dims in found)


def element_bytes(kind: str) -> float:
    """Return the bytes of an element of a format such as `bf16` or `f8e4m3fn`.

    Raises:
        ValueError: if the name does not say how wide it is.
    """
    if kind in ELEMENT_BYTES:
        return ELEMENT_BYTES[kind]
    found = _BITS.match(kind)
    if found is None:
        raise ValueError(f"no known width of the element type {kind!r}")
    return int(found[1]) / 8


def numbers(text: str) -> tuple[int, ...]:
    """Return the whole numbers of a list like `1,2,3`."""
    return tuple(int(n) for n in text.split(",") if n)


def _closing(rest: str) -> tuple[str, str]:
    """Return what is inside the parentheses that are open, and what follows them."""
    depth = 1
    for place, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return rest[:place], rest[place + 1 :]
    return rest, ""


def _frames(text: str) -> Iterator[tuple[int, Frame]]:
    tables = dict(_TABLE.findall(text))
    files = dict(_FILE_ROW.findall(tables.get("FileNames", "")))
    places = {
        row: f"{files.get(name, '')}:{line}"
        for row, name, line in _LOCATION_ROW.findall(tables.get("FileLocations", ""))
    }
    for row, location, parent in _FRAME_ROW.findall(tables.get("StackFrames", "")):
        yield int(row), Frame(places.get(location, ""), int(parent or 1) - 1)
