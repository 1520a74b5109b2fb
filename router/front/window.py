"""How far one direction of a call may run ahead of its reader: what a client has not taken of an answer waits at its
source, which makes fewer and larger pieces of it, and what a handler has not read of a request waits at the client.
Neither fills the stream that all calls of a front process share.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

AHEAD_MAX, AHEAD_BYTES_MAX = 64, 256 << 10
"""Messages of one call on their way to their reader, and their bytes: no more are sent from either of these on."""
TOLD_EVERY, TOLD_EVERY_BYTES = 16, 64 << 10
"""Messages passed on, or their bytes, after which their reader's side says so."""
PART_BYTES_MAX = 64 << 10
"""Most of a body that is sent as one part."""


class Window:
    """The sender's count of one call. Belongs to the event loop."""

    def __init__(self) -> None:
        self._ahead: deque[int] = deque()
        self._bytes = 0
        self._lifted = False
        self._changed = asyncio.Event()

    async def sent(self, size: int) -> None:
        """One more message was, of so many bytes; returns when another may be."""
        self._ahead.append(size)
        self._bytes += size
        while self._full and not self._lifted:
            self._changed.clear()
            await self._changed.wait()

    def passed(self, count: int) -> None:
        """The reader's side says that so many more were passed on."""
        for _ in range(min(count, len(self._ahead))):
            self._bytes -= self._ahead.popleft()
        self._changed.set()

    def lift(self) -> None:
        """Nobody reads any more: nobody waits for that."""
        self._lifted = True
        self._changed.set()

    @property
    def _full(self) -> bool:
        return len(self._ahead) >= AHEAD_MAX or self._bytes >= AHEAD_BYTES_MAX


class PassedOn:
    """The reader's count of one call. Belongs to the event loop."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        """`tell` says to the sender's side that so many more messages were passed on."""
        self._tell = tell
        self._count = self._bytes = 0

    def add(self, size: int) -> None:
        """One more was, of so many bytes."""
        self._count += 1
        self._bytes += size
        if self._count >= TOLD_EVERY or self._bytes >= TOLD_EVERY_BYTES:
            self._tell(self._count)
            self._count = self._bytes = 0


def parts(data: bytes) -> list[bytes]:
    """`data` in pieces that are sent as one part each; at least one."""
    return [data[at : at + PART_BYTES_MAX] for at in range(0, len(data), PART_BYTES_MAX)] or [b""]
