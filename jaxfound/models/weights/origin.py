"""What a run remembers of the published folder that its weights came from.

With it they go back under the same config, in the same formats, and, where fp8 weights were not
changed, with the same scales: bit by bit what came in.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from jaxfound.models.weights.errors import WeightsError
from jaxfound.models.weights.folder import CONFIG, SINGLE, HubFolder, Json, read_json
from jaxfound.models.weights.fp8 import SCALE
from jaxfound.models.weights.layout import Stored, read_header
from jaxfound.models.weights.writer import ArrayWriter, Planned, write_json

FORMATS, SCALES = "formats.json", "scales"
FORMAT_VERSION = 1
# Files that belong to the model, and that weights do not decide.
COMPANIONS = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja"),
    *("generation_config.json", "LICENSE", "LICENSE.txt", "LICENSE.md"),
)


@dataclass(frozen=True)
class Origin:
    """The published folder that weights came from.

    Attributes:
        config: its config.json.
        formats: format of each of its arrays by name, as safetensors writes it.
        scales: the scales of its fp8 matrices by name.
    """

    config: Json = field(default_factory=dict)
    formats: Mapping[str, str] = field(default_factory=dict)
    scales: Mapping[str, Stored] = field(default_factory=dict)


def origin_of(folder: HubFolder) -> Origin:
    """Return what there is to remember of a published folder."""
    formats = {name: stored.dtype for name, stored in folder.tensors.items()}
    scales = {name: stored for name, stored in folder.tensors.items() if name.endswith(SCALE)}
    return Origin(folder.config, formats, scales)


def save_origin(source: HubFolder, folder: Path) -> None:
    """Write into the new `folder` what is to be remembered, and the files beside the weights."""
    origin = origin_of(source)
    folder.mkdir(parents=True)
    write_json(folder / CONFIG, origin.config)
    formats: Json = {"format_version": FORMAT_VERSION, "formats": dict(origin.formats)}
    write_json(folder / FORMATS, formats)
    copy_companions(source.path, folder)
    if not origin.scales:
        return
    (folder / SCALES).mkdir()
    planned = [Planned(name, s.dtype, s.shape) for name, s in origin.scales.items()]
    with ArrayWriter(folder / SCALES, planned) as writer:
        for name, stored in origin.scales.items():
            writer.write(name, stored.read())


def load_origin(folder: Path) -> Origin:
    """Return what `save_origin` wrote; an empty Origin when there is no such folder.

    Raises:
        WeightsError: if it is damaged, or another version wrote it.
    """
    if not folder.is_dir():
        return Origin()
    written = read_json(folder / FORMATS)
    if written.get("format_version") != FORMAT_VERSION:
        raise WeightsError(
            f"{folder / FORMATS} has format_version={written.get('format_version')}; this version "
            f"reads {FORMAT_VERSION}"
        )
    scales = folder / SCALES / SINGLE
    return Origin(
        read_json(folder / CONFIG),
        cast(dict[str, str], written["formats"]),
        read_header(scales) if scales.exists() else {},
    )


def copy_companions(source: Path, folder: Path) -> None:
    """Copy the tokenizer and what else lies beside published weights."""
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
