"""Compiles the CPU kernels once per machine: in a process of its own, before the workers need them.

Compiling takes about 16 s of one core. `tandem up` begins it first, so that it runs while the model is converted and
Ray starts; workers that need the kernels earlier wait for it, and do not compile them as well.
"""

import contextlib
import hashlib
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tandem.engine.compiled_folder import compiled_folder

log = logging.getLogger(__name__)

_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
import torch
from tandem.engine.kernels.cpu.kernels import CpuKernels
CpuKernels(getattr(torch, sys.argv[1]), threads=1).close()
"""
DTYPES = ("float32", "bfloat16")
"""The dtypes of weights and activations for which there are CPU kernels."""


def kernels_folder() -> Path:
    """Return the folder of compiled CPU kernels, whose name is a hash of the content of all sources.

    Numba compares only the file of the compiled function, and would keep using code that was compiled from older
    versions of the other files.
    """
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return compiled_folder(digest.hexdigest()[:16])


@contextlib.contextmanager
def compiling_alone(folder: Path) -> Iterator[None]:
    """Wait until no other process compiles kernels into `folder`, and make the others wait while the body runs.

    Where the file system has no locks, several processes compile at the same time, each for itself.
    """
    # Windows does not have it; `tandem plan` there imports this module, too.
    import fcntl

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            lock = stack.enter_context((folder / "lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def compiling_ahead(dtype: str) -> Iterator[None]:
    """Compile the kernels for `dtype` in another process while the body runs, unless an earlier start has.

    The process is stopped at the end of the body, which needs no kernels any more or has failed.
    """
    if dtype not in DTYPES or any(kernels_folder().glob("jobs.perform-*.nbc")):
        yield
        return
    child = _begin(dtype)
    try:
        yield
    finally:
        if child is not None:
            child.kill()
            child.wait()


def _begin(dtype: str) -> "subprocess.Popen[bytes] | None":
    """Start the compiling process, and return it, or None if that fails: then the workers compile."""
    try:
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, dtype, json.dumps(sys.path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except OSError as error:
        log.debug("no process to compile the kernels: %s", error)
        return None
