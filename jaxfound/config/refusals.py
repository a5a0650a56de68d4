"""pydantic's errors as our own: the place, the key, what it takes, what it got, the way out."""

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from jaxfound.config.describe import Catalog, Row
from jaxfound.config.layers import Entry, KeyPath, Origin, Problem
from jaxfound.config.nearest import nearest_word, unknown_key

# Messages without a line come after all others.
LAST = 2**31


@dataclass(frozen=True)
class Given:
    """What was validated: the entry that won for each key, and the name of the whole."""

    entries: Mapping[str, Entry]
    place: str
    ranks: Mapping[str, int]
    catalog: Catalog
    presets: tuple[str, ...]

    def problem(self, origin: Origin | None, *, key: str, text: str) -> Problem:
        """Return a problem at `origin`, or about the whole when there is none."""
        if origin is None:
            return Problem((LAST, 0, 0), key, f"{self.place}: {key}: {text}")
        return Problem(self.order(origin), key, origin.message(key, text))

    def order(self, origin: Origin) -> tuple[int, int, int]:
        """Return what sorts places as a reader meets them: preset, file, command line."""
        return self.ranks.get(origin.place, 0), origin.line, origin.column


def translate(error: ValidationError, given: Given, *, refused: Set[str]) -> list[Problem]:
    """Return one problem for each key that pydantic refuses.

    Args:
        error: of RunConfig.
        given: what was validated.
        refused: keys already refused, and so left out of what was validated.
    """
    problems: dict[str, Problem] = {}
    for detail in error.errors(include_url=False):
        for problem in _problems(detail, given, refused=refused):
            # A union is refused once for each of its variants; the first says it all.
            problems.setdefault(problem.key, problem)
    return list(problems.values())


def _problems(detail: Mapping[str, Any], given: Given, *, refused: Set[str]) -> Iterator[Problem]:
    loc: KeyPath = detail["loc"]
    kind: str = detail["type"]
    if kind == "missing":
        yield from _missing(loc, given, refused=refused)
    elif kind == "value_error":
        # With a key left out, a check across keys would judge a default that nobody asked for.
        if not refused:
            yield _disagreement(loc, str(detail["ctx"]["error"]), given)
    else:
        yield _wrong_value(loc, kind, given)


def _missing(loc: KeyPath, given: Given, *, refused: Set[str]) -> Iterator[Problem]:
    key = ".".join(str(part) for part in loc)
    row_key = _row_key(loc)
    if row_key in given.catalog.sections:
        yield from _missing_section(key, given, refused=refused)
        return
    from_preset = "preset" in refused and key.startswith("model.")
    if from_preset or any(key == one or key.startswith(one + ".") for one in refused):
        return
    row = given.catalog.rows[row_key]
    origin = None
    if "[]" in row_key:
        key, origin = _place(loc, given)
    yield given.problem(origin, key=key, text=f"missing; takes {row.takes}: {row.meaning}")


def _missing_section(key: str, given: Given, *, refused: Set[str]) -> Iterator[Problem]:
    if key in refused or (key == "model" and "preset" in refused):
        return
    asked = [one for one in given.catalog.required(key) if one not in refused]
    if not asked:
        return
    preset = f"name a preset ({', '.join(given.presets)}), or " if key == "model" else ""
    yield given.problem(None, key=key, text=f"missing; {preset}give {', '.join(asked)}")


def _disagreement(loc: KeyPath, text: str, given: Given) -> Problem:
    """Return the problem of keys that do not fit together, at the last of them that was given."""
    section = ".".join(str(part) for part in loc)
    prefix = section + "." if section else ""
    named = [prefix + name.strip(".") for name in re.findall(r"[a-z][a-z0-9_.]*", text)]
    origins = [given.entries[name].origin for name in named if name in given.entries]
    origin = max(origins, key=given.order, default=None)
    if origin is None or origin.kind == "preset":
        origin = Origin("mapping", given.place)
    return given.problem(origin, key=section, text=text)


def _wrong_value(loc: KeyPath, kind: str, given: Given) -> Problem:
    row = _row(loc, given.catalog)
    if row is None or kind == "extra_forbidden":
        key, origin = _place(loc, given)
        return given.problem(origin, key=key, text=unknown_key(_row_key(loc), given.catalog))
    depth = row.key.count(".") + row.key.count("[]") + 1
    takes = row.takes
    while depth < len(loc) and isinstance(loc[depth], int):
        depth, takes = depth + 1, takes.removeprefix("list of ")
    key, origin = _place(loc[:depth], given)
    value = _value(loc[:depth], given)
    got = _got(value, origin.shown if origin else "")
    return given.problem(
        origin, key=key, text=f"takes {takes}; got {got}{_hint(value, row, origin=origin)}"
    )


def _row_key(loc: KeyPath) -> str:
    """Return the key of a row: `precision.rules[].format` for (precision, rules, 0, format)."""
    return re.sub(r"\.\[\]", "[]", ".".join("[]" if isinstance(p, int) else p for p in loc))


def _row(loc: KeyPath, catalog: Catalog) -> Row | None:
    """Return the row of the longest start of `loc`; pydantic adds a union's variants to its end."""
    for end in range(len(loc), 0, -1):
        row = catalog.rows.get(_row_key(loc[:end]))
        if row is not None:
            return row
    return None


def _place(loc: KeyPath, given: Given) -> tuple[str, Origin | None]:
    """Return the key as a reader writes it, and the nearest place known for it."""
    key = ".".join(f"[{p}]" if isinstance(p, int) else p for p in loc).replace(".[", "[")
    for end in range(len(loc), 0, -1):
        entry = given.entries.get(".".join(str(part) for part in loc[:end]))
        if entry is None:
            continue
        inside = loc[end:]
        starts = (inside[:stop] for stop in range(len(inside), -1, -1))
        return key, next((entry.items[s] for s in starts if s in entry.items), entry.origin)
    return key, None


def _value(loc: KeyPath, given: Given) -> object:
    for end in range(len(loc), 0, -1):
        entry = given.entries.get(".".join(str(part) for part in loc[:end]))
        if entry is not None:
            value: Any = entry.value
            for part in loc[end:]:
                value = value[part]
            return value
    return None


def _got(value: object, shown: str) -> str:
    if value is None:
        return f"nothing ({shown})" if shown else "nothing"
    if isinstance(value, bool):
        return f"the boolean {shown}"
    if isinstance(value, str):
        return f"the text {shown}" if shown.strip("\"'") != shown else f"the word {shown}"
    return shown


def _hint(value: object, row: Row, *, origin: Origin | None) -> str:
    takes_text = "text" in row.type
    if value is None:
        default = f" for the default {row.default}" if row.default != "required" else ""
        return f". Give a value, or remove the key{default}"
    if isinstance(value, (bool, int, float)) and takes_text:
        if origin is not None and origin.kind == "command line":
            return f". Quote it if it is text: '\"{origin.shown}\"'"
        return ". Quote it if it is text"
    if isinstance(value, str) and row.words:
        return nearest_word(value, row.words)
    if isinstance(value, str) and not takes_text and _reads_as_other(value):
        return ". Remove the quotes"
    return ""


def _reads_as_other(text: str) -> bool:
    """True when the text, unquoted, is a number or a boolean."""
    return bool(re.fullmatch(r"[-+]?[0-9.]+([eE][-+]?[0-9]+)?|(?i:true|false|yes|no|on|off)", text))
