"""Detects changes of files that are read again while a process runs: keys and certificates."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

CHECK_S = 1.0
"""Minimum interval in seconds between two checks of the files."""


class WatchedFiles:
    """Detects changes of a few files: modified in place, replaced, or reached through a changed symbolic link.

    A check takes microseconds, so no thread is needed: the user of the files calls `changed` before each use.
    """

    def __init__(self, *paths: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Record the current versions of the files; `clock` returns seconds."""
        self._paths = paths
        self._clock = clock
        self._checked_s = clock()
        self._versions = self._stamps()

    def changed(self) -> bool:
        """Return True once after each change of a file, up to `CHECK_S` seconds after it."""
        now = self._clock()
        if now < self._checked_s + CHECK_S:
            return False
        self._checked_s = now
        before, self._versions = self._versions, self._stamps()
        return before != self._versions

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        return [_version(path) for path in self._paths]


def _version(path: Path) -> tuple[int, int, int] | None:
    """Return inode, modification time in nanoseconds and size; None for a file that cannot be read."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
