"""A new backend of an op is rolled out in two steps: first beside the old one, then alone."""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from jaxfound.config.schema import ConfigError
from pallas_kernels.registry import find_op, replacing
from pallas_kernels.trial import Told, comparing, preferring

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rollout:
    """Which backends are not the registry's own choice.

    Attributes:
        shadows: by op, the one that runs beside the one that serves, and is compared.
        backends: by op, the one that serves alone.
    """

    shadows: tuple[tuple[str, str], ...] = ()
    backends: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, shadows: Sequence[str], backends: Sequence[str]) -> "Rollout":
        """Return what words such as `mla_decode=xla` ask for.

        Raises:
            ConfigError: a word is not OP=BACKEND, or an op is named twice.
            KernelError: there is no such op or backend.
        """
        pairs = [_pair(word) for word in (*shadows, *backends)]
        ops = [op for op, _ in pairs]
        if len(set(ops)) < len(ops):
            raise ConfigError(f"{', '.join(ops)}: an op is named twice; it has one candidate")
        return cls(tuple(pairs[: len(shadows)]), tuple(pairs[len(shadows) :]))


def _pair(word: str) -> tuple[str, str]:
    op, _, backend = word.partition("=")
    if not backend:
        raise ConfigError(f"{word!r} is not OP=BACKEND, such as mla_decode=xla")
    find_op(op).backend(backend)
    return op, backend


class Shadow:
    """What became of the comparisons of one op.

    Attributes:
        op: its name.
        backend: the candidate.
        num_checks: comparisons so far.
        num_reverts: of those, beyond the tolerance; the old backend's result was used.
        worst: largest difference of a row.
    """

    def __init__(self, op: str, backend: str) -> None:
        self.op = op
        self.backend = backend
        self.num_checks = 0
        self.num_reverts = 0
        self.worst = 0.0
        self._lock = threading.Lock()

    def told(self, total: float, row: float, within: bool) -> None:
        """Count a comparison; the first that fails is logged, with its figures."""
        with self._lock:
            self.num_checks += 1
            self.num_reverts += not within
            self.worst = max(self.worst, float(row))
            first = self.num_reverts == 1 and not within
        if first:
            fields = {"op": self.op, "backend": self.backend}
            figures = {"difference": float(total), "worst_row": float(row)}
            log.warning("serve.shadow_reverted", extra={**fields, **figures})

    @property
    def verdict(self) -> str:
        """What is to be done, as a sentence."""
        name = f"{self.op}={self.backend}"
        if self.num_reverts:
            return (
                f"{name}: REVERTED, {self.num_reverts:,} of {self.num_checks:,} results were "
                "beyond the tolerance and not used; keep the old backend"
            )
        if not self.num_checks:
            return f"{name}: never ran, so nothing is known of it"
        return f"{name}: {self.num_checks:,} results within the tolerance; --backend {name} is safe"


@contextmanager
def rolled_out(rollout: Rollout) -> Iterator[tuple[Shadow, ...]]:
    """While entered, programs are traced with these backends; yields what will be counted."""
    shadows = tuple(Shadow(op, backend) for op, backend in rollout.shadows)

    def counted(shadow: Shadow) -> Told:
        return lambda total, row, within: shadow.told(float(total), float(row), bool(within))

    rules = {op: preferring(backend) for op, backend in rollout.backends}
    rules |= {each.op: comparing(each.backend, counted(each)) for each in shadows}
    with replacing(rules):
        yield shadows
