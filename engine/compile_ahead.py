"""Kernels are compiled side by side, before anything needs them: one after another they would take most of a start."""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

log = logging.getLogger(__name__)

_COMPILERS = 8
"""Threads: Triton's compiler leaves Python alone for most of its time."""

Trial = Callable[[], object]
"""Launches kernels over tensors of its own, whose contents mean nothing."""


def run_side_by_side(trials: Mapping[str, Trial], device: torch.device) -> None:
    """Run every trial once and wait for them, so that all their kernels are compiled.

    The launches of all threads are one stream's, so trials use the scratch memory they share in turns; their results
    mix, and mean nothing. What fails here is logged by name, and fails in words where it is used.
    """

    def run(trial: Trial) -> None:
        torch.cuda.set_device(device)
        with torch.inference_mode():
            trial()

    with ThreadPoolExecutor(_COMPILERS, thread_name_prefix="compile") as pool:
        for name, done in [(name, pool.submit(run, trial)) for name, trial in trials.items()]:
            error = done.exception()
            if error is not None:
                log.warning("%s was not compiled ahead: %s", name, error)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
