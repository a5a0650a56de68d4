"""What an operation of a compiled program costs a device: FLOPs, bytes, and seconds at the peaks.

No device is faster than its peaks, so what is found to be covered by arithmetic is covered at least
that well. Kernels whose arithmetic is not in the text are taken by their bytes alone.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from jaxfound.communication.program import Operation, Program, arrays_of, numbers

# Operations that move nothing: names for what is there already, and ends of what has been started.
FREE = frozenset(
    {
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "partition-id",
        "replica-id",
        "opt-barrier",
        "add-dependency",
    }
)
# What reads a part of its first operand, and what writes a part of it.
PARTS_READ = frozenset({"dynamic-slice", "slice", "gather"})
PART_WRITTEN = "dynamic-update-slice"
# cuDNN's fused attention: scores and mixing forward; backward the scores again and four gradients.
ATTENTION = "__cudnn$fmha"
ATTENTION_PRODUCTS, BACKWARD_PRODUCTS = 2, 5
CUBLAS = "__cublas$"
FORMATS: Mapping[str, str] = {"bf16": "bfloat16", "f16": "bfloat16", "f32": "tf32"}
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_INNER_DIMS = re.compile(r'"lhs_contracting_dimensions": ?\[([^\]]*)\]')
_CAUSAL = re.compile(r'"mask_type": ?"[A-Z_]*CAUSAL"')


@dataclass(frozen=True)
class Peaks:
    """The most that a device does.

    Attributes:
        flops: FLOP/s of its matrix unit by number format, `tf32` and `float32` apart.
        memory_bps: bytes/s of its memory.
    """

    flops: Mapping[str, float]
    memory_bps: float


def seconds_of(operation: Operation, program: Program, peaks: Peaks) -> float:
    """Return the seconds of an operation that runs no other computation but a fusion's."""
    if operation.opcode in FREE or operation.opcode.endswith("-done"):
        return 0.0
    at_peak = (flops / _peak(kind, peaks) for kind, flops in flops_of(operation, program).items())
    return max(sum(at_peak, 0.0), bytes_of(operation, program) / peaks.memory_bps)


def flops_of(operation: Operation, program: Program) -> dict[str, int]:
    """Return the FLOPs of the matrix products of an operation by number format."""
    if operation.opcode == "dot":
        return _dot_flops(operation, program)
    if operation.opcode == "custom-call":
        return _call_flops(operation, program)
    found: dict[str, int] = {}
    if operation.opcode.startswith("fusion"):
        for inner in (op for name in operation.called for op in program.computations.get(name, ())):
            for kind, flops in flops_of(inner, program).items():
                found[kind] = found.get(kind, 0) + flops
    return found


def bytes_of(operation: Operation, program: Program) -> int:
    """Return the bytes of memory that an operation reads and writes.

    Of an array that it only cuts a part from, or writes a part into, the part counts.
    """
    if operation.opcode.startswith("fusion"):
        return sum(
            _fusion_bytes(program.computations.get(n, ()), program) for n in operation.called
        )
    if operation.opcode in PARTS_READ:
        return 2 * operation.num_bytes
    if operation.opcode == PART_WRITTEN:
        return 2 * _written(operation, program)
    operands = (program.operand(operation, i) for i in range(len(operation.operands)))
    return operation.num_bytes + sum(op.num_bytes for op in operands if op is not None)


def _peak(kind: str, peaks: Peaks) -> float:
    return peaks.flops.get(kind) or peaks.flops.get("float32") or math.inf


def _format(kind: str, *, exact: bool) -> str:
    if kind.startswith("f8"):
        return "float8"
    return "float32" if exact else FORMATS.get(kind, "float32")


def _dot_flops(dot: Operation, program: Program) -> dict[str, int]:
    left = program.operand(dot, 0)
    if left is None:
        return {}
    ((kind, shape),) = arrays_of(left.type)
    inner = math.prod(shape[i] for i in dot.numbers("lhs_contracting_dims"))
    ((_, result),) = arrays_of(dot.type)
    exact = "highest" in dot.attributes.partition("operand_precision={")[2][:20]
    return {_format(kind, exact=exact): 2 * math.prod(result) * inner}


def _call_flops(call: Operation, program: Program) -> dict[str, int]:
    found = _TARGET.search(call.attributes)
    target = found[1] if found else ""
    first = program.operand(call, 0)
    if first is None:
        return {}
    if target.startswith(CUBLAS) and (dims := _INNER_DIMS.search(call.attributes)):
        kind, shape = arrays_of(first.type)[0]
        inner = math.prod(shape[i] for i in numbers(dims[1].replace('"', "")))
        _, result = arrays_of(call.type)[0]
        return {_format(kind, exact=False): 2 * math.prod(result) * inner}
    if target.startswith(ATTENTION):
        return _attention_flops(call, program, backward="Backward" in target)
    return {}


def _attention_flops(call: Operation, program: Program, *, backward: bool) -> dict[str, int]:
    """Return the FLOPs of attention on q [B T N H] and k [B S K H]; half of them under a mask."""
    query, key = program.operand(call, 0), program.operand(call, 1)
    if query is None or key is None:
        return {}
    kind, queries = arrays_of(query.type)[0]
    _, keys = arrays_of(key.type)[0]
    products = BACKWARD_PRODUCTS if backward else ATTENTION_PRODUCTS
    whole = 2 * products * math.prod(queries) * keys[1]
    return {_format(kind, exact=False): whole // 2 if _CAUSAL.search(call.attributes) else whole}


def _fusion_bytes(inside: tuple[Operation, ...], program: Program) -> int:
    """Return the bytes that a fusion reads of its parameters and writes as its results."""
    users: dict[str, list[Operation]] = {}
    for op in inside:
        for name in op.operands:
            users.setdefault(name, []).append(op)
    read = sum(_read(op, users, program) for op in inside if op.opcode == "parameter")
    root = next((op for op in inside if op.is_root), None)
    return read + (_written(root, program) if root is not None else 0)


def _read(operation: Operation, users: Mapping[str, list[Operation]], program: Program) -> int:
    """Return the bytes of an array that its users read."""
    total = 0
    for user in users.get(operation.name, ()):
        is_first = bool(user.operands) and user.operands[0] == operation.name
        if user.opcode in ("bitcast", "reshape"):
            total += _read(user, users, program)
        elif is_first and user.opcode in PARTS_READ:
            total += user.num_bytes
        elif not (is_first and user.opcode == PART_WRITTEN):
            return operation.num_bytes
    return min(total, operation.num_bytes)


def _written(operation: Operation, program: Program) -> int:
    """Return the bytes that a result adds to memory; of one written in place, those of the part."""
    if operation.opcode in ("tuple", "bitcast"):
        parts = [program.operand(operation, i) for i in range(len(operation.operands))]
        return sum(_written(part, program) for part in parts if part is not None)
    part = program.operand(operation, 1) if operation.opcode == PART_WRITTEN else None
    return operation.num_bytes if part is None else part.num_bytes
