"""Reading a JSON object field by field, each error naming the field. Whatever nobody asked for is refused."""

from typing import Any

from wire.errors import InvalidArgument


class JsonFields:
    """The fields of one object; each may be taken once. A field that is null counts as absent."""

    def __init__(self, values: dict[str, Any], path: str = "") -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        self._path = path

    def take(self, name: str) -> Any:
        """Any value, None if absent."""
        return self._values.pop(name, None)

    def integer(self, name: str) -> int | None:
        value = self.take(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self.wrong(name, "must be an integer")
        return value

    def number(self, name: str) -> float | None:
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "must be a number")
        try:
            return float(value)
        except OverflowError:
            raise self.wrong(name, "is too large for a number") from None

    def boolean(self, name: str) -> bool:
        """False if absent."""
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "must be true or false")
        return bool(value)

    def text(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "must be a string")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """() if absent."""
        value = self.take(name)
        if value is not None and not is_integers(value):
            raise self.wrong(name, "must be a list of integers")
        return tuple(value or ())

    def drop(self, names: frozenset[str]) -> None:
        """Accept and forget fields that change nothing here."""
        for name in names:
            self._values.pop(name, None)

    def only_neutral(self, neutral: dict[str, tuple[Any, ...]]) -> None:
        """Refuse features that are not served, unless the value asks for nothing."""
        for name, values in neutral.items():
            value = self.take(name)
            # 1 == True in Python: the types must agree as well, numbers among themselves aside.
            if value is not None and not any(
                value == v and isinstance(value, bool) == isinstance(v, bool) for v in values
            ):
                raise self.wrong(name, "is not supported by this server; leave it out")

    def end(self) -> None:
        """Refuse whatever is left."""
        for name in self._values:
            raise self.wrong(name, "is not a field this server knows; leave it out")

    def wrong(self, name: str, message: str) -> InvalidArgument:
        """The error about field `name`."""
        return InvalidArgument(f"{self._path}{name}", message)


def is_integers(value: Any) -> bool:
    """Whether `value` is a list of integers (true and false are none)."""
    return isinstance(value, list) and all(type(item) is int for item in value)
