"""What a probe means: verdicts against the links on record, and a topology with its figures."""

from collections.abc import Mapping

from jaxfound.communication.probe import Measured
from jaxfound.resources.links import Link
from jaxfound.resources.preflight.check import Check, check, passed


def judge(measured: Measured, *, min_share: float | int) -> tuple[Check, ...]:
    """Say for pairs and collectives whether they are as fast as the links on record.

    Of each collective the largest size counts: small ones are latency.

    Args:
        min_share: share of a link's bandwidth that must come through.
    """
    largest = {timed.collective: timed for timed in measured.sweep}
    rule = f"at least {min_share:.0%} of the link on record"
    checks = list(_pairs(measured, min_share=min_share))
    for name, timed in largest.items():
        value = f"{timed.bus_bps / 1e9:.3g} GB/s bus bandwidth at {timed.num_bytes / 2**20:g} MiB"
        if timed.share is None:
            remedy = "name the network with --topology, so that there is a figure to compare with"
            checks.append(check(name, "skip", value, threshold=rule, remedy=remedy))
            continue
        told = f"{value}, {timed.share:.0%} of what the links promise"
        verdict = passed(timed.share >= min_share)
        checks.append(check(name, verdict, told, threshold=rule, remedy=SLOW_COLLECTIVE))
    return tuple(checks)


def _pairs(measured: Measured, *, min_share: float | int) -> list[Check]:
    """Name the pairs that are slow; one verdict for those of a kind that are not."""
    found: list[Check] = []
    topology = measured.topology
    one_way = topology.network.bandwidth_bps if topology.network else None
    for crosses, bps in ((False, _bps(topology.inside_link)), (True, one_way)):
        pairs = [pair for pair in measured.pairs if pair.crosses_hosts is crosses]
        if not pairs:
            continue
        title = "pairs across hosts" if crosses else "pairs in a host"
        rates = sorted(pair.bps / 1e9 for pair in pairs)
        latency_s = max(pair.latency_s for pair in pairs)
        told = f"{rates[0]:.3g} to {rates[-1]:.3g} GB/s each way, at most {latency_s * 1e6:.3g} us"
        if bps is None:
            remedy = "name the network with --topology"
            found.append(check(title, "skip", told, remedy=remedy))
            continue
        rule = f"at least {min_share:.0%} of {bps / 1e9:g} GB/s"
        slow = [pair for pair in pairs if pair.bps < min_share * bps]
        if not slow:
            found.append(check(title, "ok", told, threshold=rule, remedy=""))
        for pair in slow:
            name, value = f"pair {pair.first} - {pair.second}", f"{pair.bps / 1e9:.3g} GB/s"
            found.append(check(name, "fail", value, threshold=rule, remedy=SLOW_PAIR))
    return found


def as_topology(measured: Measured) -> dict[str, object]:
    """Return the keys of a topology file that has the measured links, for `jaxfound plan`."""
    topology = measured.topology
    keys: dict[str, object] = {
        "format_version": 1,
        "hosts": topology.hosts,
        "devices_per_host": topology.devices_per_host,
        "kind": topology.device_kind,
        "memory_bytes": topology.memory_bytes,
    }
    near, far = measured.link(crosses_hosts=False), measured.link(crosses_hosts=True)
    if near is not None:
        keys["inside"] = _keys(near)
    if far is not None:
        # What one device sends while all do: as if each had a NIC of its own.
        keys |= {"network": _keys(far), "nics_per_host": topology.devices_per_host}
    return keys


def _keys(link: Link) -> Mapping[str, object]:
    name = f"{link.name}, measured"
    return {"name": name, "bandwidth_bps": link.bandwidth_bps, "latency_s": link.latency_s}


def _bps(link: Link | None) -> float | None:
    return None if link is None else link.bandwidth_bps


SLOW_PAIR = (
    "run `jaxfound doctor` on both hosts; nvidia-smi topo -m shows how two GPUs are connected, "
    "NCCL_DEBUG=INFO which way NCCL goes"
)
SLOW_COLLECTIVE = (
    "compare with the pairs: if they are fast, look at NCCL's choice of NICs and algorithm "
    "(NCCL_DEBUG=INFO)"
)
