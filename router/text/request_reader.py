"""Parses the bytes of requests from both listeners (HTTP and gRPC).

Large requests are parsed in the tokenizer threads. Requests whose parsing would take too long are rejected unparsed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from router.config import RouterConfig
from router.text.request_items import check_json_items, check_message_items, malformed
from router.text.tokenizing import TokenizerPool
from tandem.protocol.errors import InvalidArgument

_M = TypeVar("_M", bound=Message)
_T = TypeVar("_T")
_INLINE_BYTES = 8 << 10
"""Maximum size of a request that is parsed on the event loop, in bytes.

Parsing takes at most about two milliseconds, for a JSON body of many short messages.
"""
_ITEMS_BESIDE_PROMPT = 1 << 16
"""Maximum number of items in a request, not counting a prompt of token ids."""
_PARTS_SHARE = 4
"""At most a quarter (1 / `_PARTS_SHARE`) of a JSON body's items may be strings, lists or objects.

Building a hundred thousand strings, lists or objects holds the GIL for a tenth of a second or more, ten times as long
as for numbers. A conversation of 4,096 messages with tool calls has fewer.
"""


def check_size(size: int, limit: int) -> None:
    """Raise InvalidArgument if `size` exceeds `limit`, both in bytes."""
    if size > limit:
        raise InvalidArgument("request", f"is {size} bytes long, the limit is {limit}; send a shorter prompt")


def check_message_count(count: int, limit: int) -> None:
    """Raise InvalidArgument if a conversation of `count` messages exceeds `limit`."""
    if count > limit:
        raise InvalidArgument("messages", f"has {count} messages, the limit is {limit}; send fewer")


class RequestReader:
    """Parses requests. Raises ResourceExhausted if too many requests wait to be parsed.

    The `RequestValidator` owns it; calls are on the event loop, and large requests are parsed in a tokenizer thread.
    """

    def __init__(self, config: RouterConfig, pool: TokenizerPool, context: Callable[[], int]) -> None:
        """`context` returns the model's context in tokens, or 0 while it is unknown."""
        self._config = config
        self._pool = pool
        self._context = context

    async def json(self, tenant: str, body: bytes, parse: Callable[[bytes], _T]) -> _T:
        """Parse a JSON body by `parse` and return the result; the body's size must have been checked before."""
        if len(body) <= _INLINE_BYTES:
            return parse(body)
        limit, parts_max = self._items_max(), self._config.max_request_items // _PARTS_SHARE

        def read() -> _T:
            check_json_items(body, limit, parts_max)
            return parse(body)

        return await self._pool.run(tenant, len(body), read)

    async def message(self, tenant: str, kind: type[_M], data: bytes, build: Callable[[_M], _T]) -> _T:
        """Decode a message of type `kind`, pass it to `build`, and return the result.

        Raises InvalidArgument if the message is malformed or too large.
        """
        check_size(len(data), self._config.listeners.max_request_bytes)
        if len(data) <= _INLINE_BYTES:
            return build(_decoded(kind, data))
        limit = self._items_max()

        def read() -> _T:
            check_message_items(_descriptor(kind), data, limit)
            return build(_decoded(kind, data))

        return await self._pool.run(tenant, len(data), read)

    def _items_max(self) -> int:
        return max(self._config.max_request_items, self._context() + _ITEMS_BESIDE_PROMPT)


def _descriptor(kind: type[Message]) -> Descriptor:
    descriptor: Any = kind.DESCRIPTOR  # the stubs name it by two classes
    described: Descriptor = descriptor
    return described


def _decoded(kind: type[_M], data: bytes) -> _M:
    try:
        message: Any = kind.FromString(data)
    except DecodeError:
        raise malformed(_descriptor(kind)) from None
    decoded: _M = message
    return decoded
