"""Kernels are compiled side by side, before anything needs them: one after another they would take most of a start."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from triton import knobs

log = logging.getLogger(__name__)

_COMPILERS = 8
"""Threads: Triton's compiler leaves Python alone for most of its time."""

Trial = Callable[[], object]
"""Launches kernels over tensors of its own, whose contents mean nothing. A launch whose kernel another trial is
compiling does not happen, and returns None.
"""


def run_side_by_side(trials: Mapping[str, Trial], device: torch.device) -> None:
    """Run every trial once and wait for them, so that all their kernels are compiled, each by the first that needs it.

    Trials share scratch memory. Most of their launches are one stream's, and use it in turns; those beside them on a
    second one do not, so nobody may count on what is left there (`Kernels.end_trials`). Their results mix, and mean
    nothing. What fails here is logged by name, and fails in words where it is used.
    """

    def run(trial: Trial) -> None:
        torch.cuda.set_device(device)
        with torch.inference_mode():
            trial()

    with _each_kernel_once(), ThreadPoolExecutor(_COMPILERS, thread_name_prefix="compile") as pool:
        for name, done in [(name, pool.submit(run, trial)) for name, trial in trials.items()]:
            error = done.exception()
            if error is not None:
                log.warning("%s was not compiled ahead: %s", name, error)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


@contextlib.contextmanager
def _each_kernel_once() -> Iterator[None]:
    """Inside, Triton compiles a kernel for whoever launches it first; its own threads would each begin anew."""
    begun: set[tuple[str, str, str]] = set()
    lock = threading.Lock()

    def is_begun(*, key: str, fn: Any, **_: object) -> bool:
        kernel = (fn.module, fn.name, key)
        with lock:
            if kernel in begun:
                return True
            begun.add(kernel)
            return False

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = is_begun
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = before
