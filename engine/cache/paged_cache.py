"""The KV cache's memory: one block-major allocation, in which a page is one contiguous range over its layers."""

import mmap

import torch
from torch import Tensor

from engine.config.kv import KvGroup, kv_groups
from engine.config.model import ModelSpec
from engine.memory import GIB, free_bytes
from wire.errors import InvalidArgument
from wire.kv_pages import KvPages

_SCRATCH_PAGES = 1
"""The number of pages of a cache that no request owns."""


class PagedCache:
    """Pages of equal size, each with the KV of one group's layers (`engine/config/kv.py`), zeroed.

    `tensor` [pages + 1, layers, parts, kv_heads, page_tokens, head_dim] is the view for kernels: `layers` are those of
    a group, whichever owns the page. Index 0 of the third dimension is keys, 1 values; latent attention has one part.
    Its strides may have any order (`_kernel_view`).

    Page number `pages`, the last one, belongs to no request: other workers write to it to test a connection. This
    object owns the memory: addresses handed to a transfer are valid as long as it lives.
    """

    def __init__(
        self,
        spec: ModelSpec,
        page_tokens: int,
        capacity_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        step_tokens: int = 0,
    ) -> None:
        """Allocates as many whole pages as fit into `capacity_bytes`, one of them the page of no request.

        `step_tokens` is the most prompt tokens of a step, which the forecast of a request's pages depends on.

        InvalidArgument if that leaves none, or `device` has less memory.
        """
        self.groups = kv_groups(spec)
        group = self.groups[0]
        self.layers, self.parts, self.kv_heads, self.head_dim = group.depth, group.parts, group.heads, group.dim
        self.page_tokens = page_tokens
        self.kv_pages = KvPages(page_tokens, tuple(each.window for each in self.groups), step_tokens)
        self.item_bytes = dtype.itemsize
        self.pages = capacity_bytes // page_bytes(spec, page_tokens, dtype) - _SCRATCH_PAGES
        if self.pages < 1:
            least = cache_bytes(spec, 1, page_tokens, dtype)
            raise InvalidArgument("kv_cache_bytes", f"{capacity_bytes} bytes hold no page; one needs {least} bytes.")
        memory = _zeros((self.pages + _SCRATCH_PAGES, group.elements * page_tokens), dtype, device)
        self.tensor = _kernel_view(memory, group, page_tokens)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over its layers."""
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
    """Returns the bytes of one page over its layers."""
    return kv_groups(spec)[0].elements * page_tokens * dtype.itemsize


def cache_bytes(spec: ModelSpec, pages: int, page_tokens: int, dtype: torch.dtype) -> int:
    """Returns the least capacity of a cache of `pages` pages, including the page of no request."""
    return (pages + _SCRATCH_PAGES) * page_bytes(spec, page_tokens, dtype)


def _kernel_view(memory: Tensor, group: KvGroup, page_tokens: int) -> Tensor:
    """Returns `memory` [pages, elements] as [pages, layers, parts, heads, page_tokens, dim].

    In memory a page is head-major, so that any range of heads is one contiguous slice. This is the one place that
    knows it: kernels take the strides from the tensor.
    """
    ordered = memory.view(len(memory), group.heads, group.depth, group.parts, page_tokens, group.dim)
    return ordered.permute(0, 2, 3, 1, 4, 5)


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
