"""How closely a worker looks for what comes in from its peers."""

import time

LOOK_GAP_S = 0.1
"""Looks that lie further apart do not count as listening."""


class Listening:
    """Told of each look. For the transport's thread; `seconds` for every thread."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """How long it has listened."""
        self._looked_at = time.monotonic()

    def look(self) -> None:
        """It is about to look."""
        now = time.monotonic()
        gap = now - self._looked_at
        if gap <= LOOK_GAP_S:
            self.seconds += gap
        self._looked_at = now
