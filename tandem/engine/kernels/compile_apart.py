"""Compiles libraries' kernels in separate processes, into the folder in which the libraries look for them.

The libraries' compilers hold the GIL nearly all the time. In the engine's process, they would run one after another,
and also delay imports and Triton's compiler, which would dominate the start (docs/decisions/startup.md).
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
_COMPILE_TIMEOUT_S = 60.0
"""Maximum duration of all compilations in seconds; then the processes are killed, and the engine compiles instead."""
_PACKAGES = ("flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl", "torch")


@dataclass(frozen=True, slots=True)
class Job:
    """A compilation for a separate process: a module-level function and its arguments, both picklable."""

    function: Callable[..., object]
    arguments: tuple[Any, ...]


def compile_apart(jobs: Sequence[Job], folder: Path, device_name: str) -> Callable[[], None]:
    """Start each of `jobs` in a separate process, and return a function that waits for them.

    No process is started if a file in `folder` records that an earlier start has completed the same jobs, for a device
    of this name and with the same versions of the libraries. If a job fails or takes too long, the engine compiles the
    kernel itself or reports the error.
    """
    facts = [device_name, *map(_version, _PACKAGES), *((job.function.__qualname__, job.arguments) for job in jobs)]
    mark = folder / hashlib.sha256(repr(facts).encode()).hexdigest()
    children = [] if mark.exists() else [_begin(job) for job in jobs]
    deadline = time.monotonic() + _COMPILE_TIMEOUT_S

    def wait() -> None:
        ends = [_ends_well(child, deadline) for child in children]
        if children and all(ends):
            with contextlib.suppress(OSError):  # a full disk: the next start compiles again
                mark.touch()

    return wait


def _begin(job: Job) -> "subprocess.Popen[bytes] | None":
    """Start a process for a job, and return it, or None if that fails."""
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
    # The process may have ended already; its exit code shows that.
    with contextlib.suppress(OSError), child.stdin as pipe:
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
