"""A cluster written down: the keys of a topology's YAML file."""

import difflib
from pathlib import Path
from typing import Literal

import yaml
from pydantic import ValidationError

from jaxfound.config.schema import ConfigError, Section, key
from jaxfound.config.yaml_source import compose, read_text, scalar


class LinkKeys(Section):
    """A link by its own figures, measured or promised."""

    name: str = key(..., "what reports call it", min_length=1)
    bandwidth_bps: float = key(..., "bytes/s each way, of a device or of a NIC", gt=0)
    latency_s: float = key(..., "seconds of one message", ge=0)


class ClusterKeys(Section):
    """Hosts, devices and links."""

    format_version: Literal[1] = key(1, "version of this file's layout")
    hosts: int = key(..., "hosts of the job", ge=1)
    devices_per_host: int = key(..., "devices of one host", ge=1)
    kind: str = key(..., "kind of device, e.g. h200", min_length=1)
    memory_bytes: int = key(0, "memory of a device a program may use; 0 = the kind's", ge=0)
    inside: str | LinkKeys = key("", "link inside a host, a name or figures; empty = the kind's")
    network: str | LinkKeys = key("", "link between hosts, a name or figures; empty = none")
    nics_per_host: int = key(0, "NICs of a host; 0 = as the network usually has", ge=0)


def read_cluster(path: Path) -> ClusterKeys:
    """Return what a topology's YAML file says.

    Raises:
        ConfigError: one line for each thing that is wrong.
    """
    root = compose(read_text(path), place=str(path))
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: a topology is keys and values, at least {_required()}")
    try:
        return ClusterKeys.model_validate(_plain(root, place=str(path)))
    except ValidationError as error:
        lines: dict[str, None] = {}
        for fault in error.errors():
            lines[f"{path}: {_fault(fault['loc'], fault['type'], fault['msg'])}"] = None
        raise ConfigError("\n".join(lines)) from error


def _fault(place: tuple[int | str, ...], kind: str, message: str) -> str:
    # Members of a union are named in the place: of the two, only the figures have keys.
    names = [str(part) for part in place if part not in ("str", "LinkKeys")]
    where = ".".join(names)
    if kind == "extra_forbidden":
        known = ClusterKeys.model_fields if len(names) == 1 else LinkKeys.model_fields
        near = difflib.get_close_matches(names[-1], known, n=1)
        meant = f"Did you mean {near[0]}?" if near else f"The keys are {', '.join(known)}"
        return f"{where}: unknown key. {meant}"
    if kind == "missing":
        return f"{where}: is not given; a topology needs {_required()}"
    return f"{where}: {message[0].lower()}{message[1:]}"


def _required() -> str:
    return ", ".join(n for n, f in ClusterKeys.model_fields.items() if f.is_required())


def _plain(node: yaml.MappingNode, *, place: str) -> dict[str, object]:
    values: dict[str, object] = {}
    for name, value in node.value:
        where = f"{place}:{name.start_mark.line + 1}"
        word = name.value if isinstance(name, yaml.ScalarNode) else ""
        if not word or word in values:
            raise ConfigError(f"{where}: a key is one word, and each stands once")
        if isinstance(value, yaml.MappingNode):
            values[word] = _plain(value, place=place)
        elif isinstance(value, yaml.ScalarNode):
            values[word] = scalar(value)
        else:
            raise ConfigError(f"{where}: {word} is a list; it takes one value")
    return values
