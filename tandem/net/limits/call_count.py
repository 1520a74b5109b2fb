"""Limits the number of concurrent calls."""

from __future__ import annotations

from tandem.protocol.errors import ResourceExhausted

_RETRY_AFTER_S = 1.0


class CallCount:
    """Counts concurrent calls and limits their number; each `enter` needs one `leave`. Used on the event loop only."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.running = 0

    def enter(self) -> None:
        """Count a call that begins. Raises ResourceExhausted if there are too many."""
        if self.running >= self._limit:
            raise ResourceExhausted(
                f"{self.running} calls are in progress here, the limit is {self._limit}; try again later",
                retry_after_s=_RETRY_AFTER_S,
            )
        self.running += 1

    def leave(self) -> None:
        """Stop counting a call that has ended."""
        self.running -= 1
