"""Compiles Triton kernels concurrently before they are needed; compiled one by one, they would dominate startup."""

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
"""The number of threads that compile. Processes are not needed: Triton's compiler mostly runs without the GIL."""

Trial = Callable[[], object]
"""A function that launches kernels on its own tensors, whose contents do not matter.

If another trial is compiling a kernel, the launch of this kernel is skipped and returns None.
"""


def run_side_by_side(trials: Mapping[str, Trial], device: torch.device) -> None:
    """Run every trial once, concurrently, and wait; the first trial that needs a kernel compiles it.

    All trials share scratch memory, and on different streams they may write to it at the same time. Their results and
    the final contents of the scratch memory are therefore undefined; the caller resets the scratch memory with
    `Kernels.end_trials`. If a trial fails, the error is logged with the trial's name and is not raised; it occurs again
    when a step launches the kernel.
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
    """Make Triton compile each kernel only for its first launch in the `with` block.

    Without this, several threads that launch the same kernel would all compile it.
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
