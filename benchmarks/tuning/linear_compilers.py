"""Compiles tiles of the weight-streaming products in parallel processes."""

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import torch

from benchmarks.tuning.linear_candidates import Product
from benchmarks.tuning.linear_timing import launch, make_inputs
from engine.kernels.linear.triton_linear_tiles import Tile


@dataclass(frozen=True)
class Job:
    """One variant of a kernel to compile and measure."""

    product: Product
    tokens: int
    tile: Tile
    normed: bool
    pdl: bool


def _compile_all(jobs: Sequence[Job]) -> list[str | None]:
    """Runs each job once on uninitialized memory, which fills Triton's disk cache; in a process of its own."""
    largest = max((job.product.n * job.product.k for job in jobs), default=0)
    memory = torch.empty(largest, dtype=torch.bfloat16, device="cuda")
    failures: list[str | None] = []
    for job in jobs:
        weight = memory[: job.product.n * job.product.k].view(job.product.n, job.product.k)
        try:
            launch(job.product, make_inputs(job.product, job.tokens, job.normed), weight, job.tile, job.pdl)
            torch.cuda.synchronize()
            failures.append(None)
        except Exception as error:
            failures.append(f"{type(error).__name__}: {str(error)[:120]}")
    return failures


class Compilers:
    """Parallel compiler processes; `working` holds every job that compiled and ran."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._processes = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
        self.working: set[Job] = set()

    def compile(self, jobs: Iterable[Job]) -> None:
        """Compiles the jobs and prints those that fail."""
        started, distinct = time.perf_counter(), list(dict.fromkeys(jobs))
        shares = [distinct[i :: self._workers] for i in range(self._workers)]
        for share, failures in zip(shares, self._processes.map(_compile_all, shares), strict=True):
            for job, failure in zip(share, failures, strict=True):
                if failure is None:
                    self.working.add(job)
                else:
                    print(f"left out: {job.product.name} {job.product.n}x{job.product.k} {job.tile}: {failure}")
        print(f"{len(distinct)} variants compiled in {time.perf_counter() - started:.0f} s", flush=True)

    def close(self) -> None:
        """Ends the processes."""
        self._processes.shutdown()
