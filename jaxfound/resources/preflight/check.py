"""One verdict: what was looked at, what it is, what it must be, and what to do."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, cast

Verdict = Literal["ok", "warn", "fail", "skip"]
# The worst of several is the last of these.
ORDER: tuple[Verdict, ...] = ("ok", "skip", "warn", "fail")


class Check(NamedTuple):
    """One verdict.

    Attributes:
        name: what was looked at.
        value: what it is.
        threshold: what it must be; empty where there is no rule, only a fact.
        verdict: `ok`; `warn`, for what costs time or will fail later; `fail`, for what must not
            be; `skip`, for what could not be looked at.
        remedy: what to do; empty when it is `ok`.
        where: the host it was seen on; empty for all of them or the only one.
    """

    name: str
    value: str
    threshold: str
    verdict: Verdict
    remedy: str
    where: str = ""

    @property
    def ok(self) -> bool:
        """False when the verdict is `fail`."""
        return self.verdict != "fail"

    def text(self) -> str:
        """Return the check as one sentence."""
        at = f" on {self.where}" if self.where else ""
        rule = f", {self.threshold}" if self.threshold else ""
        way_out = f". {self.remedy}" if self.remedy else ""
        return f"{self.name}{at}: {self.value}{rule}{way_out}"


def check(name: str, verdict: Verdict, value: str, *, threshold: str = "", remedy: str) -> Check:
    """Return a check; its remedy is left out when there is nothing to do."""
    return Check(name, value, threshold, verdict, "" if verdict == "ok" else remedy)


def from_fields(fields: Sequence[str]) -> Check:
    """Return the check that another process sent as a list of its fields."""
    name, value, threshold, verdict, remedy, where = fields
    return Check(name, value, threshold, cast(Verdict, verdict), remedy, where)


def passed(holds: bool, otherwise: Verdict = "fail") -> Verdict:
    """Return `ok` when something holds, and another verdict when it does not."""
    return "ok" if holds else otherwise


def worst(verdicts: list[Verdict]) -> Verdict:
    """Return the worst of several verdicts, `ok` of none."""
    return ORDER[max(map(ORDER.index, verdicts), default=0)]
