"""From the bytes of a request to Python, the same at every listener. Large ones are read in the tokenizer's threads, and
what would take long to build is refused before it is built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from router.config import RouterConfig
from router.text.request_items import check_json_items, check_message_items, malformed
from router.text.tokenizing import TokenizerPool
from wire.errors import InvalidArgument

_M = TypeVar("_M", bound=Message)
_T = TypeVar("_T")
_INLINE_BYTES = 16 << 10
"""Requests up to this size are read on the event loop: it takes a millisecond at most, whatever is in them."""
_ITEMS_BESIDE_PROMPT = 1 << 16
"""What a request whose prompt is a list of token ids may hold besides."""


def check_size(size: int, limit: int) -> None:
    """`InvalidArgument` if a request of `size` bytes is over `limit`."""
    if size > limit:
        raise InvalidArgument("request", f"is {size} bytes long, the limit is {limit}; send a shorter prompt")


def check_message_count(count: int, limit: int) -> None:
    """`InvalidArgument` if a conversation of so many messages is over `limit`."""
    if count > limit:
        raise InvalidArgument("messages", f"has {count} messages, the limit is {limit}; send fewer")


class RequestReader:
    """Reads requests. ResourceExhausted where too many wait to be read."""

    def __init__(self, config: RouterConfig, pool: TokenizerPool, context: Callable[[], int]) -> None:
        """`context` is the model's, in tokens; 0 while nobody knows it."""
        self._config = config
        self._pool = pool
        self._context = context

    async def json(self, tenant: str, body: bytes, parse: Callable[[bytes], _T]) -> _T:
        """What `parse` makes of a body that has been found to be within the limit of bytes."""
        if len(body) <= _INLINE_BYTES:
            return parse(body)
        limit = self._items_max()

        def read() -> _T:
            check_json_items(body, limit)
            return parse(body)

        return await self._pool.run(tenant, len(body), read)

    async def message(self, tenant: str, kind: type[_M], data: bytes, build: Callable[[_M], _T]) -> _T:
        """What `build` makes of an encoded message."""
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
    found: Any = kind.DESCRIPTOR  # the stubs name it by two classes
    described: Descriptor = found
    return described


def _decoded(kind: type[_M], data: bytes) -> _M:
    try:
        message: Any = kind.FromString(data)
    except DecodeError:
        raise malformed(_descriptor(kind)) from None
    found: _M = message
    return found
