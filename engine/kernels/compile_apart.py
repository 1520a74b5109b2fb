"""Libraries' kernels are compiled by processes of their own, into the folder where the libraries look for them.

Such a compiler keeps Python's lock nearly all of its time. In the engine's process it takes turns with Triton's, with
the library's own import and with itself, and the start waits for it longest of all (docs/decisions/0030).
"""

import contextlib
import hashlib
import logging
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_PROGRAM = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
function, arguments = pickle.load(sys.stdin.buffer)
function(*arguments)
"""
_PATIENCE_S = 60.0
"""After that the engine compiles by itself."""
_PACKAGES = ("flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl", "torch")


@dataclass(frozen=True, slots=True)
class Job:
    """A function of a module and what it is called with, both as `pickle` takes them."""

    function: Callable[..., object]
    arguments: tuple[Any, ...]


def compile_apart(jobs: Sequence[Job], folder: Path, device_name: str) -> Callable[[], None]:
    """Begin `jobs`, each in a process of its own → what waits for them.

    Nothing begins if an earlier start saw the same jobs through, on such a device and with the same libraries: a file
    in `folder` says so. A job that fails or takes too long is left to the engine, which will do it by itself or say
    what is wrong with it.
    """
    facts = [device_name, *map(_version, _PACKAGES), *((job.function.__qualname__, job.arguments) for job in jobs)]
    mark = folder / hashlib.sha256(repr(facts).encode()).hexdigest()
    children = [] if mark.exists() else [_begin(job) for job in jobs]
    deadline = time.monotonic() + _PATIENCE_S

    def wait() -> None:
        ends = [_ends_well(child, deadline) for child in children]
        if children and all(ends):
            with contextlib.suppress(OSError):  # a full disk: the next start does it once more
                mark.touch()

    return wait


def _begin(job: Job) -> "subprocess.Popen[bytes] | None":
    """None if there can be no process."""
    try:
        child = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except OSError as error:
        log.debug("no process to compile a library's kernels: %s", error)
        return None
    assert child.stdin is not None
    with contextlib.suppress(OSError), child.stdin as pipe:  # it may have ended: its code says so
        pickle.dump(sys.path, pipe)
        pickle.dump((job.function, job.arguments), pipe)
    return child


def _ends_well(child: "subprocess.Popen[bytes] | None", deadline: float) -> bool:
    if child is None:
        return False
    try:
        code = child.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        child.kill()
        code = child.wait()
    if code:
        log.debug("a process that compiles a library's kernels ended with %d", code)
    return code == 0


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
