"""What one source (a preset, a file, an override) says, key by key, each with its place."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, cast

import yaml

from jaxfound.config.aliases import ALIASES
from jaxfound.config.describe import Catalog
from jaxfound.config.nearest import unknown_key
from jaxfound.config.schema import ConfigError
from jaxfound.config.yaml_source import brief, is_text, scalar

Kind = Literal["preset", "mapping", "file", "command line"]
KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Origin:
    """Where one value was given.

    Attributes:
        kind: the sort of source.
        place: what a message calls it: a file's name, `preset NAME`, an override as typed.
        line: counted from 1; 0 when the source has no lines.
        column: counted from 1; 0 when the source has no lines.
        shown: the value as it was written.
        word: the launcher's word that was written for a native key, if one was.
        native: that key.
    """

    kind: Kind
    place: str
    line: int = 0
    column: int = 0
    shown: str = ""
    word: str = ""
    native: str = ""

    @property
    def source(self) -> str:
        """Where the value is, for a reader who looks for it."""
        if self.kind == "command line":
            return "command line"
        return f"{self.place}:{self.line}" if self.line else self.place

    def message(self, key: str, text: str) -> str:
        """Return one line that says where, which key, and what is wrong."""
        if self.kind != "command line":
            name = f"{self.word} ({key})" if self.word and key == self.native else key
            return f"{self.source}: {name}: {text}" if key else f"{self.source}: {text}"
        named = not key or self.place.startswith(key + "=")
        return f"command line: {self.place}: {text if named else f'{key}: {text}'}"


class Problem(NamedTuple):
    """One thing that is wrong: where it stands among others, the key it is about, the line."""

    order: tuple[int, int, int]
    key: str
    text: str


class Entry(NamedTuple):
    """One key's value in a source; `items` holds the places inside a list."""

    value: object
    origin: Origin
    items: Mapping[KeyPath, Origin]


@dataclass(frozen=True)
class Source:
    """Who speaks: rank orders sources in messages, `text` is what nodes' marks point into."""

    kind: Kind
    place: str
    rank: int = 0
    text: str = ""

    def origin(self, node: yaml.Node) -> Origin:
        """Return the place of a node of this source."""
        mark = node.start_mark
        if mark is None:
            return Origin(self.kind, self.place, shown=brief(_written(node)))
        shown = brief(self.text[mark.index : node.end_mark.index])
        if self.kind == "command line":
            return Origin(self.kind, self.place, shown=shown)
        return Origin(self.kind, self.place, mark.line + 1, mark.column + 1, shown)

    def problem(self, origin: Origin, *, key: str, text: str) -> Problem:
        """Return a problem of this source that sorts by its place."""
        return Problem((self.rank, origin.line, origin.column), key, origin.message(key, text))


@dataclass(frozen=True)
class Layer:
    """What a source says: entries by dotted key, and the problems found while reading.

    Attributes:
        source: who speaks.
        entries: by native key.
        words: by a torch launcher's word (config/aliases.py).
        problems: what cannot be used.
    """

    source: Source
    entries: dict[str, Entry] = field(default_factory=dict[str, Entry])
    words: dict[str, Entry] = field(default_factory=dict[str, Entry])
    problems: list[Problem] = field(default_factory=list[Problem])

    def refuse(self, node: yaml.Node, *, key: str, text: str) -> None:
        """Remember that the value at `node` cannot be used."""
        self.problems.append(self.source.problem(self.source.origin(node), key=key, text=text))


def read_layer(root: yaml.Node, source: Source, *, catalog: Catalog, prefix: str = "") -> Layer:
    """Return the entries of a source, known keys only; the rest are problems.

    Args:
        root: the mapping of the section `prefix`.
        source: who speaks.
        catalog: the valid keys and sections.
        prefix: dotted path of the section that `root` stands for; empty for the whole config.
    """
    layer = Layer(source)
    _read_section(root, layer, catalog=catalog, section=prefix)
    return layer


def _read_section(node: yaml.Node, layer: Layer, *, catalog: Catalog, section: str) -> None:
    if not isinstance(node, yaml.MappingNode):
        layer.refuse(node, key=section, text=_not_a_section(node, layer, section=section))
        return
    for name_node, value in _named(node, layer, section=section):
        name = str(name_node.value)
        key = f"{section}.{name}" if section else name
        _read_key(name_node, value, layer, catalog=catalog, key=key)


