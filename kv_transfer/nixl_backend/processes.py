"""Tells whether a process is alive, as this host's kernel reports it.

The kernel's report is proof, whereas a missing reply is only a hint.
"""

import os
from functools import cache
from pathlib import Path

PROC = Path("/proc")
_STATE, _STARTED_AT = 0, 19
"""Indices in the fields of /proc/PID/stat that follow the command's name: see proc(5)."""


@cache
def this_process() -> str:
    """Return a name of this process that is unique in its PID namespace; "" if the kernel does not provide it."""
    try:
        namespace, pid = os.readlink(PROC / "self/ns/pid"), os.getpid()
        return f"{namespace} {pid} {_stat(pid)[_STARTED_AT]}"
    except OSError:
        return ""


def process_alive(process: str) -> bool | None:
    """Return True if the process with this name (`this_process`) is alive, False if it has ended.

    Returns None if the process cannot be observed from here: its absence proves nothing in another PID namespace. A
    stopped process is alive. A process that has ended and is not reaped yet is not alive, unless one of its threads is
    left.
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
    """Return the fields of /proc/PID/stat after the command's name, which may contain any characters."""
    return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
