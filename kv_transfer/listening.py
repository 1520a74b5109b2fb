"""How closely a worker looks for what comes in from its peers."""

import time

LOOK_GAP_S = 0.1
"""Looks that lie further apart do not count as listening."""
OLD_S = 5.0
"""What may have lain here for longer is not begun any more."""

CATCH_UP_S = 0.5
"""After a pause a look that finds nothing proves little before this: UCX may take several to bring up what came."""


class Listening:
    """Told of each look. For the transport's thread; `seconds` for every thread."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """How long it has listened."""
        self._looked_at = self._since = time.monotonic()
        self._behind = False
        self._behind_until = 0.0

    def look(self, *, counts: bool) -> None:
        """It is about to look; `counts`: whether it listens to the living alone."""
        now = time.monotonic()
        gap = now - self._looked_at
        if gap <= LOOK_GAP_S and counts:
            self.seconds += gap
        if not self._behind:
            self._since = self._looked_at
        if gap > OLD_S:
            self._behind, self._behind_until = True, now + CATCH_UP_S
        self._looked_at = now

    def found(self, notes: int) -> float:
        """The look has found so many: since when the oldest may have lain here (`time.monotonic`).

        That is the look before. After a pause it stays the pause's beginning until all that had come is heard.
        """
        if not notes and self._looked_at >= self._behind_until:
            self._behind = False
        return self._since
