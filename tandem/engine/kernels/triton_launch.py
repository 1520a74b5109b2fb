"""Programmatic dependent launch (PDL) for all Triton kernels of this package, and Triton's interpreter mode.

With PDL a kernel may start while the kernel before it still runs, and read weights at once. Before it accesses data
that an earlier kernel writes, or writes data that an earlier kernel reads, it calls `wait_for_inputs`, which returns
when all earlier kernels have ended and their writes are visible. Each kernel must call it exactly once, on every path,
because the next kernel relies on this one having waited.
"""

import ctypes
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""True if kernels run in Triton's interpreter, on the CPU."""

_PREFERRED_CARVEOUT = 9
"""The number of the attribute CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT."""

OVERLAPPED_CAPABILITY = (9, 0)
"""Minimum compute capability of GPUs whose launches can overlap."""


def overlaps_launches() -> bool:
    """Return True if this process launches kernels with PDL (`launch_pdl=True` and `PDL=True`)."""
    return not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability() >= OVERLAPPED_CAPABILITY


def prefer_shared_memory(compiled: Any, percent: int) -> None:
    """Make multiprocessors use about `percent` of their memory as shared memory for this kernel, the rest as L1 cache.

    `compiled` is the return value of a launch. By default a kernel with large tiles gets the maximum of shared memory.
    But a multiprocessor runs two kernels concurrently only if both use the same split, and the kernels before and after
    attention have no tiles: with the default they could not overlap with attention, and a decode step would gain
    nothing from PDL. The split also bounds the number of programs that run concurrently, because their tiles must fit
    into shared memory. docs/decisions/attention_kernels.md measures both effects.
    """
    if not INTERPRETED:
        _prefer_carveout(compiled.function, percent)


@lru_cache(maxsize=1024)
def _prefer_carveout(function: int, percent: int) -> None:
    status = ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(ctypes.c_void_p(function), _PREFERRED_CARVEOUT, percent)
    if status:
        raise RuntimeError(f"CUDA refused a kernel's share of shared memory (error {status})")


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Allow the next kernel to start.

    Kernels call this first, because a kernel that starts early costs only registers.
    """
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait until all writes of earlier kernels are visible."""
    if PDL:
        gdc_wait()
