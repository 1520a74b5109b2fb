"""Compiles kernel variants in parallel processes, because each takes seconds."""

import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Protocol, TypeVar

import torch


class Variant(Protocol):
    """A variant of a kernel; it is pickled to run in another process."""

    def run(self) -> None:
        """Launch the kernel once."""


_Variant = TypeVar("_Variant", bound=Variant)


def compiled(variants: Sequence[_Variant], workers: int) -> list[_Variant]:
    """Run each variant once in one of `workers` processes, and return those that ran.

    The run fills Triton's disk cache. A variant that needs more shared memory or registers than the GPU has is printed
    and left out.
    """
    started, distinct = time.perf_counter(), list(dict.fromkeys(variants))
    shares = [distinct[i::workers] for i in range(workers)]
    working: set[_Variant] = set()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as processes:
        for share, failures in zip(shares, processes.map(_run_all, shares), strict=True):
            for variant, failure in zip(share, failures, strict=True):
                if failure is None:
                    working.add(variant)
                else:
                    print(f"left out: {variant}: {failure}")
    print(f"{len(distinct)} variants compiled in {time.perf_counter() - started:.0f} s", flush=True)
    return [variant for variant in distinct if variant in working]


def _run_all(variants: Sequence[Variant]) -> list[str | None]:
    failures: list[str | None] = []
    for variant in variants:
        try:
            variant.run()
            torch.cuda.synchronize()
            failures.append(None)
        except Exception as error:
            failures.append(f"{type(error).__name__}: {str(error)[:120]}")
    return failures
