"""Limits the number of items in a request before the request is parsed.

A body of 4 MiB can contain two million messages. Parsing it would hold the GIL, and block the event loop, for a long
time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor

from tandem.protocol.errors import InvalidArgument

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
"""Protobuf wire types (https://protobuf.dev/programming-guides/encoding/); no message of Tandem uses groups."""
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_VARINT_BITS_MAX = 64
_DIGITS_MAX = 400
"""Maximum number of consecutive digits in a number; a double has 309, and parsing takes quadratic time."""
_AS_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_LONG_NUMBER = b"0" * (_DIGITS_MAX + 1)


def check_json_items(body: bytes, limit: int, parts_max: int | None = None) -> None:
    """Raise InvalidArgument if a JSON text has more than `limit` items: strings, objects, lists and commas.

    `parts_max` limits the number of strings, objects and lists alone; None = no separate limit. The check consists of
    searches in C that take milliseconds each; other threads can run between them. Invalid JSON is not detected here.
    """
    if b"\0" in body:
        raise InvalidArgument("body", "is not JSON in UTF-8: it contains a NUL byte")
    body = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # each remaining quote begins or ends a string
    zeros = body.translate(_AS_ZEROS)
    parts_max = limit if parts_max is None else parts_max
    parts = commas = at = 0
    while True:
        begin = body.find(b'"', at)
        end = begin if begin >= 0 else len(body)
        commas += body.count(b",", at, end)
        parts += body.count(b"[", at, end) + body.count(b"{", at, end)
        if zeros.find(_LONG_NUMBER, at, end) >= 0:
            raise InvalidArgument("body", f"has a number of more than {_DIGITS_MAX} digits")
        if begin >= 0:
            parts += 1
            at = body.find(b'"', begin + 1) + 1
        if parts + commas > limit:
            raise _too_many("body", limit)
        if parts > parts_max:
            message = f"has more than {parts_max} strings, lists and objects; send fewer in one request"
            raise InvalidArgument("body", message)
        if begin < 0 or not at:
            return


def check_template_kwargs(variables: Mapping[str, Any], limit: int) -> None:
    """Raise InvalidArgument if `variables` need more than `limit` bytes as JSON, or cannot be encoded as JSON.

    Encoding stops soon after the limit is exceeded.
    """
    size = 0
    try:
        for part in json.JSONEncoder().iterencode(dict(variables)):
            size += len(part)
            if size > limit:
                break
    except (RecursionError, ValueError) as error:
        raise InvalidArgument("chat_template_kwargs", f"cannot be given to the template: {error}") from error
    check_template_kwargs_size(size, limit)


def check_template_kwargs_size(size: int, limit: int) -> None:
    """Raise InvalidArgument if template variables of `size` bytes (as JSON) exceed `limit` bytes."""
    if size > limit:
        raise InvalidArgument("chat_template_kwargs", f"has more than {limit} bytes of JSON, which is the limit")


def check_message_items(kind: Descriptor, data: bytes, limit: int) -> None:
    """Raise InvalidArgument if a protobuf message is invalid or has more than `limit` fields, including nested ones."""
    _FieldCount(data, limit).read(kind, 0, len(data))


class _FieldCount:
    def __init__(self, data: bytes, limit: int) -> None:
        self._data = data
        self._left = self._limit = limit

    def read(self, kind: Descriptor, at: int, end: int) -> None:
        """Count the fields of the message between the offsets `at` and `end`."""
        messages = _messages_in(kind)
        while at < end:
            if not self._left:
                raise _too_many("request", self._limit)
            self._left -= 1
            tag, at = _varint(self._data, at, end)
            wire_type = tag & 7
            if wire_type == _VARINT:
                _, at = _varint(self._data, at, end)
            elif wire_type in _FIXED_BYTES:
                at += _FIXED_BYTES[wire_type]
            elif wire_type == _BYTES:
                length, at = _varint(self._data, at, end)
                inner = messages.get(tag >> 3)
                if inner is not None and at + length <= end:
                    self.read(inner, at, at + length)
                at += length
            else:
                raise malformed(kind)
        if at != end:
            raise malformed(kind)


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Return the value of a varint and the offset after it."""
    value = shift = 0
    while at < end and shift < _VARINT_BITS_MAX:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise InvalidArgument("request", "is cut short or no protobuf message; send it again")


@cache
def _messages_in(kind: Descriptor) -> dict[int, Descriptor]:
    return {field.number: field.message_type for field in kind.fields if field.message_type is not None}


def malformed(kind: Descriptor) -> InvalidArgument:
    """Return the error for bytes that are not a valid protobuf message of type `kind`."""
    return InvalidArgument("request", f"is no valid {kind.full_name}; encode it as the schema says")


def _too_many(field: str, limit: int) -> InvalidArgument:
    return InvalidArgument(field, f"has more than {limit} fields, strings and list entries; send less in one request")
