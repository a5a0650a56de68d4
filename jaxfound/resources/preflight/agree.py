"""What the hosts of a job must have in common, judged from what each of them told; pure."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from jaxfound.resources.clock import Offset
from jaxfound.resources.preflight.check import Check, Verdict, check, passed, worst

WARN_OFFSET_S = 0.1
MAX_OFFSET_S = 1.0


def check_peers(count: int, *, present: Sequence[int], lost: Mapping[int, str]) -> Check:
    """Say which processes of a job came, and which stopped answering.

    Args:
        count: processes of the job.
        present: those that came.
        lost: of them, those that did not come to a later meeting, and its name.
    """
    absent = [process for process in range(count) if process not in present]
    told = [f"process {p} is absent" for p in absent]
    told += [f"process {p} came, but not to {name!r}" for p, name in sorted(lost.items())]
    return check(
        "peers",
        passed(not told),
        "; ".join(told) or f"all {count} came",
        threshold=f"{count} processes",
        remedy="start it on that host with the same coordinator and number of processes; look "
        "whether the host is up and the port is open",
    )


def check_equal(
    told: Mapping[int, Mapping[str, str]], *, otherwise: Verdict, title: str
) -> tuple[Check, ...]:
    """Say what is not the same on all processes, one verdict each; one for all that is.

    Args:
        told: by process, values by name.
        otherwise: verdict of a difference.
        title: of what is the same.
    """
    names = sorted({name for values in told.values() for name in values})
    groups = {name: _by_value(told, name) for name in names}
    differ = [name for name in names if len(groups[name]) > 1]
    equal = [name for name in names if name not in differ]
    rule = "the same everywhere"
    checks = [
        check(name, otherwise, _told(groups[name]), threshold=rule, remedy=_who(groups[name]))
        for name in differ
    ]
    if equal:
        value = ", ".join(f"{name} {next(iter(groups[name])) or 'none'}" for name in equal)
        checks.append(check(title, "ok", value, threshold=rule, remedy=""))
    return tuple(checks)


def check_clocks(offsets: Mapping[int, Offset | None]) -> Check:
    """Say how far the clocks are from process 0's, beyond what the measurement leaves open."""
    told, verdicts = [], list[Verdict]()
    for process, offset in sorted(offsets.items()):
        if offset is None:
            told.append(f"process {process} not measured")
            verdicts.append("skip")
            continue
        far_s = max(0.0, abs(offset.offset_s) - offset.error_s)
        verdict = "fail" if far_s > MAX_OFFSET_S else passed(far_s <= WARN_OFFSET_S, "warn")
        verdicts.append(verdict)
        if verdict != "ok":
            told.append(f"process {process} is {-offset.offset_s * 1e3:+,.1f} ms off process 0")
    widest = max((abs(o.offset_s) for o in offsets.values() if o is not None), default=0.0)
    return check(
        "clocks",
        worst(verdicts),
        "; ".join(told) or f"within {widest * 1e3:,.1f} ms",
        threshold=f"within {WARN_OFFSET_S * 1e3:.0f} ms; {MAX_OFFSET_S:.0f} s is too far",
        remedy="start chronyd or systemd-timesyncd on that host; logs are out of order until then",
    )


def merged(by_process: Mapping[int, Sequence[Check]], hosts: Mapping[int, str]) -> list[Check]:
    """Return one verdict where all hosts gave the same, and each with its host where not.

    Args:
        by_process: the verdicts of each process on its own host.
        hosts: name of each process's host.
    """
    by_name: dict[str, dict[int, Check]] = defaultdict(dict)
    for process, checks in by_process.items():
        for one in checks:
            by_name[one.name][process] = one
    found: list[Check] = []
    for each in by_name.values():
        first = next(iter(each.values()))
        if {one.verdict for one in each.values()} == {"ok"}:
            same = len({one.value for one in each.values()}) == 1
            others = "" if same else f" (process {min(each)})"
            found.append(first._replace(value=f"{first.value}{others}"))
            continue
        bad = {p: one for p, one in each.items() if one.verdict != "ok"}
        alike = len(bad) == len(by_process) and len({one[1:] for one in bad.values()}) == 1
        if alike:
            found.append(first)
        else:
            found += [c._replace(where=f"process {p} ({hosts[p]})") for p, c in bad.items()]
    return found


def _by_value(told: Mapping[int, Mapping[str, str]], name: str) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = defaultdict(list)
    for process, values in sorted(told.items()):
        groups[values.get(name, "")].append(process)
    return groups


def _told(groups: Mapping[str, list[int]]) -> str:
    ordered = sorted(groups.items(), key=lambda entry: -len(entry[1]))
    return "; ".join(f"{value or 'none'} on processes {who}" for value, who in ordered)


def _who(groups: Mapping[str, list[int]]) -> str:
    """Return which processes to bring in line: all but the largest group."""
    most = max(groups.values(), key=len)
    others = sorted(p for who in groups.values() if who is not most for p in who)
    return f"bring process {', '.join(map(str, others))} in line with the others"
