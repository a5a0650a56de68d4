"""From a YAML file and overrides to a RunConfig, and back to a file."""

import contextlib
import json
import os
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from jaxfound.config.alias_rules import Sheet, enter_aliases, report_aliases, resolve_aliases
from jaxfound.config.describe import catalog
from jaxfound.config.layers import Entry, Layer, Origin, Problem, Source, read_layer
from jaxfound.config.nearest import nearest_word
from jaxfound.config.presets import PRESETS
from jaxfound.config.refusals import Given, translate
from jaxfound.config.run import FORMAT_VERSION, RunConfig
from jaxfound.config.schema import ConfigError
from jaxfound.config.yaml_source import TAG, brief, compose, flow, read_text, to_node

KNOWN_VERSIONS = (FORMAT_VERSION,)
COMMENT_COLUMN = 44

Presets = Mapping[str, Mapping[str, object]]


class Loaded(NamedTuple):
    """A config and where it came from.

    Attributes:
        config: what was asked.
        sources: by dotted key, the source of each value: `FILE:LINE`, `preset NAME` …
        aliases: by a torch launcher's word that was used, what it came to: `key=value`.
    """

    config: RunConfig
    sources: Mapping[str, str]
    aliases: Mapping[str, str]


def load(
    path: Path | str, overrides: Sequence[str] = (), *, presets: Presets = PRESETS
) -> RunConfig:
    """Return the config of a file: its preset, then its own keys, then the overrides.

    Args:
        path: a YAML file.
        overrides: `key=value`, the key dotted, the value YAML; of two for one key the later wins.
        presets: what `preset: NAME` may name.
    Raises:
        ConfigError: one line for each thing that is wrong, in the order of the file.
    """
    return trace(path, overrides, presets=presets).config


def trace(path: Path | str, overrides: Sequence[str] = (), *, presets: Presets = PRESETS) -> Loaded:
    """Do as `load` does, and say where each value came from."""
    place = str(path)
    text = read_text(Path(path))
    root = compose(text, place=place)
    if root is None:
        raise ConfigError(f"{place}: the file is empty; a config needs at least a preset and train")
    layer = read_layer(root, Source("file", place, rank=1, text=text), catalog=catalog())
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(layer.problems[0].text)
    return _combine(layer, overrides, presets=presets)


def parse(
    values: Mapping[str, object],
    overrides: Sequence[str] = (),
    *,
    place: str = "config",
    presets: Presets = PRESETS,
) -> RunConfig:
    """Return the config that plain data describes, e.g. one that a checkpoint stored.

    Args:
        values: nested as in a file.
        overrides: as in `load`.
        place: what messages call the data.
        presets: as in `load`.
    Raises:
        ConfigError: as `load` does.
    """
    layer = read_layer(to_node(values), Source("mapping", place, rank=1), catalog=catalog())
    return _combine(layer, overrides, presets=presets).config


def save(cfg: RunConfig, path: Path | str) -> None:
    """Write every key of `cfg` as YAML; `load` of that file returns an equal config.

    The folder is made if it is not there; the file is replaced whole.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        beside.write_text(to_yaml(cfg), encoding="utf-8")
        beside.replace(target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            beside.unlink()


def to_yaml(cfg: RunConfig, *, notes: Mapping[str, str] | None = None) -> str:
    """Return every key of `cfg` as YAML, with `notes` by dotted key as comments."""
    return "\n".join(_lines(cfg.model_dump(mode="json"), notes=notes or {}, prefix="")) + "\n"


def _lines(values: Mapping[str, Any], *, notes: Mapping[str, str], prefix: str) -> list[str]:
    lines: list[str] = []
    indent = "  " * prefix.count(".")
    for name, value in values.items():
        key = prefix + name
        if key in catalog().sections:
            lines.append(f"{indent}{name}:")
            lines.extend(_lines(value, notes=notes, prefix=key + "."))
            continue
        line = f"{indent}{name}: {flow(value)}"
        lines.append(f"{line:<{COMMENT_COLUMN}}  # {notes[key]}" if key in notes else line)
    return lines


def _combine(own: Layer, overrides: Sequence[str], *, presets: Presets) -> Loaded:
    """Lay the overrides over `own`, and both over the preset that they name."""
    keys = catalog()
    _check_version(own)
    commands = [_read_override(text, rank=2 + i) for i, text in enumerate(overrides)]
    layers = [own, *commands]
    chosen = _last(layers, "preset")
    problems = [problem for layer in layers for problem in layer.problems]
    problems += [*enter_aliases([own]), *enter_aliases(commands)]
    preset, unknown = _read_preset(chosen, own, presets=presets)
    layers = [preset, *layers]
    problems += [*preset.problems, *unknown]
    ranks = {layer.source.place: layer.source.rank for layer in layers}
    sheet = Sheet(
        words={word: entry for layer in layers for word, entry in layer.words.items()},
        entries={key: entry for layer in layers for key, entry in layer.entries.items()},
        rank=lambda origin: ranks[origin.place],
    )
    resolve_aliases(sheet)
    problems += sheet.problems
    entries = sheet.entries
    given = Given(
        entries=entries,
        place=own.source.place,
        ranks=ranks,
        catalog=keys,
        presets=tuple(presets),
    )
    config = _validate(given, problems, unknown=sheet.unknown)
    if config is None:
        raise ConfigError("\n".join(problem.text for problem in sorted(problems)))
    sources = {
        key: _written_at(entries[key].origin) if key in entries else "default"
        for key in keys.rows
        if "[]" not in key
    }
    return Loaded(config, sources, report_aliases(sheet))


def _written_at(origin: Origin) -> str:
    return f"{origin.source}, {origin.word}" if origin.word else origin.source


def _last(layers: Sequence[Layer], key: str) -> Entry | None:
    found = [layer.entries[key] for layer in layers if key in layer.entries]
    return found[-1] if found else None


def _check_version(own: Layer) -> None:
    """Refuse another layout before judging its keys by this one's rules."""
    entry = own.entries.get("format_version")
    if entry is None or (type(entry.value) is int and entry.value in KNOWN_VERSIONS):
        return
    known = ", ".join(str(version) for version in KNOWN_VERSIONS)
    raise ConfigError(
        entry.origin.message(
            "format_version",
            f"{entry.origin.shown} is not a version that this jaxfound reads (known: {known}). "
            "Use the jaxfound that wrote the file, or write its keys anew",
        )
    )


