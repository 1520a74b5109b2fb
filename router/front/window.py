"""Flow control for each direction of a call, by a window of unread messages and bytes.

An answer that its client does not read waits at its source, where its chunks are merged; a request that its handler
does not read waits at the client. Neither fills the stream that all calls of a front process share.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

AHEAD_MAX, AHEAD_BYTES_MAX = 64, 256 << 10
"""Window of one call: the unread messages, and their bytes, at which sending stops."""
ACK_EVERY, ACK_EVERY_BYTES = 16, 64 << 10
"""The reader's side acknowledges after this many messages, or bytes."""
PART_BYTES_MAX = 64 << 10
"""Largest part of a body, in bytes."""


class Window:
    """The sender's side of one call's window. Belongs to the event loop."""

    def __init__(self) -> None:
        self._ahead: deque[int] = deque()
        self._bytes = 0
        self._lifted = False
        self._changed = asyncio.Event()

    async def sent(self, size: int) -> None:
        """Count a sent message of `size` bytes; returns when the next may be sent."""
        self._ahead.append(size)
        self._bytes += size
        while self._full and not self._lifted:
            self._changed.clear()
            await self._changed.wait()

    def passed(self, count: int) -> None:
        """Process an acknowledgement of `count` messages."""
        for _ in range(min(count, len(self._ahead))):
            self._bytes -= self._ahead.popleft()
        self._changed.set()

    def lift(self) -> None:
        """Open the window for good, because nothing is read any more."""
        self._lifted = True
        self._changed.set()

    @property
    def _full(self) -> bool:
        return len(self._ahead) >= AHEAD_MAX or self._bytes >= AHEAD_BYTES_MAX


class Acknowledger:
    """The reader's side of one call's window. Belongs to the event loop."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        """`tell` sends an acknowledgement of a number of messages."""
        self._tell = tell
        self._count = self._bytes = 0

    def add(self, size: int) -> None:
        """Count a message of `size` bytes that was passed on."""
        self._count += 1
        self._bytes += size
        if self._count >= ACK_EVERY or self._bytes >= ACK_EVERY_BYTES:
            self._tell(self._count)
            self._count = self._bytes = 0


def parts(data: bytes) -> list[bytes]:
    """Split `data` into parts of at most `PART_BYTES_MAX` bytes; returns at least one."""
    return [data[at : at + PART_BYTES_MAX] for at in range(0, len(data), PART_BYTES_MAX)] or [b""]
