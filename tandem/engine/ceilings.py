"""Measures the peak rates of a device in a fraction of a second, as the reference for utilization.

The two rates are the FLOP/s of a large matrix product in the model's dtype, and the memory bandwidth. The bandwidth is
measured on a GPU by a copy, counting both read and written bytes, and on a CPU by all threads reading together. The
operands are random numbers, because a product of zeros takes less power and runs faster. Other users of the device slow
some rounds down, so only fast rounds count.
"""

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import torch

from tandem.cost_model.roofline import CPU, GPU
from tandem.engine.memory import ran_out_of_memory
from tandem.settings.ceilings import Ceilings

log = logging.getLogger(__name__)

_COPY_BYTES = 256 << 20
_COPY_ROUNDS = 24
_MATRIX = 8192
_PRODUCTS_S = 0.15
"""Duration of the matrix products in seconds.

An idle chip is faster at first than it can sustain, so only the second half counts.
"""
_PRODUCTS_LEAST, _PRODUCTS_MOST = 4, 400
_FAST_PART = 4
"""`_fast` skips the fastest 1 / `_FAST_PART` of all rounds, and returns the time of the next fastest round."""
_CPU_READ_BYTES = 128 << 20
_CPU_MATRIX = 512
_CPU_ROUNDS_S = 0.1
"""The duration of each measurement on a CPU, in seconds."""


def measure_ceilings(device: torch.device, dtype: torch.dtype, threads: int | None = None) -> Ceilings:
    """Measure the peak FLOP/s in `dtype` and the memory bandwidth of `device`.

    On a CPU, `threads` threads are used (None = all cores). Nothing else in this process may compute during the
    measurement. The fixed cost of a step is assumed, not measured. If there is not enough memory to measure (about half
    a GiB on a GPU, an eighth of a GiB on a CPU), the rates of a typical device are returned.
    """
    typical = GPU if device.type == "cuda" else CPU
    began = time.perf_counter()
    try:
        flops, bandwidth = _of_gpu(device, dtype) if device.type == "cuda" else _of_cpu(dtype, threads)
    except RuntimeError as error:
        if not ran_out_of_memory(error):
            raise
        log.warning("%s has no memory to measure its ceilings: a typical device's are used", device)
        return typical
    seconds = time.perf_counter() - began
    log.info("%s: %.3g TFLOP/s, %.0f GB/s, measured in %.2f s", device, flops / 1e12, bandwidth / 1e9, seconds)
    return Ceilings(flops, bandwidth, typical.launch_s)


def _of_gpu(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Return the FLOP/s and bytes per second of a GPU, measured on the current stream; free the memory afterwards."""
    with torch.cuda.device(device), torch.inference_mode():
        try:
            bandwidth, flops = _copy_bandwidth(device), _product_rate(device, dtype)
        finally:
            torch.cuda.empty_cache()
    return flops, bandwidth


def _copy_bandwidth(device: torch.device) -> float:
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / _fast(event_seconds(lambda: target.copy_(source), _COPY_ROUNDS))


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    a, b = (torch.randn(_MATRIX, _MATRIX, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)

    def product() -> None:
        torch.mm(a, b, out=out)

    one_s = min(event_seconds(product, 2))
    count = min(_PRODUCTS_MOST, max(_PRODUCTS_LEAST, int(_PRODUCTS_S / one_s)))
    return 2 * _MATRIX**3 / _fast(event_seconds(product, count)[count // 2 :])


def event_seconds(run: Callable[[], object], rounds: int) -> list[float]:
    """Return the device time of each round in seconds; rounds are launched back to back, after one warm-up round."""
    run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairwise(marks)]


def _of_cpu(dtype: torch.dtype, threads: int | None) -> tuple[float, float]:
    """Return the FLOP/s and the bytes per second of a CPU, measured with one thread per core.

    PyTorch's own threads are not used, because they would later spin between the engine's kernels. The engine can
    compute in float32 if the hardware does not support `dtype`, so the FLOP/s are the higher of the two rates.
    """
    count = threads or len(os.sched_getaffinity(0))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(count, "ceilings") as pool:
            read_s = _rounds(pool, _readers(pool, count))
            product_s = min(_rounds(pool, [_product(candidate)] * count) for candidate in {dtype, torch.float32})
    finally:
        torch.set_num_threads(before)
    return count * 2 * _CPU_MATRIX**3 / product_s, _CPU_READ_BYTES // count * count / read_s


def _readers(pool: ThreadPoolExecutor, count: int) -> list[Callable[[], object]]:
    """Return `count` functions, one for each thread; each function reads a separate part of the memory.

    The threads of the pool have written to all parts before.
    """
    part = _CPU_READ_BYTES // count // torch.float32.itemsize
    return [values.sum for values in pool.map(torch.ones, [part] * count)]


def _product(dtype: torch.dtype) -> Callable[[], object]:
    a, b = (torch.randn(_CPU_MATRIX, _CPU_MATRIX, dtype=dtype) for _ in range(2))
    return lambda: torch.mm(a, b)


def _rounds(
    pool: ThreadPoolExecutor,
    jobs: list[Callable[[], object]],
    seconds: float = _CPU_ROUNDS_S,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Run rounds for `seconds` seconds, at least two, and return the time of the fastest in seconds.

    A round runs all jobs concurrently.
    """
    times: list[float] = []
    ends = clock() + seconds
    while len(times) < 2 or clock() < ends:
        began = clock()
        list(pool.map(lambda job: job(), jobs))
        times.append(clock() - began)
    return min(times)


def _fast(times: list[float]) -> float:
    """Return the time of a fast round; other users slow some rounds down, and the fastest may be an outlier."""
    return sorted(times)[len(times) // _FAST_PART]
