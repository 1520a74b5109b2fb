"""Files that are read again after a change: keys and certificates that are rotated while a process runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

CHECK_S = 1.0
"""Least interval between two checks, in seconds."""


class WatchedFiles:
    """Reports changes of a few files: written in place, replaced, or behind another symbolic link.

    A check takes some microseconds, so that it needs no thread: whoever uses the files asks before each use.
    """

    def __init__(self, *paths: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Take the files as they are now; `clock` gives seconds."""
        self._paths = paths
        self._clock = clock
        self._checked_s = clock()
        self._versions = self._look()

    def changed(self) -> bool:
        """Return True once after each change; it may be `CHECK_S` old."""
        now = self._clock()
        if now < self._checked_s + CHECK_S:
            return False
        self._checked_s = now
        before, self._versions = self._versions, self._look()
        return before != self._versions

    def _look(self) -> list[tuple[int, int, int] | None]:
        return [_version(path) for path in self._paths]


def _version(path: Path) -> tuple[int, int, int] | None:
    """Return inode, time of the last write in nanoseconds and size; None for a file that cannot be seen."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
