"""Whether a process lives, as this host's kernel says: proof, where the lack of an answer is a belief."""

import os
from functools import cache
from pathlib import Path

PROC = Path("/proc")
_STATE, _STARTED_AT = 0, 19
"""Fields of /proc/PID/stat behind the command's name: see proc(5)."""


@cache
def this_process() -> str:
    """Names this process to those who share its PID namespace; "" where the kernel does not say."""
    try:
        namespace, pid = os.readlink(PROC / "self/ns/pid"), os.getpid()
        return f"{namespace} {pid} {_stat(pid)[_STARTED_AT]}"
    except OSError:
        return ""


def lives(process: str) -> bool | None:
    """Whether the process of this host that called itself so lives; None = it cannot be seen from here.

    One that is stopped lives. One that has ended and is not yet waited for does not, if none of its threads is left.
    That a process is not there proves nothing where it was never seen.
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
    """The fields behind the name, which may hold anything."""
    return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
