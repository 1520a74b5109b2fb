"""The file that a process's whole output goes to, begun anew where it is full.

The process itself turns it over: it points its own descriptors 1 and 2 at the next file, each in one step.
So nothing is lost and nothing is restarted, and what native code prints stays between the lines that it belongs to.
Somebody outside could only copy and truncate, and would lose what is written in between.
"""

import contextlib
import fcntl
import os
import sys
from pathlib import Path

KEPT = 4
"""Earlier files that are kept, `NAME.log.1` the youngest; older ones are deleted."""


def earlier(file: Path, number: int) -> Path:
    """Where `number` turns ago the current file went."""
    return file.with_name(f"{file.name}.{number}")


class LogFile:
    """`path` as standard output and error of this process. Several processes may write to one, and each turns it."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Its folder is made where it is missing; what was in the file stays."""
        self._path, self._max_bytes = path, max_bytes
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._take()

    def look(self) -> None:
        """Go over to a new file if this one is full; where none can be made, this one grows. Never raises."""
        with contextlib.suppress(OSError):
            if os.fstat(2).st_size >= self._max_bytes:
                self._turn_unless_another_did()
                self._take()

    def _turn_unless_another_did(self) -> None:
        try:
            fcntl.flock(2, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process does; the next look finds what it made
            return
        try:
            if self._path.exists() and os.path.samestat(os.fstat(2), self._path.stat()):
                self._turn()
        finally:
            fcntl.flock(2, fcntl.LOCK_UN)

    def _turn(self) -> None:
        """The next file is there before the oldest goes: whoever follows tells them apart by their inodes. At no time
        is there no current file.
        """
        fresh = self._path.with_name(f"{self._path.name}.fresh")
        os.close(_open(fresh))
        for number in reversed(range(1, KEPT)):
            with contextlib.suppress(FileNotFoundError):
                earlier(self._path, number).replace(earlier(self._path, number + 1))
        try:
            os.link(self._path, earlier(self._path, 1))
        except OSError:  # a file system without links
            self._path.replace(earlier(self._path, 1))
        fresh.replace(self._path)

    def _take(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        target = _open(self._path)
        os.dup2(target, 1)
        os.dup2(target, 2)
        os.close(target)


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
