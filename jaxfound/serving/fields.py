"""The fields of a request's body, each with its type and its range."""

from collections.abc import Iterable, Mapping

from jaxfound.config.nearest import nearest_word
from jaxfound.serving.api_error import ApiError, bad
from jaxfound.serving.json_body import name_of

# A value is repeated in a message up to this many characters.
SHOWN = 60


class Fields:
    """Reads fields of an object one by one, and knows in the end which were not read.

    null is the same as a field that is not there. Every reader raises ApiError (400), naming the
    field, its value and the rule.

    Args:
        body: the object.
        prefix: where it stands in the whole body, e.g. `stream_options.`.
    """

    def __init__(self, body: Mapping[str, object], *, prefix: str = "") -> None:
        self._body = body
        self._prefix = prefix
        self._read: set[str] = set()

    def take(self, name: str) -> object:
        """Return a field as it is, None without it."""
        self._read.add(name)
        return self._body.get(name)

    def integer(
        self, name: str, default: int | None, *, low: int, high: int | None = None
    ) -> int | None:
        """Return a whole number in low … high."""
        value = self.take(name)
        if value is None:
            return default
        rule = f"an integer, {low} or more" if high is None else f"an integer from {low} to {high}"
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.wrong(name, value, rule, wrong_type=True)
        if value < low or (high is not None and value > high):
            raise self.wrong(name, value, rule)
        return value

    def number(
        self, name: str, default: float, *, low: float, high: float, above: bool = False
    ) -> float:
        """Return a number in low … high; `above`: low itself is outside."""
        value = self.take(name)
        if value is None:
            return default
        rule = f"a number {f'above {low:g}, up' if above else f'from {low:g}'} to {high:g}"
        return self.as_number(name, value, rule, low=low, high=high, above=above)

    def as_number(
        self,
        name: str,
        value: object,
        rule: str,
        *,
        low: float,
        high: float,
        above: bool = False,
    ) -> float:
        """Return `value` as a number in low … high."""
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.wrong(name, value, rule, wrong_type=True)
        # Written so that NaN, for which every comparison is false, is outside.
        if not (low < value <= high if above else low <= value <= high):
            raise self.wrong(name, value, rule)
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return true or false."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false", wrong_type=True)
        return value

    def text(self, name: str, default: str | None = None) -> str | None:
        """Return a text."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(name, value, "a text", wrong_type=True)
        return value

    def inner(self, name: str) -> "Fields | None":
        """Return the reader of an object in a field."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, value, "an object", wrong_type=True)
        return Fields(value, prefix=f"{self._prefix}{name}.")

    def check_all_read(self, known: Iterable[str] = ()) -> None:
        """No field is left over; names the first, and the nearest of those that were asked for."""
        left = [name for name in self._body if name not in self._read]
        if left:
            near = nearest_word(left[0], sorted({*self._read, *known}))
            raise bad(
                f"{self._prefix}{left[0][:SHOWN]} is not a field of this request{near}",
                param=f"{self._prefix}{left[0]}",
                code="unknown_field",
            )

    def wrong(self, name: str, value: object, rule: str, *, wrong_type: bool = False) -> ApiError:
        """Return the refusal of a field's value."""
        simple = isinstance(value, str | float | bool) or (
            isinstance(value, int) and abs(value) < 10**SHOWN
        )
        shown = f"{value!r}"[:SHOWN] if simple else name_of(value)
        return bad(
            f"{self._prefix}{name} is {shown}; it must be {rule}",
            param=f"{self._prefix}{name}",
            code="invalid_type" if wrong_type else "invalid_value",
        )
