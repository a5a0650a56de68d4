"""The parts of a plan as lines of text, the same for the same inputs."""

from collections.abc import Iterator, Mapping, Sequence

from jaxfound.config.parallel import AXES, AxisName
from jaxfound.parallelism.compute import Terms
from jaxfound.parallelism.memory import Ledger
from jaxfound.parallelism.pipeline.facts import Pipeline
from jaxfound.parallelism.placement import Placement
from jaxfound.parallelism.wires import Wire

UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def bytes_text(num_bytes: int | float) -> str:
    """Return bytes in the largest decimal unit that leaves a whole number before the point."""
    for size, unit in UNITS:
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes:,.0f} B"


def seconds_text(seconds: float | None) -> str:
    """Return seconds to three digits, from hours to microseconds."""
    if seconds is None:
        return "unknown"
    if seconds >= 1:
        return f"{seconds:,.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} us"


def axis_lines(
    degrees: Mapping[AxisName, int], placement: Placement, wires: Sequence[Wire]
) -> Iterator[str]:
    """Yield for each axis above one where its groups lie and what they send, in mesh order."""
    for axis in AXES:
        if degrees[axis] == 1:
            continue
        yield f"  {axis}={degrees[axis]} {_where(degrees[axis], axis, placement)}"
        for wire in (w for w in wires if w.axis == axis):
            yield f"    {wire.collective} of {wire.what}: {_amount(wire)}"


def _where(degree: int, axis: AxisName, placement: Placement) -> str:
    if not placement.spans:
        return "devices"
    span = placement.span(axis)
    if span.hosts == 1:
        return "inside a host"
    if span.inside == 1:
        return f"across hosts, {degree} devices a group"
    return f"across {span.hosts} hosts, {span.inside} devices a group in each"


def _amount(wire: Wire) -> str:
    calls = "1 call" if wire.calls == 1 else f"{wire.calls:,} calls"
    text = f"{bytes_text(wire.num_bytes)} a device and step in {calls}"
    return text if wire.seconds is None else f"{text}, {seconds_text(wire.seconds)}"


def host_lines(degrees: Mapping[AxisName, int], placement: Placement) -> Iterator[str]:
    """Yield what fills a host and what is left to the network, where there are several hosts."""
    used: list[AxisName] = [axis for axis in placement.order if degrees[axis] > 1]
    if any(placement.spans) and any(placement.crosses(axis) for axis in used):
        inside = [f"{a}={degrees[a]}" for a in used if not placement.crosses(a)]
        across = [f"{a}={degrees[a]}" for a in used if placement.crosses(a)]
        here = f"{' x '.join(inside)} stays inside a host" if inside else "nothing is inside a host"
        yield f"{here}; {' x '.join(across)} goes over the network"
    if used != [axis for axis in AXES if degrees[axis] > 1]:
        yield f"devices are walked by {', '.join(used)}, the last over neighbours"


def pipeline_lines(pipeline: Pipeline) -> Iterator[str]:
    """Yield the schedule of the stages, how long ranks wait, and what they have in flight."""
    schedule, stages = pipeline.schedule, pipeline.stages
    chunks = _counted(schedule.num_chunks, "chunk")
    layers = _counted(stages.layers_a_chunk, "layer")
    yield (
        f"pipeline: {schedule.name}, {schedule.num_ranks} ranks of {chunks}, "
        f"{schedule.num_stages} stages of {layers}, {_counted(stages.num_masked, 'masked place')}, "
        f"{_counted(schedule.num_copies, 'copy', 'copies')}, "
        f"{_counted(schedule.num_microbatches, 'micro-batch', 'micro-batches')}"
    )
    yield (
        f"  a rank waits {pipeline.bubble:.1%} of the step where it runs as soon as it can and F, "
        "I, W cost the same"
    )
    yield (
        f"  {pipeline.num_ticks} ticks in lockstep, B running F again: {pipeline.efficiency:.1%} "
        "of the ranks' time is work"
    )
    peaks = ", ".join(str(n) for n in pipeline.peaks)
    same = "each" if len(set(pipeline.peaks)) == 1 else f"by rank {peaks}"
    yield f"  micro-batches in flight on a rank: at most {max(pipeline.peaks)}, {same}"


def _counted(count: int, one: str, many: str = "") -> str:
    if count == 1:
        return f"1 {one}"
    return f"{count or 'no'} {many or one + 's'}"


def state_lines(num_params: int, state_bytes: int, *, num_devices: int) -> Iterator[str]:
    """Yield how large the model and its state are, before anything is said of a layout."""
    if not num_params:
        return
    each = state_bytes / num_params
    yield (
        f"{num_params:,} parameters; their state is {each:.3g} B each (float32 weights, gradients, "
        f"optimizer): {bytes_text(state_bytes)}, {bytes_text(state_bytes / num_devices)} a device "
        "if all of it were cut over all"
    )


def ledger_lines(ledger: Ledger) -> Iterator[str]:
    """Yield a line for each kind of bytes, their sum, and what the device has."""
    entries = [e for e in ledger.entries if e.num_bytes]
    rows = [(e.kind, e.num_bytes, e.how) for e in entries]
    rows.append(("total", ledger.total_bytes, _capacity(ledger)))
    width = max(len(f"{num_bytes:,}") for _, num_bytes, _ in rows)
    for kind, num_bytes, how in rows:
        yield f"  {kind:<12} {num_bytes:>{width},} B  {how}".rstrip()


def _capacity(ledger: Ledger) -> str:
    if not ledger.capacity_bytes:
        return "memory of a device not known"
    return f"of {ledger.capacity_bytes:,} B, {ledger.total_bytes / ledger.capacity_bytes:.0%}"


def terms_line(terms: Terms) -> str:
    """Return the seconds of a step without traffic, and what takes them."""
    spent = {name: seconds for name, seconds in terms._asdict().items() if seconds}
    told = " + ".join(f"{name} {seconds_text(seconds)}" for name, seconds in spent.items())
    return f"arithmetic: {seconds_text(terms.total)} a step = {told}"


def verdict_text(ledger: Ledger) -> str:
    """Return whether the ledger fits, and by how much."""
    if ledger.fits is None:
        return "verdict: not known, because the memory of a device is not"
    if ledger.fits:
        return f"verdict: fits, {bytes_text(ledger.spare_bytes)} to spare"
    largest = sorted(ledger.entries, key=lambda e: -e.num_bytes)[:2]
    told = " and ".join(f"{e.kind} {bytes_text(e.num_bytes)}" for e in largest)
    return f"verdict: does not fit, {bytes_text(-ledger.spare_bytes)} too much; most is {told}"
