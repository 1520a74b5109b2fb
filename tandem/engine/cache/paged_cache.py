"""The memory of the KV cache: one allocation, in which each page is a contiguous range with all layers of a group."""

import mmap

import torch
from torch import Tensor

from tandem.engine.config.kv import KvGroup, kv_groups
from tandem.engine.config.model import ModelSpec
from tandem.engine.kernels.kv_cache import SCALE_BYTES, KvCache, QuantizedKv, is_quantized
from tandem.engine.memory import GIB, free_bytes
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.kv_pages import KvPages

_SCRATCH_PAGES = 1
"""The number of pages that no request gets: only the scratch page, to which other workers write test data."""


class PagedCache:
    """The memory of a paged KV cache: pages of equal size, initially zero.

    Each page has the KV of one group of layers (`tandem/engine/config/kv.py`).

    `tensor` [pages + 1, layers, parts, kv_heads, page_tokens, head_dim] is the view for kernels. `layers` are the
    layers of the group that owns the page. Index 0 of the dimension `parts` is keys and 1 is values; latent attention
    has one part. The strides of `tensor` may have any order (`kernel_view`). With an 8-bit dtype it is a `QuantizedKv`.
    `storage` [pages + 1, elements] is the memory of all pages.

    The last page, number `pages`, is a scratch page that belongs to no request: other workers write to it to test a
    connection. The model runner owns this object, and this object owns the memory: transfers may use its addresses as
    long as this object exists.
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
        """Allocate the scratch page and as many whole pages for requests as fit into `capacity_bytes` together.

        `dtype` is the dtype of the elements, or int8 or float8_e4m3fn for codes with scales. `step_tokens` is the
        maximum number of prompt tokens in a step; the number of pages that a request needs depends on it. Raises
        InvalidArgument if no page is left for requests, or if `device` has too little free memory.
        """
        self.groups = kv_groups(spec)
        group = self.groups[0]
        self.layers, self.parts, self.kv_heads, self.head_dim = group.depth, group.parts, group.heads, group.dim
        self.page_tokens = page_tokens
        self.kv_pages = KvPages(page_tokens, tuple(kv_group.window for kv_group in self.groups), step_tokens)
        self.item_bytes = dtype.itemsize
        self.scale_bytes = SCALE_BYTES if is_quantized(dtype) else 0
        self.pages = capacity_bytes // page_bytes(spec, page_tokens, dtype) - _SCRATCH_PAGES
        if self.pages < 1:
            least = cache_bytes(spec, 1, page_tokens, dtype)
            raise InvalidArgument("kv_cache_bytes", f"{capacity_bytes} bytes hold no page; one needs {least} bytes.")
        page_items = page_bytes(spec, page_tokens, dtype) // dtype.itemsize
        self.storage = _zeros((self.pages + _SCRATCH_PAGES, page_items), dtype, device)
        self.tensor = kernel_view(self.storage, group, page_tokens)

    @property
    def page_bytes(self) -> int:
        """The size of one page in bytes, with all layers of its group."""
        return self.storage[0].nbytes

    @property
    def element_bytes(self) -> float:
        """The size of one element in bytes, including the element's share of its scale."""
        return self.item_bytes + self.scale_bytes / self.head_dim

    @property
    def base_address(self) -> int:
        """The address of page 0 in this process; for a GPU, a device address."""
        return self.storage.data_ptr()

    @property
    def dtype(self) -> str:
        """The dtype of the elements or codes, in torch's spelling, for example `bfloat16`."""
        return str(self.storage.dtype).removeprefix("torch.")

    @property
    def device(self) -> torch.device:
        """The device that the memory is on."""
        return self.storage.device

    @property
    def memory(self) -> str:
        """The kind of memory: `DRAM` (host) or `VRAM` (GPU)."""
        return "VRAM" if self.storage.is_cuda else "DRAM"

    @property
    def device_id(self) -> int:
        """The GPU's ordinal; 0 for host memory."""
        return self.device.index or 0

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        """The properties that two caches must have in common for transfers between them, as (name, value)."""
        return (
            ("kv_cache_dtype", self.dtype),
            (
                "layout",
                f"pages,{self.kv_heads} heads,{self.layers} layers,{self.parts} parts,tokens,{self.head_dim} dims",
            ),
            ("windows", ", ".join("none" if group.window is None else str(group.window) for group in self.groups)),
            ("page_tokens", str(self.page_tokens)),
        )


def page_bytes(spec: ModelSpec, page_tokens: int, dtype: torch.dtype) -> int:
    """Return the size of one page in bytes, including its scales."""
    group = kv_groups(spec)[0]
    scales = SCALE_BYTES * group.elements // group.dim if is_quantized(dtype) else 0
    return page_tokens * (group.elements * dtype.itemsize + scales)


def cache_bytes(spec: ModelSpec, pages: int, page_tokens: int, dtype: torch.dtype) -> int:
    """Return the minimum capacity in bytes of a cache with `pages` pages for requests, including its scratch page."""
    return (pages + _SCRATCH_PAGES) * page_bytes(spec, page_tokens, dtype)


def kernel_view(memory: Tensor, group: KvGroup, page_tokens: int) -> KvCache:
    """Return `memory` [pages, elements] as a view [pages, layers, parts, heads, page_tokens, dim].

    In memory a page is head-major, so that any range of heads is one contiguous slice. Only this function depends on
    this order: kernels take the strides from the tensor.
    """
    outer = (len(memory), group.heads, group.depth, group.parts)
    if not is_quantized(memory.dtype):
        return memory.view(*outer, page_tokens, group.dim).permute(0, 2, 3, 1, 4, 5)
    planes = memory.view(*outer, -1).permute(0, 2, 3, 1, 4)
    codes, scales = planes.tensor_split([page_tokens * group.dim], dim=-1)
    return QuantizedKv(codes.view(*codes.shape[:-1], page_tokens, group.dim), scales.view(torch.float32))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeroed memory. Raises InvalidArgument if the device has too little free memory."""
    size = torch.Size(shape).numel() * dtype.itemsize
    try:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        # The operating system may overcommit: it grants more memory than it has, and kills the worker once the pages
        # are written. So the free memory is checked first.
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
    """Return anonymous private memory: zero, page-aligned, and resident only once it is touched."""
    size = torch.Size(shape).numel() * dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
