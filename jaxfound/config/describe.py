"""Every config key as a row of plain data: what it takes, its default, its meaning."""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxfound.config.run import RunConfig
from jaxfound.config.yaml_source import flow

REQUIRED = "required"

TYPES = {
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "null": "nothing",
}
LIMITS = {
    "exclusiveMinimum": "> {}",
    "minimum": ">= {}",
    "exclusiveMaximum": "< {}",
    "maximum": "<= {}",
    "minLength": "at least {} long",
    "pattern": "matching {}",
}


class Row(NamedTuple):
    """One config key.

    Attributes:
        key: dotted path; `[]` stands for any item of a list.
        type: what kind of value it takes, in words.
        default: the value when nothing is said, as YAML; `required` when there is none.
        unit: unit of the value, empty for words and pure numbers.
        range: limits of the value, empty when there are none.
        meaning: one clause.
        takes: type and range together, e.g. `whole number >= 1 or auto`.
        words: the words it takes, apart from other text and numbers.
    """

    key: str
    type: str
    default: str
    unit: str
    range: str
    meaning: str
    takes: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class Catalog:
    """The keys of RunConfig by dotted path, and the dotted paths of the groups they are in."""

    rows: Mapping[str, Row]
    sections: frozenset[str]

    def required(self, section: str) -> tuple[str, ...]:
        """Return the keys of a section and its sub-sections that have no default."""
        start = section + "."
        return tuple(
            key for key, row in self.rows.items() if key.startswith(start) and _is_asked(row)
        )

    def children(self, section: str) -> tuple[str, ...]:
        """Return the names directly under `section`; the empty string is the top of the file."""
        start = f"{section}." if section else ""
        below = [key[len(start) :] for key in self.rows if key.startswith(start)]
        return tuple(dict.fromkeys(key.split(".")[0] for key in below if "[]" not in key))


def _is_asked(row: Row) -> bool:
    return row.default == REQUIRED and "[]" not in row.key


def rows() -> tuple[Row, ...]:
    """Return a row for every key of RunConfig, in the order of its fields."""
    return tuple(catalog().rows.values())


@functools.cache
def catalog() -> Catalog:
    """Return the keys and sections of RunConfig."""
    schema = RunConfig.model_json_schema()
    found: dict[str, Row] = {}
    sections: set[str] = set()
    for item in _walk(schema, definitions=schema["$defs"], prefix="", defaults={}):
        if isinstance(item, Row):
            found[item.key] = item
        else:
            sections.add(item)
    return Catalog(found, frozenset(sections))


def _walk(
    section: Mapping[str, Any],
    *,
    definitions: Mapping[str, Any],
    prefix: str,
    defaults: Mapping[str, Any],
) -> Iterator[Row | str]:
    """Yield the rows below one section, and the dotted path of each section met.

    Args:
        section: its JSON schema.
        definitions: the schemas it refers to.
        prefix: dotted path of the section, with the last dot.
        defaults: what the section above gives instead of the fields' own defaults.
    """
    for name, field in section["properties"].items():
        key = prefix + name
        default = defaults.get(name, field.get("default"))
        inner = _definition(field, definitions)
        if inner is not None:
            yield key
            yield from _walk(
                inner, definitions=definitions, prefix=key + ".", defaults=default or {}
            )
            continue
        shown = REQUIRED if default is None else flow(default)
        yield _row(key, field, definitions=definitions, default=shown)
        item = _definition(field.get("items", {}), definitions)
        if item is not None:
            yield from _walk(item, definitions=definitions, prefix=key + "[].", defaults={})


def _definition(
    field: Mapping[str, Any], definitions: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    reference = field.get("$ref")
    return None if reference is None else definitions[reference.rsplit("/", 1)[1]]


def _row(
    key: str, field: Mapping[str, Any], *, definitions: Mapping[str, Any], default: str
) -> Row:
    variants: list[Mapping[str, Any]] = field.get("anyOf", [field])
    types = [_type(variant, definitions) for variant in variants]
    ranges = [", ".join(_limits(variant)) for variant in variants]
    return Row(
        key=key,
        type=" or ".join(types),
        default=default,
        unit=field["unit"],
        range=", ".join(limits for limits in ranges if limits),
        meaning=field["description"],
        takes=" or ".join(f"{t} {r}".strip() for t, r in zip(types, ranges, strict=True)),
        words=tuple(word for variant in variants for word in _words(variant)),
    )


def _type(field: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    if "const" in field:
        return str(field["const"])
    if "enum" in field:
        return "one of " + ", ".join(str(word) for word in field["enum"])
    if field["type"] == "array":
        section = _definition(field["items"], definitions)
        if section is not None:
            return f"list of {{{', '.join(section['properties'])}}}"
        return f"list of {_type(field['items'], definitions)}"
    return TYPES.get(field["type"], "text")


def _limits(field: Mapping[str, Any]) -> Iterator[str]:
    for name, words in LIMITS.items():
        limit = field.get(name)
        if limit is not None:
            yield words.format(int(limit) if limit in (0, 1) else limit)


def _words(field: Mapping[str, Any]) -> tuple[str, ...]:
    listed = field.get("enum", [field["const"]] if "const" in field else [])
    return tuple(str(word) for word in listed)
