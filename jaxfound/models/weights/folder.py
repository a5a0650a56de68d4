"""A published folder: config.json and its arrays, in one file or in shards with an index."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from jaxfound.models.weights.errors import WeightsError, listed
from jaxfound.models.weights.layout import Stored, read_header

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = "model-{:05d}-of-{:05d}.safetensors"

# One config.json: JSON values by key.
Json = dict[str, object]


@dataclass(frozen=True)
class HubFolder:
    """A published checkpoint on disk, its headers read and checked, no array read yet.

    Attributes:
        path: the folder.
        config: its config.json.
        tensors: every array by name.
    """

    path: Path
    config: Json
    tensors: dict[str, Stored]

    @property
    def place(self) -> str:
        """The config file, for messages."""
        return str(self.path / CONFIG)


def open_folder(path: Path | str) -> HubFolder:
    """Return the checkpoint in a folder.

    Raises:
        WeightsError: if config.json or the arrays are missing or damaged, a shard is missing, the
            index names arrays that are not in the shard it gives, or shards hold others.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise WeightsError(f"{folder} is not a folder. Give the folder that holds {CONFIG}")
    config = read_json(folder / CONFIG)
    return HubFolder(folder, config, _tensors(folder))


def read_json(path: Path) -> Json:
    """Return the object in a JSON file.

    Raises:
        WeightsError: if there is none; names the file.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise WeightsError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise WeightsError(f"{path} holds a {type(found).__name__}, not an object")
    return found


def _tensors(folder: Path) -> dict[str, Stored]:
    single, index = folder / SINGLE, folder / INDEX
    if single.exists() and index.exists():
        raise WeightsError(f"{folder} holds both {SINGLE} and {INDEX}: remove the stale one")
    if single.exists():
        return read_header(single)
    if index.exists():
        return _sharded(folder, read_json(index))
    there = sorted(p.name for p in folder.iterdir() if p.suffix in (".safetensors", ".bin", ".pt"))
    only = f"; there are {listed(there)}" if there else ""
    raise WeightsError(f"{folder} holds neither {SINGLE} nor {INDEX}{only}")


def _sharded(folder: Path, index: Json) -> dict[str, Stored]:
    """Return the arrays of all shards, after checking that each is where the index says."""
    place = folder / INDEX
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise WeightsError(f"{place} has no weight_map from array names to file names")
    asked = cast(dict[str, str], weight_map)
    shards = sorted(set(asked.values()))
    # A name with a folder in it would read a file from somewhere else.
    strange = [name for name in shards if Path(name).name != name]
    if strange:
        raise WeightsError(f"{place} names files outside the folder: {listed(strange)}")
    absent = [name for name in shards if not (folder / name).exists()]
    if absent:
        raise WeightsError(f"{folder}: {len(absent)} of {len(shards)} shards are missing: "
                           f"{listed(absent)}. Download them")  # fmt: skip
    found: dict[str, dict[str, Stored]] = {s: read_header(folder / s) for s in shards}
    _check_places(asked, found, place=place)
    return {name: stored for shard in found.values() for name, stored in shard.items()}


def _check_places(
    asked: dict[str, str], found: dict[str, dict[str, Stored]], *, place: Path
) -> None:
    """Refuse an index and shards that disagree about where an array is."""
    homes: dict[str, list[str]] = {}
    for shard, tensors in found.items():
        for name in tensors:
            homes.setdefault(name, []).append(shard)
    faults = [
        f"{name} is in no shard (the index says {shard})"
        for name, shard in asked.items()
        if name not in homes
    ]
    faults += [
        f"{name} is in {homes[name][0]}, the index says {shard}"
        for name, shard in asked.items()
        if name in homes and shard not in homes[name]
    ]
    faults += [f"{name} is in {' and '.join(h)}" for name, h in homes.items() if len(h) > 1]
    faults += [f"{name} of {h[0]} is not in the index" for name, h in homes.items()
               if name not in asked]  # fmt: skip
    if faults:
        raise WeightsError(f"{place} does not describe its shards: {listed(faults)}")
