"""Request bodies as pydantic models: their base class, and the one reader that turns bytes into a model.

Unknown fields are handled by the reader instead of pydantic, so that a client gets a reason for each rejected field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, FailFast, Tag, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from router.api.unserved_fields import Unserved
from tandem.protocol.errors import InvalidArgument

_B = TypeVar("_B", bound="Body")
_NAMES_MAX = 16
_NAME_CHARS = 64
_UNSAFE = re.compile(r"[^\w.\[\]-]", re.ASCII)
_NUMBERED = re.compile(r"\[\d+\]")
TEXT, ITEMS = "<text>", "<items>"
"""The discriminator tags of a field that is a string or a list: `TEXT` for the string, `ITEMS` for the list.

The brackets distinguish the tags from field names in pydantic's errors.
"""
_PROBLEMS = {
    "missing": "is missing",
    "string_type": "must be a string",
    "string_unicode": "must be Unicode text",
    "bool_type": "must be true or false",
    "int_type": "must be an integer",
    "float_type": "must be a number of at most 64 bits",
    "string_too_short": "is empty",
    "too_short": "is empty",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
}


class UnknownFields:
    """Records the unknown fields of one body; with `strict` they are rejected instead.

    At most 16 names are kept, each cut to 64 characters. Characters that are not allowed in a header are replaced by
    question marks; an empty name becomes a question mark.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self._names: dict[str, None] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the ignored fields, without duplicates."""
        return tuple(self._names)

    def ignore(self, name: str) -> None:
        """Record an unknown field; `name` includes its path."""
        if len(self._names) < _NAMES_MAX:
            self._names[_UNSAFE.sub("?", _NUMBERED.sub("[]", name[:_NAME_CHARS])) or "?"] = None


class Body(BaseModel):
    """The base of all objects in a request body; null counts as absent for each field that has a default.

    Types are strict, so that a number is not accepted as a string. `read_body` handles fields that the class does not
    define.
    """

    model_config = ConfigDict(strict=True, protected_namespaces=())

    refused: ClassVar[Mapping[str, Unserved]] = {}
    """The fields that this server does not implement, by name; values that would have an effect are rejected."""
    inert: ClassVar[frozenset[str]] = frozenset()
    """The fields that have no effect on this server; they are accepted and ignored silently."""
    lenient: ClassVar[bool] = False
    """True if all fields that this class does not define are ignored silently."""


def read_body(kind: type[_B], data: bytes, unknown: UnknownFields) -> _B:
    """Parse and validate a JSON body. Raises InvalidArgument, which names the first invalid field."""
    return read_object(kind, parse_object(data), unknown)


def parse_object(data: bytes) -> dict[str, Any]:
    """Return the object of a JSON body. Raises InvalidArgument if the body is not a JSON object."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("body", f"is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise InvalidArgument("body", "must be a JSON object")
    return value


def read_object(kind: type[_B], value: Mapping[str, Any], unknown: UnknownFields, path: str = "") -> _B:
    """Validate an object of a body; `path` is the prefix of its fields' names in errors.

    `unknown` records or rejects unknown fields. Raises InvalidArgument for an invalid field, and for an unsupported
    field whose value would change the answer.
    """
    try:
        body = kind.model_validate(value)
    except ValidationError as error:
        raise _named(error.errors(include_url=False, include_input=False)[0], path) from None
    _sort_unknown(body, value, unknown, path)
    return body


def _sort_unknown(body: Body, value: Mapping[str, Any], unknown: UnknownFields, path: str) -> None:
    """Record, ignore or reject the fields that the model lacks; `body` was made from the JSON object `value`."""
    names, nesting = _fields(type(body))
    if not value.keys() <= names and not body.lenient:
        for name in value:
            if name not in names:
                _sort(body, name, value[name], unknown, path)
    for name in nesting:
        inner = getattr(body, name)
        if isinstance(inner, Body):
            _sort_unknown(inner, value[name], unknown, f"{path}{name}.")
        elif isinstance(inner, list):
            for number, item in enumerate(inner):
                if isinstance(item, Body):
                    _sort_unknown(item, value[name][number], unknown, f"{path}{name}[{number}].")


