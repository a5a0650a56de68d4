"""The keys of one config.json, each read once and with its type; what nobody reads is known."""

from collections.abc import Mapping, Sequence

from jaxfound.models.weights.errors import WeightsError

# How a message calls what a key may hold.
KINDS: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false",
                          str: "text"}  # fmt: skip


class Keys:
    """Reads an object of a config.json.

    Args:
        values: the object.
        place: what messages call it.
    """

    def __init__(self, values: Mapping[str, object], *, place: str) -> None:
        self._values = values
        self.place = place
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def raw(self, key: str) -> object:
        """Return the value as JSON gave it, None when it is absent."""
        self._read.add(key)
        return self._values.get(key)

    def take[T: (int, float, bool, str)](
        self, key: str, kind: type[T], default: T | None = None
    ) -> T:
        """Return the value of `key`, or `default` when it is absent or null.

        Raises:
            WeightsError: if it is of another kind, or absent without a default.
        """
        value = self.raw(key)
        if value is None:
            if default is None:
                raise WeightsError(f"{self.place}: {key} is missing; it takes {KINDS[kind]}")
            return default
        # JSON writes 10000 for 10000.0, and true is an int to Python.
        if kind is float and type(value) is int:
            return kind(value)
        if type(value) is not kind:
            raise WeightsError(f"{self.place}: {key} takes {KINDS[kind]}; got {value!r}")
        return value

    def word(self, key: str, words: Sequence[str], *, default: str) -> str:
        """Return the value of `key`, one of `words`; refused by name otherwise."""
        value = self.take(key, str, default)
        if value not in words:
            raise WeightsError(
                f"{self.place}: {key}={value!r} is not known here; known are {', '.join(words)}"
            )
        return value

    def must_be(self, key: str, allowed: Sequence[object], why: str) -> None:
        """Refuse a value that would change the numbers in a way that no model of ours computes."""
        value = self.raw(key)
        if value is not None and not any(_same(value, one) for one in allowed):
            usual = " or ".join(repr(one) for one in allowed) if allowed else "absent"
            raise WeightsError(f"{self.place}: {key}={value!r} is not supported ({why}); "
                               f"only {usual}")  # fmt: skip

    def unread(self) -> list[str]:
        """Return the keys that nobody asked for, in the order of the file."""
        return [key for key in self._values if key not in self._read]


def _same(value: object, other: object) -> bool:
    """Equal, and of one kind: 1 is not true."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
