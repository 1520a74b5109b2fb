"""The folder of one cluster's sockets and logs.

The owner holds a lock on the folder as long as the owner runs, so a later cluster recognizes abandoned folders and
removes them.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

import psutil

PREFIX = "tandem-"
LOCK = "lock"
RAY = "r"
"""Name of Ray's own folder in the cluster's folder, short because the length of socket paths is limited."""
ROOT_LENGTH_MAX = 25
"""Maximum length of the parent folder's path, so that Ray's socket paths fit into the 107 bytes of Linux."""
YOUNG_S = 60.0
"""Age in seconds below which a folder with an empty lock file may belong to a cluster that has yet to lock it."""
KILL_TIMEOUT_S = 5.0
REMOVAL_TIMEOUT_S = 2.0
"""Maximum time of retries in `TempFolder.remove`, in seconds; reached only if the folder cannot be removed."""


class TempFolder:
    """A new folder that this process owns until `remove`, or until the process ends. No other user can read it.

    Ray makes the folder that it is given writable for every user of the host. A user that replaces a socket in it could
    impersonate Ray to the next worker that starts, so Ray's folder lies inside this private one.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root or temp_root()))
        self.ray = self.path / RAY
        self._lock = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._lock, str(os.getpid()).encode())

    def remove(self) -> None:
        """Delete the folder and release its lock. Idempotent."""
        _remove_tree(self.path)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _remove_tree(folder: Path) -> None:
    """Delete `folder`, retrying for `REMOVAL_TIMEOUT_S` while a process that is ending still creates files in it."""
    until = time.monotonic() + REMOVAL_TIMEOUT_S
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists() or time.monotonic() > until:
            return
        time.sleep(0.05)


def temp_root() -> Path:
    """Return the user's temp folder, or /tmp if that is too long for sockets."""
    root = Path(tempfile.gettempdir())
    return root if len(str(root)) <= ROOT_LENGTH_MAX else Path("/tmp")


def remove_abandoned(root: Path | None = None) -> list[Path]:
    """Delete the folders of killed clusters, kill the processes that Ray left in them, and return the folders."""
    removed = []
    for folder in (root or temp_root()).glob(f"{PREFIX}*"):
        if _abandoned(folder):
            clean_up(folder)
            removed.append(folder)
    return removed


def clean_up(folder: Path) -> None:
    """Kill this user's Ray processes that work in a folder whose owner has ended, and delete the folder."""
    if folder.exists():
        _end_leftovers(folder)
        _remove_tree(folder)


def _end_leftovers(folder: Path) -> None:
    left = [process for process in psutil.process_iter() if _is_leftover(process, folder)]
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=KILL_TIMEOUT_S)


def _is_leftover(process: psutil.Process, folder: Path) -> bool:
    try:
        if process.pid == os.getpid() or process.uids().effective != os.getuid():
            return False
        command = process.cmdline()
        # A shell, an editor or a pager that has the folder in its command line is not one of Ray's processes.
        if not any(part.startswith("ray::") or "/ray/" in part for part in command):
            return False
        # Ray's agents overwrite their command line and environment with their name, so they are found by their open
        # logs.
        inside = f"{folder}{os.sep}"
        return any(inside in part for part in command) or any(
            file.path.startswith(inside) for file in process.open_files()
        )
    except psutil.Error:
        return False


def _abandoned(folder: Path) -> bool:
    try:
        if folder.stat().st_uid != os.getuid():
            return False
        lock = os.open(folder / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        # An owner writes its process id once it holds the lock; until then, testing the lock here could make the owner
        # fail.
        if os.fstat(lock).st_size == 0 and time.time() - folder.stat().st_mtime < YOUNG_S:
            return False
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True
