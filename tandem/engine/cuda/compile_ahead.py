"""Concurrent compilation of kernels before they are needed: one after another they would dominate the start."""

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
"""Threads: Triton's compiler releases the GIL for most of its time."""

Trial = Callable[[], object]
"""A function that launches kernels over its own tensors, whose contents are meaningless.

A launch whose kernel another trial is compiling does not happen, and returns None.
"""


def run_side_by_side(trials: Mapping[str, Trial], device: torch.device) -> None:
    """Runs every trial once and waits, so that all their kernels are compiled, each by the first that needs it.

    Trials share scratch memory. Most of their launches are on one stream and use it in turns; those that run on a
    second stream at the same time do not, so the scratch's final contents are undefined (`Kernels.end_trials`). The
    results are undefined, too. A failure is logged by name, and is raised again where the kernel is used.
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
    """Makes Triton compile each kernel only for its first launch inside.

    Otherwise each thread would compile it again.
    """
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
