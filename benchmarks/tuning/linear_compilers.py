"""Compiles tiles of the weight-streaming products in parallel processes."""

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Protocol

import torch
from torch import Tensor

from benchmarks.tuning.linear_candidates import Product
from benchmarks.tuning.linear_timing import launch, make_inputs
from tandem.engine.kernels.linear.triton_linear_tiles import Tile


class Variant(Protocol):
    """A variant of a kernel."""

    @property
    def memory_numbers(self) -> int:
        """bfloat16 numbers of the memory that `run` takes."""
        ...

    def run(self, memory: Tensor) -> None:
        """Launches the kernel once; `memory` is not initialized."""
        ...


@dataclass(frozen=True)
class Job:
    """One variant of a streaming product's kernel to compile and measure."""

    product: Product
    tokens: int
    tile: Tile
    normed: bool
    pdl: bool

    @property
    def memory_numbers(self) -> int:
        """Elements of the weight."""
        return self.product.n * self.product.k

    def run(self, memory: Tensor) -> None:
        """Launches the kernel with `memory` as its weight."""
        weight = memory[: self.memory_numbers].view(self.product.n, self.product.k)
        launch(self.product, make_inputs(self.product, self.tokens, self.normed), weight, self.tile, self.pdl)

    def __str__(self) -> str:
        return f"{self.product.name} {self.product.n}x{self.product.k} {self.tile}"


def _compile_all(jobs: Sequence[Variant]) -> list[str | None]:
    """Runs each job once, which fills Triton's disk cache; in a process of its own."""
    memory = torch.empty(max((job.memory_numbers for job in jobs), default=0), dtype=torch.bfloat16, device="cuda")
    failures: list[str | None] = []
    for job in jobs:
        try:
            job.run(memory)
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
        self.working: set[Variant] = set()

    def compile(self, jobs: Iterable[Variant]) -> None:
        """Compiles the jobs and prints those that fail."""
        started, distinct = time.perf_counter(), list(dict.fromkeys(jobs))
        shares = [distinct[i :: self._workers] for i in range(self._workers)]
        for share, failures in zip(shares, self._processes.map(_compile_all, shares), strict=True):
            for job, failure in zip(share, failures, strict=True):
                if failure is None:
                    self.working.add(job)
                else:
                    print(f"left out: {job}: {failure}")
        print(f"{len(distinct)} variants compiled in {time.perf_counter() - started:.0f} s", flush=True)

    def close(self) -> None:
        """Ends the processes."""
        self._processes.shutdown()