def _read_override(text: str, *, rank: int) -> Layer:
    key, equals, value = text.partition("=")
    source = Source("command line", brief(text), rank=rank, text=value)
    if not equals or not key.strip():
        return _refused(source, key="", text="an override is KEY=VALUE, e.g. train.steps=100")
    if not value.strip():
        return _refused(source, key=key, text="no value after `=`")
    try:
        node = compose(value, place=f"command line: {source.place}", numbered=False)
    except ConfigError as error:
        layer = Layer(source)
        layer.problems.append(Problem((rank, 0, 0), key, str(error)))
        return layer
    if node is None:
        return _refused(source, key=key, text="no value after `=`, only a comment")
    for name in reversed(key.strip().split(".")):
        node = yaml.MappingNode(TAG + "map", [(yaml.ScalarNode(TAG + "str", name), node)])
    return read_layer(node, source, catalog=catalog())


def _refused(source: Source, *, key: str, text: str) -> Layer:
    layer = Layer(source)
    layer.problems.append(source.problem(Origin(source.kind, source.place), key=key, text=text))
    return layer


def _read_preset(
    chosen: Entry | None, own: Layer, *, presets: Presets
) -> tuple[Layer, list[Problem]]:
    """Return the named preset's keys below `model`, and what is wrong with the name."""
    name = chosen.value if chosen else ""
    source = Source("preset", f"preset {name}", rank=0)
    if chosen is None or not isinstance(name, str) or not name:
        return Layer(source), []
    if name not in presets:
        text = f"no preset is called {name}{nearest_word(name, presets)}"
        text += f"{'' if text.endswith('?') else '.'} The presets are {', '.join(presets)}"
        rank = 1 if chosen.origin.kind != "command line" else 2
        problem = Problem(
            (rank, chosen.origin.line, chosen.origin.column),
            "preset",
            chosen.origin.message("preset", text),
        )
        return Layer(source), [problem]
    layer = read_layer(to_node(presets[name]), source, catalog=catalog(), prefix="model")
    own_preset = own.entries.get("preset")
    changed = own_preset is None or own_preset.value != name
    if changed and layer.entries.keys() <= own.entries.keys():
        text = (
            f"changes nothing: {own.source.place} gives every key of model itself. "
            "Start from a file that names a preset and its differences"
        )
        return layer, [Problem((2, 0, 0), "preset", chosen.origin.message("preset", text))]
    return layer, []


def _validate(given: Given, problems: list[Problem], *, unknown: Set[str]) -> RunConfig | None:
    """Return the config, or None after adding what pydantic refuses to `problems`.

    Args:
        given: what all sources said.
        problems: found before.
        unknown: keys that are missing because of one of these problems.
    """
    refused = frozenset(problem.key for problem in problems) | unknown
    try:
        config = RunConfig.model_validate_json(json.dumps(_nest(given.entries)))
    except ValidationError as error:
        problems += translate(error, given, refused=refused)
        return None
    return None if problems else config


def _nest(entries: Mapping[str, Entry]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, entry in entries.items():
        *sections, name = key.split(".")
        here = tree
        for section in sections:
            here = here.setdefault(section, {})
        here[name] = entry.value
    return tree
