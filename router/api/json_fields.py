"""Reads a JSON object field by field; each error names the field."""

import re
from collections.abc import Mapping
from typing import Any

from router.api.unserved_fields import Unserved
from tandem.protocol.errors import InvalidArgument

_NAMES_MAX = 16
_NAME_CHARS = 64
_UNSAFE = re.compile(r"[^\w.\[\]-]", re.ASCII)
_NUMBERED = re.compile(r"\[\d+\]")


class UnknownFields:
    """Handles unknown fields: `strict` rejects them, otherwise their names are recorded.

    At most 16 names are kept, each cut at 64 characters; question marks replace characters that a header cannot hold,
    and an empty name.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self._names: dict[str, None] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the ignored fields, each once."""
        return tuple(self._names)

    def ignore(self, name: str) -> None:
        """Record an unknown field; `name` includes its path."""
        if len(self._names) < _NAMES_MAX:
            self._names[_UNSAFE.sub("?", _NUMBERED.sub("[]", name[:_NAME_CHARS])) or "?"] = None


class JsonFields:
    """The fields of one object; each may be taken once. A field that is null counts as absent."""

    def __init__(self, values: dict[str, Any], unknown: UnknownFields, path: str = "") -> None:
        """`unknown` handles the fields that are left at the `end`; `path` is the prefix of each name."""
        self._values = {name: value for name, value in values.items() if value is not None}
        self._unknown = unknown
        self._path = path

    def within(self, values: dict[str, Any], path: str) -> "JsonFields":
        """Return the fields of a nested object, with the same handling of unknown fields."""
        return JsonFields(values, self._unknown, path)

    def take(self, name: str) -> Any:
        """Remove and return any value, None if absent."""
        return self._values.pop(name, None)

    def integer(self, name: str) -> int | None:
        """Remove and return an integer, None if absent."""
        value = self.take(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self.wrong(name, "must be an integer")
        return value

    def number(self, name: str) -> float | None:
        """Remove and return a number, None if absent."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "must be a number")
        try:
            return float(value)
        except OverflowError:
            raise self.wrong(name, "is too large for a number") from None

    def boolean(self, name: str, *, absent: bool = False) -> bool:
        """Remove and return a boolean, `absent` if it is absent or null."""
        value = self.boolean_or_none(name)
        return absent if value is None else value

    def boolean_or_none(self, name: str) -> bool | None:
        """Remove and return a boolean, None if absent."""
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "must be true or false")
        return value

    def text(self, name: str) -> str | None:
        """Remove and return a string, None if absent."""
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "must be a string")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """Remove and return a list of integers, () if absent."""
        value = self.take(name)
        if value is not None and not is_integers(value):
            raise self.wrong(name, "must be a list of integers")
        return tuple(value or ())

    def object(self, name: str) -> dict[str, Any]:
        """Remove and return an object, {} if absent."""
        value = self.take(name)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(name, "must be an object")
        return value or {}

    def drop(self, names: frozenset[str]) -> None:
        """Accept and ignore fields that have no effect."""
        for name in names:
            self._values.pop(name, None)

    def refuse(self, table: Mapping[str, Unserved]) -> None:
        """Reject fields that are not supported, unless their value has no effect."""
        for name in list(self._values):
            if (rule := table.get(name)) is not None and not rule.asks_nothing(self.take(name)):
                raise self.wrong(name[:_NAME_CHARS], f"is not supported by this server ({rule.reason}); leave it out")

    def end(self) -> None:
        """Ignore or reject all fields that are left."""
        for name in self._values:
            if self._unknown.strict:
                raise self.wrong(name[:_NAME_CHARS], "is not a field this server knows; leave it out")
            self._unknown.ignore(f"{self._path}{name}")

    @property
    def ignored(self) -> tuple[str, ...]:
        """The names of the ignored fields, of nested objects too."""
        return self._unknown.names

    def wrong(self, name: str, message: str) -> InvalidArgument:
        """Return the error about field `name`."""
        return InvalidArgument(f"{self._path}{name}", message)


def is_integers(value: Any) -> bool:
    """Return True if `value` is a list of integers; booleans do not count."""
    return isinstance(value, list) and all(type(item) is int for item in value)
