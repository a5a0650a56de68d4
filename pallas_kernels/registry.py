"""Ops and their backends: which one runs where, and the reason whenever a faster one does not."""

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any, Protocol, runtime_checkable

from pallas_kernels import hardware
from pallas_kernels.hardware import Hardware

log = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "jaxfound.kernels"

# Every op of the package and the module that defines it as OP.
OPS: dict[str, str] = {
    "quantize": "pallas_kernels.quantize.op",
    "fp8_matmul": "pallas_kernels.fp8_matmul.op",
    "grouped_matmul": "pallas_kernels.grouped_matmul.op",
    "mla_decode": "pallas_kernels.mla_decode.op",
    "flash_attention": "pallas_kernels.flash_attention.op",
    "widened_matmul": "pallas_kernels.widened_matmul.op",
}


class KernelError(ValueError):
    """A backend was asked for by name and cannot serve the case, or does not exist."""


@runtime_checkable
class Case(Protocol):
    """What a choice depends on: static sizes and formats, and the device."""

    @property
    def hardware(self) -> Hardware:
        """The device the case runs on."""
        ...

    @property
    def padded_flop_ratio(self) -> float:
        """FLOPs the special kernels spend on the case over FLOPs it asks for; 1.0 = no waste."""
        ...


@dataclass(frozen=True)
class Backend[CaseT: Case]:
    """One implementation of an op.

    Attributes:
        refuses: the reason why it cannot serve a case, with the way out; None if it can.
        run: does it; takes the operands and the case by the op's own convention.
    """

    name: str
    refuses: Callable[[CaseT], str | None]
    run: Callable[..., Any]


@dataclass(frozen=True)
class Decision:
    """One row of `explain`: what was said to one backend."""

    op: str
    device: str
    backend: str
    chosen: bool
    reason: str
    padded_flop_ratio: float


@dataclass(frozen=True)
class KernelOp[CaseT: Case]:
    """An op: its meaning, and its backends from the fastest to the one that serves everything.

    Attributes:
        reference: the meaning in plain jnp and float32.
        backends: tried in order; the last refuses nothing.
        make_case: builds a case from sizes, for `explain`.
    """

    name: str
    reference: Callable[..., Any]
    backends: tuple[Backend[CaseT], ...]
    make_case: Callable[..., CaseT]

    @property
    def all_backends(self) -> tuple[Backend[CaseT], ...]:
        """Backends of other packages first, then ours."""
        return (*outside_backends(self.name), *self.backends)

    def backend(self, name: str) -> Backend[CaseT]:
        """Return the backend called `name`.

        Raises:
            KernelError: if there is none.
        """
        for candidate in self.all_backends:
            if candidate.name == name:
                return candidate
        known = [b.name for b in self.all_backends]
        raise KernelError(f"{self.name} has no backend {name!r}. Use one of {known}.")

    def choose(self, case: CaseT, *, backend: str | None = None) -> Backend[CaseT]:
        """Return the backend that serves `case`; each reason for passing one over is logged once.

        While `replacing` is entered, its rule for this op may put another in its place, unless
        `backend` names one.

        Raises:
            KernelError: if `backend` names one that refuses the case; the reason is in the text.
        """
        if backend is not None:
            asked = self.backend(backend)
            reason = asked.refuses(case)
            if reason is not None:
                raise KernelError(f"{self.name}: backend {backend!r} refuses: {reason}")
            return asked
        found = self._first(case)
        rule = _RULES.get().get(self.name)
        return found if rule is None else rule(self, found, case)

    def _first(self, case: CaseT) -> Backend[CaseT]:
        for candidate in self.all_backends:
            reason = candidate.refuses(case)
            if reason is None:
                return candidate
            _log_once(self.name, candidate.name, reason)
        raise KernelError(f"{self.name}: every backend refuses {case}; the last must refuse none.")

    def decisions(self, case: CaseT) -> tuple[Decision, ...]:
        """What each backend says to `case`, in the order they are asked."""
        rows: list[Decision] = []
        taken = False
        for candidate in self.all_backends:
            reason = candidate.refuses(case)
            chosen = reason is None and not taken
            taken = taken or chosen
            rows.append(
                Decision(
                    op=self.name,
                    device=case.hardware.kind,
                    backend=candidate.name,
                    chosen=chosen,
                    reason=reason or ("serves the case" if chosen else "a faster one serves it"),
                    padded_flop_ratio=case.padded_flop_ratio,
                )
            )
        return tuple(rows)


# What a backend is replaced with: the op, the one that was chosen, the case.
Rule = Callable[[KernelOp[Any], Backend[Any], Any], Backend[Any]]
_RULES: ContextVar[Mapping[str, Rule]] = ContextVar("rules", default={})  # noqa: B039


@contextmanager
def replacing(rules: Mapping[str, Rule]) -> Iterator[None]:
    """While entered, programs that are traced in this thread take what the rules say.

    Args:
        rules: by name of an op.

    Raises:
        KernelError: there is no such op.
    """
    for name in rules:
        find_op(name)
    token = _RULES.set(rules)
    try:
        yield
    finally:
        _RULES.reset(token)


@lru_cache(maxsize=1024)
def _log_once(op: str, backend: str, reason: str) -> None:
    log.info("kernel.passed_over", extra={"op": op, "backend": backend, "reason": reason})


@lru_cache(maxsize=16)
def outside_backends(op: str) -> tuple[Backend[Any], ...]:
    """Backends that other packages offer for `op` through the entry-point group.

    An entry point is named `<op>` or `<op>.<anything>` and loads to a `Backend`.

    Raises:
        KernelError: if an entry point loads to something else.
    """
    found: list[Backend[Any]] = []
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name.partition(".")[0] != op:
            continue
        loaded = entry.load()
        if not isinstance(loaded, Backend):
            raise KernelError(
                f"entry point {entry.name!r} of {ENTRY_POINT_GROUP} loads to "
                f"{type(loaded).__name__}; it must be a pallas_kernels.registry.Backend."
            )
        found.append(loaded)
    return tuple(found)


def find_op(name: str) -> KernelOp[Any]:
    """Return the op called `name`, importing its module.

    Raises:
        KernelError: if there is none.
    """
    if name not in OPS:
        raise KernelError(f"there is no op {name!r}. Use one of {sorted(OPS)}.")
    return importlib.import_module(OPS[name]).OP


def explain(
    op: str | KernelOp[Any], *sizes: int | Sequence[int], device: str | None = None
) -> tuple[Decision, ...]:
    """Return the decision table of `op` at `sizes`, in the op's own letters.

    Args:
        sizes: M, N, K for products; the docstring of the op's `make_case` names them.
        device: a device kind, present or not; None = the one a program traced now runs on.
    """
    kernel_op = find_op(op) if isinstance(op, str) else op
    where = hardware.find(device) if device is not None else hardware.current()
    return kernel_op.decisions(kernel_op.make_case(*sizes, hardware=where))
