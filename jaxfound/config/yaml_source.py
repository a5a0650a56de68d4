"""YAML text to nodes that know their place, and values back to text that reads the same.

Numbers follow YAML 1.2 (`1e-4` is a number), booleans also accept on/off/yes/no, and a word that
two YAML versions read differently (`010`) is refused. An exponent form without a fraction is a
whole number (`1e3` is 1000). Anchors, aliases, tags and merge keys are refused by name.
"""

import io
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import yaml
import yaml.representer
from yaml.reader import ReaderError

from jaxfound.config.schema import ConfigError

TAG = "tag:yaml.org,2002:"
MAX_DEPTH = 16
MAX_INT = 2**63 - 1
# float64 holds every whole number up to here.
MAX_EXACT = 2**53

LEADING_ZERO = "!leading-zero"
# The first pattern that matches a whole plain word names its kind; no match = text.
PATTERNS: tuple[tuple[str, str], ...] = (
    (TAG + "null", r"~|null|Null|NULL|"),
    (
        TAG + "bool",
        "|".join(
            form(word)
            for word in ("true", "false", "yes", "no", "on", "off")
            for form in (str.lower, str.title, str.upper)
        ),
    ),
    (LEADING_ZERO, r"[-+]?0[0-9_]+(\.[0-9]*)?([eE][-+]?[0-9]+)?"),
    (TAG + "int", r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)|0o[0-7]+|0x[0-9a-fA-F]+"),
    (TAG + "float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"),
    (TAG + "float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
)
_RESOLVERS = {None: [(tag, re.compile(rf"(?:{pattern})\Z")) for tag, pattern in PATTERNS]}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar[Any] = _RESOLVERS


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: ClassVar[Any] = _RESOLVERS


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Double quotes keep a line break or an invisible character on one line, as an escape.
    return yaml.ScalarNode(TAG + "str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(tuple, yaml.SafeDumper.represent_list)


# PyYAML's functions carry no parameter types.
_events = cast("Callable[..., Iterable[yaml.Event]]", yaml.parse)  # pyright: ignore[reportUnknownMemberType]
_compose = cast("Callable[..., yaml.Node | None]", yaml.compose)  # pyright: ignore[reportUnknownMemberType]
_dump = cast("Callable[..., str]", yaml.dump)


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file; ConfigError when it cannot be read or is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        byte = error.object[error.start]
        raise ConfigError(
            f"{path}:{line}: byte 0x{byte:02x} is not UTF-8 text. Save the file as UTF-8"
        ) from error


def compose(text: str, *, place: str, numbered: bool = True) -> yaml.Node | None:
    """Return the one YAML document in `text` as nodes, None when there is nothing in it.

    Args:
        text: the document.
        place: the file's name, or what stands for it in a message.
        numbered: say the line in a message.
    Raises:
        ConfigError: if the text is not YAML, or uses an anchor, alias or tag.
    """
    try:
        _check_events(_events(text, Loader=_Loader))
        return _compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        reason = _reason(error, text, line=line)
    except ReaderError as error:
        at = int(error.position)
        line = text.count("\n", 0, at) + 1
        reason = f"the character U+{ord(text[at]):04X} is not allowed in YAML"
    raise ConfigError(f"{place}:{line}: {reason}" if numbered else f"{place}: {reason}")


def _check_events(events: Iterable[yaml.Event]) -> None:
    depth = 0
    for event in events:
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise _marked(event, f"more than {MAX_DEPTH} levels of nesting")
        if isinstance(event, yaml.NodeEvent) and event.anchor is not None:
            sign = "*" if isinstance(event, yaml.AliasEvent) else "&"
            raise _marked(
                event, f"{sign}{event.anchor}: anchors and aliases are not read; write the value"
            )
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise _marked(event, f"the tag {tag} is not read; write the value alone")


def _marked(event: yaml.Event, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


def _reason(error: yaml.MarkedYAMLError, text: str, *, line: int) -> str:
    lines = text.splitlines()
    source = lines[line - 1] if line <= len(lines) else ""
    shown = f"`{brief(source)}`: " if source.strip() else ""
    indent = source[: len(source) - len(source.lstrip())]
    if "\t" in indent and "\\t" in (error.problem or ""):
        return f"{shown}a tab indents this line. Indent with spaces"
    said = [part for part in (error.context, error.problem) if part]
    return f"{shown}not YAML: {', '.join(said)}"


def brief(text: str) -> str:
    """Return `text` on one line of at most 60 characters."""
    flat = " ".join(text.split())
    return flat if len(flat) <= 60 else flat[:57] + "..."


def to_node(data: Mapping[str, object]) -> yaml.Node:
    """Return plain data as nodes without a place; ConfigError for what YAML has no word for."""
    try:
        dumper = _Dumper(io.StringIO(), sort_keys=False)
        return dumper.represent_data(dict(data))  # pyright: ignore[reportUnknownMemberType]
    except yaml.representer.RepresenterError as error:
        kind = type(error.args[-1]).__name__
        raise ConfigError(f"a config holds words, numbers, lists and mappings; got {kind}") from (
            error
        )


def scalar(node: yaml.ScalarNode) -> str | int | float | bool | None:
    """Return the value of one word, number or boolean.

    Raises:
        ConfigError: for NaN, infinity, a leading zero, a number that would change its value.
    """
    text = cast(str, node.value)
    if node.tag == TAG + "null":
        return None
    if node.tag == TAG + "bool":
        return text.lower() in ("true", "yes", "on")
    if node.tag == TAG + "int":
        return _whole(text)
    if node.tag == TAG + "float":
        return _number(text)
    if node.tag == LEADING_ZERO:
        raise ConfigError(
            f"{text} starts with a zero, which YAML 1.1 reads as octal and YAML 1.2 as decimal. "
            "Drop the zero, or quote the value if it is text"
        )
    if not is_text(text):
        raise ConfigError("half of a surrogate pair is not a character")
    return text


def is_text(text: str) -> bool:
    """True when UTF-8 and JSON can hold the text: no half of a surrogate pair, as in "\\ud800"."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _whole(text: str) -> int:
    digits = text.replace("_", "")
    value = int(digits, 0) if len(digits) <= 20 else MAX_INT + 1
    if abs(value) > MAX_INT:
        raise ConfigError(f"{brief(text)} does not fit into 64 bits")
    return value


def _number(text: str) -> float | int:
    value = float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    if not math.isfinite(value):
        raise ConfigError(f"{brief(text)} is not a finite number of 64 bits")
    mantissa = re.split("[eE]", text)[0]
    if value == 0 and re.search("[1-9]", mantissa):
        raise ConfigError(f"{brief(text)} is nearer to zero than 64 bits can say")
    exponent_form = mantissa != text
    if exponent_form and value.is_integer() and abs(value) <= MAX_EXACT:
        return int(value)
    return value


def flow(value: object) -> str:
    """Return a value as YAML on one line that `compose` and `scalar` read back equal."""
    text = _dump(
        value,
        Dumper=_Dumper,
        default_flow_style=True,
        width=sys.maxsize,
        allow_unicode=True,
        sort_keys=False,
    )
    return text.removesuffix("\n").removesuffix("\n...")
