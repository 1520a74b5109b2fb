"""The converter between frozen dataclasses and the protobuf messages whose fields have the same names.

| field of the dataclass | field of the message |
|---|---|
| int, float, bool, str, bytes | the same scalar |
| `IntEnum`, `StrEnum` | an enum with the same numbers, a string |
| a dataclass | a message, converted likewise |
| `tuple[X, ...]`, `Sequence[X]` | repeated |
| `tuple[tuple[K, V], ...]` | a map; its entries are sorted when they are read |
| X or None | absent, or the zero value where the field has no presence |
| `tuple[X, ...]` or None | a message whose only field is the list, as proto3 has no optional lists |

An absent field takes the default of the dataclass. Values are not validated: the receiver of a message from outside
validates it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache, partial
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from tandem.protocol.errors import InvalidArgument

M = TypeVar("M", bound=Message)
T = TypeVar("T")
_Convert = Callable[[Any], Any]


def to_proto(value: object, message_type: type[M]) -> M:
    """Convert a dataclass to a protobuf message.

    Raises ValueError or TypeError if a field's value does not fit the schema.
    """
    message: M = _plan(type(value), message_type).write(value)
    return message


def from_proto(message: Message, dataclass_type: type[T]) -> T:
    """Convert a protobuf message to a dataclass. Raises InvalidArgument if an enum has an unknown value."""
    value: T = _plan(dataclass_type, type(message)).read(message)
    return value


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    """The precomputed conversion of one dataclass to and from one message."""

    dataclass_type: Callable[..., Any]
    message_type: Callable[..., Any]
    names: tuple[str, ...]
    writers: tuple[tuple[str, _Convert], ...]
    """Functions that convert a field's value (except None) for protobuf, for the fields that need a conversion."""
    scalars: tuple[str, ...]
    """The fields whose values are read from a message without conversion."""
    readers: tuple[tuple[str, _Convert], ...]
    """Functions that read a field's value from a message, for the fields that are not in `scalars`."""

    def write(self, value: object) -> Any:
        contents = {name: getattr(value, name) for name in self.names}
        for name, convert in self.writers:
            if contents[name] is not None:
                contents[name] = convert(contents[name])
        return self.message_type(**contents)

    def read(self, message: Message) -> Any:
        contents = {name: getattr(message, name) for name in self.scalars}
        for name, read in self.readers:
            contents[name] = read(message)
        return self.dataclass_type(**contents)


def _make_plan(dataclass_type: Any, message_type: Any) -> _Plan:
    """Create the conversion. Raises TypeError if the two types do not have fields of the same names."""
    fields = {field.name: field for field in dataclasses.fields(dataclass_type)}
    schema = message_type.DESCRIPTOR.fields_by_name
    if different := ", ".join(sorted(set(fields) ^ set(schema))):
        raise TypeError(f"{dataclass_type.__name__} and {message_type.__name__} differ in: {different}")
    hints = get_type_hints(dataclass_type)
    writers, readers = {}, {}
    for name, field in fields.items():
        write, read = _field_conversions(field, hints[name], schema[name])
        if write is not None:
            writers[name] = write
        if read is not None:
            readers[name] = read
    scalars = tuple(name for name in fields if name not in readers)
    return _Plan(dataclass_type, message_type, tuple(fields), tuple(writers.items()), scalars, tuple(readers.items()))


_plan: Callable[[Any, Any], _Plan] = cache(_make_plan)


def _field_conversions(
    field: dataclasses.Field[Any], hint: Any, schema: Any
) -> tuple[_Convert | None, _Convert | None]:
    """Return functions that write the field's value and that read it from a message; None = no conversion needed."""
    content, optional = _without_none(hint)
    write, convert = _conversions(content, schema)
    has_default = field.default is not dataclasses.MISSING
    name, default = field.name, field.default if has_default else None
    get: _Convert = attrgetter(name)
    read: _Convert = get if convert is None else lambda message: convert(get(message))
    if schema.has_presence and (optional or has_default):
        return write, lambda message: read(message) if message.HasField(name) else default
    if optional:
        return write, lambda message: read(message) if get(message) else None
    return write, None if convert is None else read


def _conversions(hint: Any, schema: Any) -> tuple[_Convert | None, _Convert | None]:
    """Return functions that convert a value of this type (except None) to and from protobuf.

    None instead of a function = no conversion is needed.
    """
    if get_origin(hint) in (tuple, Sequence):
        return _list_conversions(get_args(hint)[0], schema)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return None, partial(_read_enum, hint, schema.name)
    if dataclasses.is_dataclass(hint):
        message_type = GetMessageClass(schema.message_type)
        if schema.message_type is schema.containing_type:
            # The plan of this message is being made, so it is looked up when a value is converted.
            return (
                lambda value: _plan(hint, message_type).write(value),
                lambda value: _plan(hint, message_type).read(value),
            )
        plan = _plan(hint, message_type)
        return plan.write, plan.read
    return None, None


def _list_conversions(hint: Any, schema: Any) -> tuple[_Convert | None, _Convert]:
    """Return functions that convert a tuple with entries of the type `hint` to and from protobuf."""
    entry = schema.message_type
    if entry is not None and entry.GetOptions().map_entry:
        return dict, lambda content: tuple(sorted(content.items()))
    if not schema.is_repeated:
        (inner,) = entry.fields
        (write_list, read_list), message_type = _list_conversions(hint, inner), GetMessageClass(entry)
        return (
            lambda values: message_type(**{inner.name: values if write_list is None else write_list(values)}),
            lambda message: read_list(getattr(message, inner.name)),
        )
    content, optional = _without_none(hint)
    write, read = _conversions(content, schema)
    if optional:
        return lambda values: [value or 0 for value in values], lambda values: tuple(value or None for value in values)
    return (
        None if write is None else lambda values: [write(value) for value in values],
        tuple if read is None else lambda values: tuple(read(value) for value in values),
    )


def _without_none(hint: Any) -> tuple[Any, bool]:
    """Return the type without None, and whether it included None."""
    if get_origin(hint) is not UnionType:
        return hint, False
    (content,) = (argument for argument in get_args(hint) if argument is not NoneType)
    return content, True


def _read_enum(enum: type[Enum], field: str, content: Any) -> Enum:
    try:
        return enum(content)
    except ValueError:
        raise InvalidArgument(field, f"{content!r} is not one of {', '.join(map(str, enum))}") from None
