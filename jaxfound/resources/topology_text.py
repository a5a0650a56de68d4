"""A topology written down: a text like `3x8:h200:ib400`, or a YAML file."""

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from jaxfound.config.cluster import LinkKeys, read_cluster
from jaxfound.config.schema import ConfigError
from jaxfound.resources.links import NETWORKS, OTHER_INSIDE, Link
from pallas_kernels import hardware

FORM = "[HOSTSx]DEVICES:KIND[:[NICSx]NETWORK], e.g. 8:h200, 3x8:h200:ib400 or 2x8:a100:4xib200"
_SIZE = re.compile(r"(?:(?P<hosts>\d+)x)?(?P<devices>\d+)\Z")
_NETWORK = re.compile(r"(?:(?P<nics>\d+)x)?(?P<name>.+)\Z")


class Described(NamedTuple):
    """The fields of a Topology, as a text gives them."""

    hosts: int
    devices_per_host: int
    device_kind: str
    memory_bytes: int
    inside: Link | None
    network: Link | None
    nics_per_host: int


def parse_text(text: str) -> Described:
    """Return the topology of a text in the form above, or of the YAML file of that name.

    Raises:
        ConfigError: if it is neither; an unknown name is answered with the nearest known one.
    """
    if text.endswith((".yaml", ".yml")):
        return read_file(Path(text))
    size, _, rest = text.partition(":")
    found = _SIZE.match(size)
    kind, _, network = rest.partition(":")
    if found is None or not kind:
        raise ConfigError(f"topology {text!r} is not {FORM}, nor a YAML file")
    hosts, devices = int(found["hosts"] or 1), int(found["devices"])
    if hosts < 1 or devices < 1:
        raise ConfigError(f"topology {text!r} has no devices. It is {FORM}")
    row = kind_of(kind)
    link, nics = _read_network(network, hosts=hosts, text=text)
    return Described(hosts, devices, row.kind, row.memory_bytes, None, link, nics)


def read_file(path: Path) -> Described:
    """Return the topology that a YAML file describes.

    Raises:
        ConfigError: if it cannot be read, or a key or a name is unknown.
    """
    keys = read_cluster(path)
    row = kind_of(keys.kind)
    if keys.hosts > 1 and not keys.network:
        raise ConfigError(f"{path}: hosts={keys.hosts} need a network: {', '.join(NETWORKS)}")
    return Described(
        hosts=keys.hosts,
        devices_per_host=keys.devices_per_host,
        device_kind=row.kind,
        memory_bytes=keys.memory_bytes or row.memory_bytes,
        inside=_link(keys.inside, known=OTHER_INSIDE, what="link inside a host"),
        network=_link(keys.network, known=NETWORKS, what="network"),
        nics_per_host=keys.nics_per_host,
    )


def kind_of(name: str) -> hardware.Hardware:
    """Return the hardware row of a name: JAX's own, or a short one such as `h200`.

    Raises:
        ConfigError: names the nearest known kind.
    """
    names = kind_names()
    row = names.get(_short(name))
    if row is None:
        raise ConfigError(unknown("kind of device", name, names))
    return hardware.HARDWARE[row]


def kind_names() -> dict[str, str]:
    """Return the kind of every name that a topology may use, the shortest of each kind first."""
    aliases = sorted(hardware.ALIASES.items(), key=lambda entry: len(entry[0]))
    named = {_short(alias): kind for alias, kind in aliases}
    return named | {_short(kind): kind for kind in hardware.HARDWARE}


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """Return a sentence that says a name is unknown and which known one is nearest."""
    words = sorted(known)
    near = difflib.get_close_matches(name.lower(), words, n=1, cutoff=0.0)
    return f"no {what} is called {name!r}. Did you mean {near[0]}? Known are {', '.join(words)}"


def _short(name: str) -> str:
    words = name.lower().replace("nvidia ", "").replace("amd instinct ", "")
    return "-".join(words.split())


def _read_network(network: str, *, hosts: int, text: str) -> tuple[Link | None, int]:
    """Return the link between hosts and the NICs a host, 0 when the text leaves them open."""
    if hosts == 1:
        if network:
            raise ConfigError(f"topology {text!r}: one host has no network to other hosts")
        return None, 0
    found = _NETWORK.match(network)
    if found is None:
        names = ", ".join(NETWORKS)
        raise ConfigError(f"topology {text!r}: {hosts} hosts need a network: {names}")
    link = _link(found["name"], known=NETWORKS, what="network")
    return link, int(found["nics"] or 0)


def _link(value: str | LinkKeys, *, known: Mapping[str, Link], what: str) -> Link | None:
    if isinstance(value, LinkKeys):
        return Link(value.name, value.bandwidth_bps, value.latency_s, "given")
    if value and value.lower() not in known:
        raise ConfigError(unknown(what, value, known))
    return known[value.lower()] if value else None
