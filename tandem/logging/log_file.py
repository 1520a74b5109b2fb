"""A log file, with rotation, for everything that a process prints.

The process rotates the file itself: it redirects its descriptors 1 and 2 to the next file, each in one atomic step. No
output is lost, no restart is needed, and the output of native code stays in order with log lines. An external tool
could only copy and truncate, which loses the output written in between.
"""

import contextlib
import os
import sys
from pathlib import Path

KEPT = 4
"""Number of rotated files that are kept; `NAME.log.1` is the newest, and older ones are deleted."""


def earlier(file: Path, number: int) -> Path:
    """Return the path of the file that was rotated `number` rotations ago."""
    return file.with_name(f"{file.name}.{number}")


class LogFile:
    """Redirects standard output and error of this process to the file `path`, and rotates it.

    Several processes may share and rotate the file.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Redirect the output to the end of the file; a missing folder is created."""
        self._path, self._max_bytes = path, max_bytes
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._take()

    def poll(self) -> None:
        """Rotate the file if it is full. Never raises: if the rotation fails, the file keeps growing."""
        with contextlib.suppress(OSError):
            if os.fstat(2).st_size >= self._max_bytes:
                self._turn_unless_another_did()
                self._take()

    def _turn_unless_another_did(self) -> None:
        # Windows does not have it; clients there import this module, too.
        import fcntl

        try:
            fcntl.flock(2, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process rotates it; the next check opens the new file
            return
        try:
            if self._path.exists() and os.path.samestat(os.fstat(2), self._path.stat()):
                self._turn()
        finally:
            fcntl.flock(2, fcntl.LOCK_UN)

    def _turn(self) -> None:
        """Rotate the files; the order of the steps ensures that a current file exists at all times.

        The next file is created before the oldest one is deleted, so that readers can distinguish them by their inodes.
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
