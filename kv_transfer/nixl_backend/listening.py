"""The time that a worker has spent polling for incoming data."""

import time

LOOK_GAP_S = 0.1
"""Polls that are further apart than this do not count as listening, in seconds."""


class Listening:
    """A clock that counts while polls follow each other. For the transport's thread; `seconds` for every thread."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """The time that it has listened."""
        self._looked_at = time.monotonic()

    def look(self) -> None:
        """Records that a poll is about to happen."""
        now = time.monotonic()
        gap = now - self._looked_at
        if gap <= LOOK_GAP_S:
            self.seconds += gap
        self._looked_at = now
