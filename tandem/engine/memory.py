"""Device memory: how much the weights need, and how much of a GPU is left for the KV cache."""

import contextlib
import gc
from collections.abc import Callable, Iterator

import psutil
import torch

from tandem.protocol.errors import InvalidArgument

GIB = 1 << 30
_OUTSIDE_BYTES = 3 * GIB // 4
"""GPU memory of the process outside PyTorch's allocator: the CUDA context, libraries and loaded kernels."""


def free_bytes(device: torch.device) -> int:
    """Return the free memory of `device` in bytes."""
    return int(psutil.virtual_memory().available if device.type == "cpu" else torch.cuda.mem_get_info(device)[0])


def check_host_memory(weights: int) -> None:
    """Raise InvalidArgument if `weights` bytes exceed the free memory of the host.

    Without this check the operating system would overcommit, and kill the process when it writes to the memory.
    """
    free = free_bytes(torch.device("cpu"))
    if weights > free:
        raise InvalidArgument(
            "device",
            f"the weights take {weights / GIB:.2f} GiB, and {free / GIB:.2f} GiB of this host's memory are free; use a"
            " GPU, another dtype or a smaller model.",
        )


def measure_peak(device: torch.device, run: Callable[[], object]) -> int:
    """Return the peak memory in bytes that `run` allocates in addition to the current memory, including its result."""
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    kept = run()
    torch.cuda.synchronize(device)
    peak = torch.cuda.memory_reserved(device) - before
    del kept
    gc.collect()
    torch.cuda.empty_cache()
    return max(0, peak)


def kv_cache_bytes(device: torch.device, fraction: float, step_bytes: int) -> int:
    """Return the memory in bytes for the KV cache of a process that may use `fraction` of the GPU's memory.

    The weights are on the GPU already; `step_bytes` are needed for steps and graphs. Raises InvalidArgument, which
    names the setting to change, if nothing is left.
    """
    free, total = torch.cuda.mem_get_info(device)
    taken = torch.cuda.memory_reserved(device) + _OUTSIDE_BYTES
    left = min(int(total * fraction) - taken, free) - step_bytes
    if left <= 0:
        raise InvalidArgument(
            "memory_fraction",
            f"{fraction:g} of {device}'s {total / GIB:.0f} GiB leaves no memory for a KV cache: weights take"
            f" {taken / GIB:.1f} GiB, steps and graphs {step_bytes / GIB:.1f} GiB, {free / GIB:.1f} GiB are free;"
            " raise memory_fraction, lower max_step_tokens or max_batch_requests, or free the GPU.",
        )
    return left


@contextlib.contextmanager
def naming_the_setting(device: torch.device) -> Iterator[None]:
    """Convert an out-of-memory error of the `with` block into InvalidArgument, which names the settings to change."""
    try:
        yield
    except RuntimeError as error:
        if not ran_out_of_memory(error):
            raise
        raise no_memory(device) from error


def ran_out_of_memory(error: RuntimeError) -> bool:
    """Return True for an out-of-memory error of PyTorch, CUDA or cuBLAS, which differ in their wording."""
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "alloc_failed" in text


def no_memory(device: torch.device) -> InvalidArgument:
    """Return the error for a GPU that ran out of memory during the start."""
    free, total = torch.cuda.mem_get_info(device)
    return InvalidArgument(
        "kv_cache_bytes",
        f"{device} ran out of memory ({free / GIB:.1f} of {total / GIB:.0f} GiB are free); lower kv_cache_bytes,"
        " memory_fraction, max_step_tokens or max_batch_requests.",
    )
