"""The KV cache's memory: one block-major tensor, in which a page is one contiguous range over all layers."""

import mmap

import torch
from torch import Tensor

from engine.config.kv import kv_group
from engine.config.model import ModelSpec
from engine.memory import GIB, free_bytes
from wire.errors import InvalidArgument

_SCRATCH_PAGES = 1
"""The number of pages of a cache that no request owns."""


class PagedCache:
    """[pages + 1, layers, parts, kv_heads, page_tokens, head_dim], zeroed.

    Index 0 of the third dimension is keys, 1 values; latent attention has one part.

    Page number `pages`, the last one, belongs to no request: other workers write to it to test a connection. This
    object owns the memory: addresses handed to a transfer are valid as long as it lives.
    """

    def __init__(
        self, spec: ModelSpec, page_tokens: int, capacity_bytes: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocates as many whole pages as fit into `capacity_bytes`, one of them the page of no request.

        InvalidArgument if that leaves none, or `device` has less memory.
        """
        group = kv_group(spec)
        self.layers, self.parts, self.kv_heads, self.head_dim = len(group.layers), group.parts, group.heads, group.dim
        self.page_tokens = page_tokens
        self.item_bytes = dtype.itemsize
        self.pages = capacity_bytes // page_bytes(spec, page_tokens, dtype) - _SCRATCH_PAGES
        if self.pages < 1:
            least = cache_bytes(spec, 1, page_tokens, dtype)
            raise InvalidArgument("kv_cache_bytes", f"{capacity_bytes} bytes hold no page; one needs {least} bytes.")
        shape = (self.pages + _SCRATCH_PAGES, self.layers, self.parts, self.kv_heads, page_tokens, self.head_dim)
        self.tensor = _zeros(shape, dtype, device)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self.tensor[0].numel() * self.item_bytes

    @property
    def base_address(self) -> int:
        """The address of page 0 in this process; on a GPU, a device address."""
        return self.tensor.data_ptr()

    @property
    def dtype(self) -> str:
        """Element type in torch's spelling, e.g. `bfloat16`."""
        return str(self.tensor.dtype).removeprefix("torch.")

    @property
    def memory(self) -> str:
        """`DRAM` or `VRAM`."""
        return "VRAM" if self.tensor.is_cuda else "DRAM"

    @property
    def device_id(self) -> int:
        """GPU ordinal; 0 for host memory."""
        return self.tensor.device.index or 0


def page_bytes(spec: ModelSpec, page_tokens: int, dtype: torch.dtype) -> int:
    """Returns the bytes of one page over all layers."""
    return kv_group(spec).elements * page_tokens * dtype.itemsize


def cache_bytes(spec: ModelSpec, pages: int, page_tokens: int, dtype: torch.dtype) -> int:
    """Returns the least capacity of a cache of `pages` pages, including the page of no request."""
    return (pages + _SCRATCH_PAGES) * page_bytes(spec, page_tokens, dtype)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns zeroed memory; InvalidArgument if there is not enough."""
    size = torch.Size(shape).numel() * dtype.itemsize
    try:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        # The operating system may promise more than it has, and kill the worker once the pages are written.
        if size <= free_bytes(device):
            return _host_zeros(shape, dtype)
    except (OSError, torch.OutOfMemoryError) as error:
        raise _too_large(size, device) from error
    raise _too_large(size, device)


def _too_large(size: int, device: torch.device) -> InvalidArgument:
    wanted, free = size / GIB, free_bytes(device) / GIB
    return InvalidArgument(
        "kv_cache_bytes",
        f"{wanted:.2f} GiB do not fit into the {free:.2f} GiB that are free on {device}; choose a smaller KV cache.",
    )


def _host_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns new private pages of the operating system: zero, aligned, and resident only once they are touched."""
    size = torch.Size(shape).numel() * dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
