"""The folder of one cluster's sockets and logs: locked while it lives, so that the next cluster can clean up."""

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
"""Name of Ray's own folder in it, short because of socket paths."""
ROOT_LENGTH_MAX = 25
"""Maximum length of the root, so that Ray's socket paths fit into the 107 bytes that Linux allows."""
YOUNG_S = 60.0
"""Age below which a folder with an empty lock may belong to a cluster that has yet to lock it, in seconds."""
KILL_TIMEOUT_S = 5.0
REMOVAL_TIMEOUT_S = 2.0
"""Longest time that `TempFolder.remove` tries again, in seconds; only a folder that stays costs it."""


class TempFolder:
    """A fresh folder that is this process's until `remove`, or until the process ends. No other user can read it.

    Ray lets every user of the host write into the folder that it is given, and a user that replaces a socket there
    could impersonate Ray towards the next worker that starts.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root or temp_root()))
        self.ray = self.path / RAY
        self._lock = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._lock, str(os.getpid()).encode())

    def remove(self) -> None:
        """Delete the folder and releases its lock. Idempotent."""
        _remove_tree(self.path)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _remove_tree(folder: Path) -> None:
    """Delete `folder`, again while a process that is ending still makes files in it, for `REMOVAL_TIMEOUT_S`."""
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
    """Delete the folders of killed clusters, ends the processes that Ray left in them, and return the folders."""
    removed = []
    for folder in (root or temp_root()).glob(f"{PREFIX}*"):
        if _abandoned(folder):
            clean_up(folder)
            removed.append(folder)
    return removed


def clean_up(folder: Path) -> None:
    """End this user's Ray processes that work in a folder whose owner has ended, and deletes the folder."""
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
        # A shell, an editor or a pager that looks into the folder is none of Ray's.
        if not any(part.startswith("ray::") or "/ray/" in part for part in command):
            return False
        # Ray's agents write their name over command line and environment; the logs they hold open remain.
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
        # An owner writes its number only once it holds the lock; until then a look at the lock would be in its way.
        if os.fstat(lock).st_size == 0 and time.time() - folder.stat().st_mtime < YOUNG_S:
            return False
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True
