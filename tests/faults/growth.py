"""Memory and file descriptors of processes that survive the restarts of others, measured after each restart."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from benchmarks.results import run_facts, save_result
from tandem.cluster.supervision.health import Health

MIB = 1 << 20
SETTLED_AFTER = 10
"""Restarts until a process has touched all memory that it reuses: its page pool, allocators, caches."""
SETTLED_GROWTH_BYTES_MAX = 4 * MIB
"""The limit on growth after that, for any number of restarts.

A leak of 0.2 MiB per restart is found in 20 restarts. Measured: 0 to 2 MiB in 20.
"""
GROWTH_BYTES_MAX = 8 * MIB
"""The limit on growth from the first restart on, without the page pool."""
FIRST_FDS_MAX = 1
"""The descriptors that the first restart may add for good.

Measured for the router, and none afterwards in thirty restarts of each role.
"""
_SMOOTHED = 3
"""Sizes are measured under load: the smallest of this many samples counts."""
_BETWEEN_COUNTS_S = 0.05
_CLOSED_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Size:
    """A process's private memory in bytes and its number of open file descriptors."""

    memory: int
    fds: int

    @classmethod
    def of(cls, pid: int, known: Sequence[Size] = ()) -> Size:
        """Measures a process whose earlier sizes are `known`; waits for descriptors that are still being closed."""
        process = psutil.Process(pid)
        fds, deadline_s = _fds(process), time.monotonic() + _CLOSED_WITHIN_S
        while fds > _fds_max(known) and time.monotonic() < deadline_s:
            fds = _fds(process)
        return cls(process.memory_full_info().uss, fds)


def _fds(process: psutil.Process) -> int:
    def one() -> int:
        time.sleep(_BETWEEN_COUNTS_S)
        return process.num_fds()

    return min(one() for _ in range(_SMOOTHED))


def _fds_max(known: Sequence[Size]) -> float:
    """Returns the number of descriptors that a process may have open after another restart."""
    if len(known) < 2:
        return known[0].fds + FIRST_FDS_MAX if known else math.inf
    return known[1].fds


class Growth:
    """The sizes of `survivors`, measured at the start and by each call of `look`."""

    def __init__(self, survivors: Sequence[Health], pool_bytes: int) -> None:
        """Measures the first sizes; `pool_bytes`: a worker's KV pool, which it may not have touched yet."""
        self.survivors = survivors
        self._pool_bytes = pool_bytes
        self._began = time.monotonic()
        self.series: dict[str, list[Size]] = {one.name: [] for one in survivors}
        self.look()

    def look(self) -> None:
        """Measures all survivors after another restart."""
        for one in self.survivors:
            self.series[one.name].append(Size.of(one.pid, self.series[one.name]))

    def check(self) -> None:
        """Raises AssertionError with the name of a process that grew.

        With few restarts, only descriptors and large memory growth are detected.
        """
        for name, sizes in self.series.items():
            check_fds(name, [size.fds for size in sizes])
            memory = [size.memory for size in sizes]
            assert grown(memory) < GROWTH_BYTES_MAX + self._pool_bytes, (name, memory)
            if len(memory) > SETTLED_AFTER + 1:
                assert grown(memory[SETTLED_AFTER:]) < SETTLED_GROWTH_BYTES_MAX, (name, memory)

    def save(self, role: str, **figures: object) -> None:
        """Saves the run to benchmarks/results/."""
        restarts = len(next(iter(self.series.values()))) - 1
        command = "TANDEM_SOAK=1 TANDEM_FAULT_SAVE=1 python -m pytest tests/faults -k restarts"
        series = {
            name: {"memory_mib": [round(size.memory / MIB, 2) for size in sizes], "fds": [size.fds for size in sizes]}
            for name, sizes in self.series.items()
        }
        run = {"model": "random weights, 8 layers, 8 KiB of KV a token", "dtype": "float32", "restarted": role}
        run |= {"restarts": restarts, "took_s": round(time.monotonic() - self._began, 1), **figures, "series": series}
        save_result(f"restarts-{role}", run_facts("cpu") | {"command": command} | run)


def check_fds(name: str, fds: Sequence[int]) -> None:
    """Raises AssertionError if the first restart added too many descriptors, or a later one any."""
    assert fds[1] - fds[0] <= FIRST_FDS_MAX, (name, fds)
    assert grown(fds[1:]) <= 0, (name, fds)


def grown(series: Sequence[int]) -> int:
    """Returns the growth from the beginning of a series to its end, 0 if it is too short to say."""
    smoothed = min(_SMOOTHED, len(series) // 2)
    return min(series[-smoothed:]) - min(series[:smoothed]) if smoothed else 0
