"""Tile settings: a measured table for each kind of device, over the heuristics of each backend.

A table is plain JSON without paths: op → case key → settings. The lookup order is the override in
force, then the table shipped with the package, then nothing: the backend's heuristic decides.
"""

import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path

import jax

FORMAT_VERSION = 1

Settings = tuple[tuple[str, int], ...]


class TuningError(ValueError):
    """A table's file is not one that this version reads."""


@dataclass(frozen=True)
class Table:
    """Measured settings of one kind of device.

    Attributes:
        device: the kind they were measured on.
        versions: of the software they were measured with, such as (("jax", "0.11.2"),).
        entries: ((op, key), settings), sorted; hashable, because a table in force is part of
            the jit cache key.
    """

    device: str
    versions: tuple[tuple[str, str], ...] = ()
    entries: tuple[tuple[tuple[str, str], Settings], ...] = ()

    def find(self, op: str, key: str) -> dict[str, int] | None:
        """Return the settings of `op` at `key`, or None if none were measured."""
        settings = dict(self.entries).get((op, key))
        return dict(settings) if settings is not None else None

    def with_entry(self, op: str, key: str, *, settings: Mapping[str, int]) -> "Table":
        """Return a table that also holds `settings`; an older entry at the key is replaced."""
        entries = dict(self.entries)
        entries[op, key] = tuple(sorted(settings.items()))
        return Table(self.device, self.versions, tuple(sorted(entries.items())))

    def to_json(self) -> str:
        """The table as text, one entry a line, so that a change shows in a diff."""
        ops: dict[str, dict[str, dict[str, int]]] = {}
        for (op, key), settings in self.entries:
            ops.setdefault(op, {})[key] = dict(settings)
        lines = [
            f"  {json.dumps(op)}: {{\n"
            + ",\n".join(f"   {json.dumps(k)}: {json.dumps(v)}" for k, v in keys.items())
            + "\n  }"
            for op, keys in ops.items()
        ]
        head = {"format_version": FORMAT_VERSION, "device": self.device}
        fields = [f' "{name}": {json.dumps(value)}' for name, value in head.items()]
        fields.append(f' "versions": {json.dumps(dict(self.versions))}')
        fields.append(' "ops": {\n' + ",\n".join(lines) + "\n }" if lines else ' "ops": {}')
        return "{\n" + ",\n".join(fields) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> "Table":
        """Read what `to_json` wrote.

        Raises:
            TuningError: if it is of another format version.
        """
        data = json.loads(text)
        if data.get("format_version") != FORMAT_VERSION:
            raise TuningError(
                f"tuning table has format_version={data.get('format_version')}, this version "
                f"reads {FORMAT_VERSION}. Measure again with `jaxfound bench tune`."
            )
        entries = {
            (op, key): tuple(sorted(settings.items()))
            for op, keys in data["ops"].items()
            for key, settings in keys.items()
        }
        versions = tuple(data["versions"].items())
        return cls(data["device"], versions, tuple(sorted(entries.items())))


_override = jax.make_user_context(default_value=None)


def override(table: Table) -> AbstractContextManager[None]:
    """Use `table` before the shipped one for programs traced inside the context."""
    return _override(table)


def find(op: str, key: str, *, device: str) -> dict[str, int] | None:
    """Return measured settings of `op` at `key` on `device`; None = ask the heuristic."""
    table = _override.value
    if table is not None and table.device == device:
        settings = table.find(op, key)
        if settings is not None:
            return settings
    return shipped(device).find(op, key)


@lru_cache(maxsize=16)
def shipped(device: str) -> Table:
    """Return the table that the package carries for `device`; an empty one if there is none."""
    name = device.lower().replace(" ", "_") + ".json"
    file = resources.files("pallas_kernels") / "tuned" / name
    if not file.is_file():
        return Table(device)
    return Table.from_json(file.read_text(encoding="utf-8"))


def publish(table: Table, path: Path) -> None:
    """Write `table` to `path`, whole or not at all; readers never see half a file.

    Two writers that publish to one path leave one of their tables, not a mixture.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=path.name, delete=False, encoding="utf-8"
    ) as file:
        file.write(table.to_json())
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).replace(path)


def read(path: Path) -> Table:
    """Read the table at `path`.

    Raises:
        TuningError: if it is of another format version.
    """
    return Table.from_json(path.read_text(encoding="utf-8"))
