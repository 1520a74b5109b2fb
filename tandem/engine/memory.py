"""Device memory: weights, and on a GPU a KV cache in what they, steps and CUDA graphs leave."""

import contextlib
import gc
from collections.abc import Callable, Iterator

import psutil
import torch

from tandem.protocol.errors import InvalidArgument

GIB = 1 << 30
_OUTSIDE_BYTES = 3 * GIB // 4
"""The process's memory outside PyTorch's allocator: the CUDA context, libraries, loaded kernels."""


def free_bytes(device: torch.device) -> int:
    """Returns the free bytes of `device`."""
    return int(psutil.virtual_memory().available if device.type == "cpu" else torch.cuda.mem_get_info(device)[0])


def check_host_memory(weights: int) -> None:
    """Raises InvalidArgument if `weights` bytes do not fit into the host's free memory.

    An operating system overcommits, and kills the process that writes there.
    """
    free = free_bytes(torch.device("cpu"))
    if weights > free:
        raise InvalidArgument(
            "device",
            f"the weights take {weights / GIB:.2f} GiB, and {free / GIB:.2f} GiB of this host's memory are free; use a"
            " GPU, another dtype or a smaller model.",
        )


def measure_peak(device: torch.device, run: Callable[[], object]) -> int:
    """Returns the bytes that `run` takes beyond what is allocated now, at its peak including what it keeps."""
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
    """Returns the bytes for the KV cache in a process that may use `fraction` of the GPU.

    The weights are on the GPU already, and `step_bytes` are needed for steps and graphs. InvalidArgument, with the
    setting to change, if nothing is left.
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
    """Raises InvalidArgument with the settings to change when the code inside runs out of `device`'s memory."""
    try:
        yield
    except RuntimeError as error:
        if not ran_out_of_memory(error):
            raise
        raise no_memory(device) from error


def ran_out_of_memory(error: RuntimeError) -> bool:
    """Returns True for the out-of-memory errors of PyTorch, CUDA and cuBLAS, which differ in wording."""
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "alloc_failed" in text


def no_memory(device: torch.device) -> InvalidArgument:
    """Returns the error of a GPU that ran out of memory at start."""
    free, total = torch.cuda.mem_get_info(device)
    return InvalidArgument(
        "kv_cache_bytes",
        f"{device} ran out of memory ({free / GIB:.1f} of {total / GIB:.0f} GiB are free); lower kv_cache_bytes,"
        " memory_fraction, max_step_tokens or max_batch_requests.",
    )