def _named(
    node: yaml.Node, layer: Layer, *, section: str
) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
    """Yield the names and values of a mapping; a name that is no word or comes twice is refused."""
    first: dict[str, Origin] = {}
    for name_node, value in _pairs(node):
        if not isinstance(name_node, yaml.ScalarNode) or not is_text(str(name_node.value)):
            layer.refuse(name_node, key=section, text="a key is one word")
            continue
        name = str(name_node.value)
        if name in first:
            key = f"{section}.{name}" if section else name
            layer.refuse(name_node, key=key, text=f"given twice, first in {first[name].source}")
            continue
        first[name] = layer.source.origin(name_node)
        yield name_node, value


def _read_key(
    name: yaml.Node, value: yaml.Node, layer: Layer, *, catalog: Catalog, key: str
) -> None:
    if "." in str(name.value) and (key in catalog.sections or key in catalog.rows):
        layer.refuse(name, key=key, text=f"keys are nested here: write `{_nested(key)}`")
    elif key in catalog.sections:
        _read_section(value, layer, catalog=catalog, section=key)
    elif key in catalog.rows:
        entry = _read_value(value, layer, key=key)
        if entry is not None:
            layer.entries[key] = entry
    elif key in ALIASES:
        entry = _read_value(value, layer, key=key)
        if entry is not None:
            layer.words[key] = entry
    else:
        layer.refuse(name, key=key, text=unknown_key(key, catalog))


def _read_value(node: yaml.Node, layer: Layer, *, key: str) -> Entry | None:
    items: dict[KeyPath, Origin] = {}
    before = len(layer.problems)
    value = _plain(node, layer, key=key, path=(), items=items)
    return Entry(value, layer.source.origin(node), items) if len(layer.problems) == before else None


def _plain(
    node: yaml.Node, layer: Layer, *, key: str, path: KeyPath, items: dict[KeyPath, Origin]
) -> object:
    """Return the plain value of a node; what it holds that has no value becomes a problem."""
    items[path] = layer.source.origin(node)
    if isinstance(node, yaml.ScalarNode):
        try:
            return scalar(node)
        except ConfigError as error:
            layer.refuse(node, key=key, text=str(error))
            return None
    if isinstance(node, yaml.SequenceNode):
        return [
            _plain(item, layer, key=f"{key}[{i}]", path=(*path, i), items=items)
            for i, item in enumerate(cast("list[yaml.Node]", node.value))
        ]
    mapping: dict[str, object] = {}
    for name_node, value in _named(node, layer, section=key):
        name = str(name_node.value)
        mapping[name] = _plain(value, layer, key=f"{key}.{name}", path=(*path, name), items=items)
    return mapping


def _pairs(node: yaml.Node) -> list[tuple[yaml.Node, yaml.Node]]:
    return cast("list[tuple[yaml.Node, yaml.Node]]", node.value)


def _nested(key: str) -> str:
    *sections, name = key.split(".")
    return "".join(f"{section}: {{" for section in sections) + f"{name}: ..." + "}" * len(sections)


def _not_a_section(node: yaml.Node, layer: Layer, *, section: str) -> str:
    origin = layer.source.origin(node)
    if isinstance(node, yaml.SequenceNode):
        got = f"the list {origin.shown}"
    elif node.tag.endswith(":null"):
        got = f"nothing{f' ({origin.shown})' if origin.shown else ''}"
    else:
        got = origin.shown
    if not section:
        return f"a config file is keys and values, `train: {{steps: 100}}`; got {got}"
    return f"a section needs keys below it; got {got}. Add keys, or remove it for the defaults"


def _written(node: yaml.Node) -> str:
    """Return a node that came from plain data, or from a dotted key, as a reader would write it."""
    if isinstance(node, yaml.ScalarNode):
        return str(node.value)
    if isinstance(node, yaml.SequenceNode):
        items = cast("list[yaml.Node]", node.value)
        return f"[{', '.join(_written(item) for item in items)}]"
    pairs = (f"{_written(name)}: {_written(value)}" for name, value in _pairs(node))
    return f"{{{', '.join(pairs)}}}"
