"""The base of every config section: frozen, strict, and described field by field."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

MiB = 1024 * 1024


class ConfigError(ValueError):
    """A config that cannot be run: names the key, its value, the rule and the way out."""


class Section(BaseModel):
    """A frozen group of config keys; unknown keys, wrong types, NaN and infinity are refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True
    )


def key(default: Any, meaning: str, *, unit: str = "", **limits: Any) -> Any:
    """Declare one config key: its default, what it means, its unit and its range.

    Args:
        default: the value when the user says nothing; `...` makes the key required.
        meaning: one clause for `jaxfound config`.
        unit: the unit of the value, empty for words and pure numbers.
        limits: pydantic's bounds (`gt`, `ge`, `lt`, `le`, `min_length` …).
    """
    return Field(default, description=meaning, json_schema_extra={"unit": unit}, **limits)
