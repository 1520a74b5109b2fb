"""Liveness of a process as this host's kernel reports it: proof, where a missing reply is only a hint."""

import os
from functools import cache
from pathlib import Path

PROC = Path("/proc")
_STATE, _STARTED_AT = 0, 19
"""Fields of /proc/PID/stat after the command's name: see proc(5)."""


@cache
def this_process() -> str:
    """Return a name of this process for those that share its PID namespace; "" if the kernel does not say."""
    try:
        namespace, pid = os.readlink(PROC / "self/ns/pid"), os.getpid()
        return f"{namespace} {pid} {_stat(pid)[_STARTED_AT]}"
    except OSError:
        return ""


def lives(process: str) -> bool | None:
    """Return True if the process with this name (`this_process`) is alive; None = it cannot be observed from here.

    A stopped process is alive. A process that has ended and is not reaped yet is not, if none of its threads is left.
    The absence of a process proves nothing in another PID namespace.
    """
    try:
        namespace, pid, started_at = process.split()
        if namespace != os.readlink(PROC / "self/ns/pid"):
            return None
    except (ValueError, OSError):
        return None
    try:
        stat = _stat(int(pid))
        ended = stat[_STATE] in "ZX" and len(os.listdir(PROC / pid / "task")) <= 1
        return stat[_STARTED_AT] == started_at and not ended
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return None


def _stat(pid: int) -> list[str]:
    """Return the fields after the name, which may contain any characters."""
    return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
