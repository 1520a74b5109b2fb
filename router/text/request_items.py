"""How much a request is made of, counted before it is read: a body of 4 MiB can hold two million messages, which would
keep every thread from running while they are made.
"""

from __future__ import annotations

from functools import cache

from google.protobuf.descriptor import Descriptor

from wire.errors import InvalidArgument

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
"""Wire types of https://protobuf.dev/programming-guides/encoding/; groups are used by no message of Tandem's."""
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_VARINT_BITS_MAX = 64


def check_json_items(body: bytes, limit: int) -> None:
    """InvalidArgument if a JSON text has more than `limit` items: strings, objects, lists, and commas between them.

    Made of searches in C that take milliseconds each, so other threads run between them. What is no JSON is left to
    whoever reads it.
    """
    if b"\0" in body:
        raise InvalidArgument("body", "is not JSON in UTF-8: it contains a NUL byte")
    body = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # each quote that is left begins or ends a string
    count = at = 0
    while True:
        begin = body.find(b'"', at)
        end = begin if begin >= 0 else len(body)
        count += sum(body.count(sign, at, end) for sign in (b",", b"[", b"{"))
        if begin >= 0:
            count += 1
            at = body.find(b'"', begin + 1) + 1
        if count > limit:
            raise _too_many("body", limit)
        if begin < 0 or not at:
            return


def check_message_items(kind: Descriptor, data: bytes, limit: int) -> None:
    """InvalidArgument if an encoded message of this kind has more than `limit` fields, with those of the messages in
    it, or is none.
    """
    _FieldCount(data, limit).read(kind, 0, len(data))


class _FieldCount:
    def __init__(self, data: bytes, limit: int) -> None:
        self._data = data
        self._left = self._limit = limit

    def read(self, kind: Descriptor, at: int, end: int) -> None:
        """Count the fields of a message between two places."""
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
    """Its value and where it ends."""
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
    """The error about bytes that are no message of this kind."""
    return InvalidArgument("request", f"is no valid {kind.full_name}; encode it as the schema says")


def _too_many(field: str, limit: int) -> InvalidArgument:
    return InvalidArgument(field, f"has more than {limit} fields, strings and list entries; send less in one request")
