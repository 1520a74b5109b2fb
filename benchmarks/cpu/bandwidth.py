"""The cores' memory read bandwidth: the ceiling of every decode step."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numba import njit

_BYTES = 1 << 28
"""The size of the array read, far more than the caches hold."""


@njit(nogil=True, fastmath=True)  # type: ignore[untyped-decorator]
def _sum(values: Any) -> Any:
    total = np.float32(0)
    for i in range(len(values)):
        total += values[i]
    return total


def read_bandwidth(threads: int, rounds: int = 7) -> float:
    """Returns the bandwidth at which `threads` threads read together, the best of `rounds`, in GB/s."""
    values = np.ones(_BYTES // 4, dtype=np.float32)
    parts = np.array_split(values, threads)
    _sum(parts[0][:16])
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(rounds):
            started = time.perf_counter()
            list(pool.map(_sum, parts))
            best = min(best, time.perf_counter() - started)
    return values.nbytes / best / 1e9