def _sort(body: Body, name: str, value: Any, unknown: UnknownFields, path: str) -> None:
    if value is None or name in body.inert:
        return
    field = f"{path}{name[:_NAME_CHARS]}"
    if (rule := body.refused.get(name)) is not None:
        if not rule.asks_nothing(value):
            raise InvalidArgument(field, f"is not supported by this server ({rule.reason}); leave it out")
    elif unknown.strict:
        raise InvalidArgument(field, "is not a field this server knows; leave it out")
    else:
        unknown.ignore(f"{path}{name}")


@cache
def _fields(kind: type[Body]) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the names of a model's fields, and the names of those fields whose values may contain other models.

    Fields with nested models must have no alias.
    """
    fields = kind.model_fields
    nesting = tuple(name for name, field in fields.items() if _has_names(field.annotation))
    return frozenset(field.alias or name for name, field in fields.items()), nesting


def _has_names(annotation: Any) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, Body):
        return not annotation.lenient or bool(_fields(annotation)[1])
    return any(map(_has_names, get_args(annotation)))


def _named(error: ErrorDetails, path: str) -> InvalidArgument:
    """Turn a pydantic error into an InvalidArgument that names the client's field, without discriminator tags."""
    # The type of an error that a Python validator raises may end with a colon and the wrong place within the value.
    kind, _, within = error["type"].partition(":")
    name = ""
    for part in error["loc"]:
        if isinstance(part, int):
            name += f"[{part}]"
        elif not part.startswith("<"):
            name += f".{part}" if name else part
    name += within
    problem = _PROBLEMS.get(kind) or error["msg"].replace("Input should", "must", 1)
    if kind == "literal_error":
        problem = f"must be {error['ctx']['expected']}; nothing else is supported"
    return InvalidArgument(f"{path}{name}" or "body", problem)


# ---- the types of fields that several APIs have ----
# A Python function and not pydantic itself chooses between alternatives: pydantic validates a body in one call that
# holds the GIL, and other threads can run only while it calls Python.


def by_type(tags: Mapping[str, str], served: str, *, absent: str = "", other: str = "") -> Discriminator:
    """Return a discriminator of objects by their field `type`; `tags` maps the values of the field to tags.

    `served` lists the supported values in the error message. `absent` is the tag of an object without a type, and
    `other` the tag of an object with an unlisted type; with "" such an object is an error.
    """

    def tag(value: Any) -> str | None:
        if not isinstance(value, dict):
            return None
        kind = value.get("type")
        if kind is None:
            return absent or None
        return tags.get(kind, other or None) if isinstance(kind, str) else None

    return choice(tag, f"must be an object of type {served}; other types are not supported")


def choice(tag: Callable[[Any], str | None], problem: str, *, field: str = "") -> Discriminator:
    """Return a pydantic discriminator; `tag` returns the tag of a value, or None if the value is not valid.

    The error for an invalid value has the message `problem`, and names the field `field` inside the value unless
    `field` is "".
    """
    return Discriminator(tag, custom_error_type=f"choice:.{field}" if field else "choice", custom_error_message=problem)


def text_or_items(value: Any) -> str | None:
    """Return the tag of a value: `TEXT` for a string, `ITEMS` for a list, None for another type."""
    return TEXT if isinstance(value, str) else ITEMS if isinstance(value, list) else None


TEXT_OR_ITEMS = choice(text_or_items, "must be a string or a list of objects")
"""The discriminator between `Text` and a list with the tag `ITEMS`."""
Text = Annotated[str, Tag(TEXT)]


class _FirstError(FailFast):
    """pydantic's `FailFast` with a hash, which pydantic needs where a field has alternatives."""

    __hash__ = object.__hash__


LIST = _FirstError()
"""A marker that stops the validation of a list at its first invalid entry, which limits the errors of a body."""


def list_of(kind: type, problem: str) -> BeforeValidator:
    """Return a validator of a list whose entries all have type `kind`; its error names the list, not the entry."""

    def check(value: Any) -> Any:
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise PydanticCustomError("list_of", problem)
        return value

    return BeforeValidator(check)


Strings = Annotated[list[str], list_of(str, "must be a list of strings")]
