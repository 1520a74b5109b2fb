"""The base of request bodies as pydantic models, with strict types and errors that name the field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, FailFast, Tag, ValidationError
from pydantic_core import ErrorDetails

from router.api.json_fields import JsonFields, UnknownFields
from router.api.unserved_fields import Unserved
from tandem.protocol.errors import InvalidArgument

_B = TypeVar("_B", bound="Body")
TEXT, ITEMS = "<text>", "<items>"
"""Tags of the alternatives of a field that is a string or a list; the brackets tell tags from fields in errors."""
_PROBLEMS = {
    "missing": "is missing",
    "string_type": "must be a string",
    "bool_type": "must be true or false",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "int_parsing_size": "is too large for a number",
    "float_type": "must be a number",
    "string_too_short": "is empty",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "recursion_loop": "is nested too deeply",
}


class Body(BaseModel):
    """An object of a request body; null counts as absent for each field that has a default.

    Types are strict, as a number is no string. Unknown fields are kept in `model_extra`, for `sort_unknown`.
    """

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, protected_namespaces=())

    refused: ClassVar[Mapping[str, Unserved]] = {}
    """The fields that this server does not implement."""
    inert: ClassVar[frozenset[str]] = frozenset()
    """The fields without effect here; they are ignored silently."""


def text_or_items(value: Any) -> str | None:
    """Return the tag of a field that is a string or a list; None for another type."""
    return TEXT if isinstance(value, str) else ITEMS if isinstance(value, list) else None


TEXT_OR_ITEMS = Discriminator(
    text_or_items, custom_error_type="text_or_items", custom_error_message="must be a string or a list of objects"
)
"""The choice between `Text` and a list that has the tag `ITEMS`."""
Text = Annotated[str, Tag(TEXT)]


class _FirstError(FailFast):
    """`FailFast` with a hash, which alternatives of a field need."""

    __hash__ = object.__hash__


LIST = _FirstError()
"""Stops at the first wrong entry of a list, so that the errors of one body are few."""


def by_type(tags: Mapping[str, str], served: str, *, absent: str = "", other: str = "") -> Discriminator:
    """Return the choice among objects by their field `type`; `tags` has the tag of each value of it.

    `served` names the values for the error; `absent` is the tag of an object without a type, `other` that of one with
    another type. Without them, such an object is an error.
    """

    def tag(value: Any) -> str | None:
        if not isinstance(value, dict):
            return None
        kind = value.get("type")
        if kind is None:
            return absent or None
        return tags.get(kind, other or None) if isinstance(kind, str) else None

    message = f"must be an object of type {served}; other types are not supported"
    return Discriminator(tag, custom_error_type="object_by_type", custom_error_message=message)


def read_body(kind: type[_B], body: bytes) -> _B:
    """Parse a JSON body; InvalidArgument names the first field that is wrong."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _named(error.errors(include_url=False, include_input=False)[0]) from None


def sort_unknown(body: Body, unknown: UnknownFields) -> None:
    """Reject, ignore or record the fields that the models of `body` do not have, nested ones included.

    Raises InvalidArgument for a field in its model's `refused` whose value has an effect.
    """
    for path, each in _nested(body, ""):
        if each.model_extra:
            fields = JsonFields(each.model_extra, unknown, path)
            fields.refuse(each.refused)
            fields.drop(each.inert)
            fields.end()


def _nested(value: Any, path: str) -> Iterator[tuple[str, Body]]:
    """Yield all bodies in a value, each with the prefix of its fields' names."""
    if isinstance(value, Body):
        yield path, value
        for name in type(value).model_fields:
            yield from _nested(getattr(value, name), f"{path}{name}.")
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _nested(each, f"{path[:-1]}[{number}].")


def _named(error: ErrorDetails) -> InvalidArgument:
    kind = error["type"]
    if kind == "json_invalid":
        return InvalidArgument("body", f"is not valid JSON ({error['msg'].removeprefix('Invalid JSON: ')})")
    name = ""
    for each in error["loc"]:
        if isinstance(each, int):
            name += f"[{each}]"
        elif not each.startswith("<"):
            name += f".{each}" if name else each
    problem = _PROBLEMS.get(kind) or error["msg"].replace("Input should", "must", 1)
    if kind == "literal_error":
        problem = f"must be {error['ctx']['expected']}; nothing else is supported"
    return InvalidArgument(name or "body", problem)
