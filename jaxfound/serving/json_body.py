"""Strict JSON: what two readers could understand differently is refused."""

import json
import math
from collections.abc import Iterable
from typing import NoReturn

from jaxfound.serving.api_error import ApiError, bad

# Deeper than any request; far from where Python's reader gives up.
MAX_DEPTH = 32
CODE = "invalid_json"


def read_object(raw: bytes) -> dict[str, object]:
    """Return the JSON object in a body.

    Raises:
        ApiError: 400 if it is not UTF-8, not JSON, no object, holds a key twice, NaN, infinity, a
            number beyond them, half of a surrogate pair, or is nested deeper than 32 levels.
    """
    try:
        value = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_no_number,
            parse_float=_finite,
        )
    except UnicodeDecodeError as err:
        raise bad(
            f"the body is not UTF-8: byte {err.start} is {raw[err.start]:#04x}. Send JSON as UTF-8",
            code=CODE,
        ) from err
    except RecursionError as err:
        raise _too_deep() from err
    # An integer of more digits than Python converts is a ValueError too.
    except ValueError as err:
        raise bad(f"the body is not JSON: {err}", code=CODE) from err
    if not isinstance(value, dict):
        raise bad(f"the body is {name_of(value)}; it must be a JSON object", code=CODE)
    _check_values(value)
    return value


def name_of(value: object) -> str:
    """Return what JSON calls a value, with its article."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "a text"}
    return names.get(type(value), "a list" if isinstance(value, list) else "an object")


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise bad(f"the key {twice!r} stands twice in one object", param=twice, code=CODE)
    return found


def _no_number(word: str) -> NoReturn:
    raise bad(f"{word} is not JSON: numbers are finite", code=CODE)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise bad(f"the number {text[:40]} is too large: 1e308 is the largest", code=CODE)
    return value


def _too_deep() -> ApiError:
    return bad(f"the body is nested deeper than {MAX_DEPTH} levels", code=CODE)


def _check_values(value: dict[str, object]) -> None:
    """Every text can be written as UTF-8, and nothing is nested too deep."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        inner: list[object] = []
        for each in level:
            if isinstance(each, str):
                _check_text(each)
            elif isinstance(each, dict):
                inner += [*each, *each.values()]
            elif isinstance(each, list):
                inner += _to_check(each)
        if not inner:
            return
        level = inner
    raise _too_deep()


def _to_check(values: list[object]) -> Iterable[object]:
    # Lists of token ids are long and hold nothing to look into.
    return [each for each in values if not isinstance(each, int | float)]


def _check_text(text: str) -> None:
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise bad("a text holds half of a surrogate pair, which is no character", code=CODE)
