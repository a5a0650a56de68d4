"""One JSON object a line: how this room writes numbers that JSON has no word for."""

import json
import math
from collections.abc import Mapping
from typing import Protocol, cast, runtime_checkable

# What a float that JSON cannot write becomes; Python's float() reads these words back.
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@runtime_checkable
class Scalar(Protocol):
    """A number of another library that is already on the host, e.g. `numpy.float32`."""

    def item(self) -> object:
        """Return the number as Python's own."""
        ...


def to_line(record: Mapping[str, object]) -> str:
    """Return `record` as one line of strict JSON, line end included.

    NaN and infinities become the words of `NON_FINITE`.

    Raises:
        TypeError: if a value is neither plain data nor a scalar that is on the host.
    """
    return json.dumps(to_plain(record), allow_nan=False, ensure_ascii=False) + "\n"


def to_plain(value: object) -> object:
    """Return `value` as text, numbers, lists and dicts that strict JSON can hold."""
    match value:
        case None | str() | bool() | int():
            return value
        case float():
            return float(value) if math.isfinite(value) else _word(value)
        case Mapping():
            items = cast(Mapping[object, object], value).items()
            return {str(name): to_plain(item) for name, item in items}
        case list() | tuple():
            return [to_plain(item) for item in cast(list[object], value)]
        case Scalar() if not hasattr(value, "is_fully_addressable"):
            return to_plain(value.item())
        case _:
            raise TypeError(
                f"{type(value).__name__} cannot be written to a line of JSON: pass text, numbers, "
                "lists and dicts. An array is on a device: fetch it once, at a place that may wait"
            )


def from_plain(value: object) -> object:
    """Return `value` with the words of `NON_FINITE` as floats again."""
    if isinstance(value, str):
        return NON_FINITE.get(value, value)
    if isinstance(value, dict):
        items = cast(dict[str, object], value).items()
        return {name: from_plain(item) for name, item in items}
    if isinstance(value, list):
        return [from_plain(item) for item in cast(list[object], value)]
    return value


def _word(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
