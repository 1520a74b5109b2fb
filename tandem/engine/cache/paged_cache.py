"""The memory of the KV cache: one allocation, in which each page is a contiguous range with all layers of a group."""

import itertools
import mmap
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tandem.engine.config.kv import (
    ALIGNMENT,
    WASTE,
    KvGroup,
    PageGroup,
    StateGroup,
    head_bytes,
    kv_groups,
    layer_bytes,
    page_layers,
    recurrent_bytes,
    state_of,
)
from tandem.engine.config.model import ModelSpec
from tandem.engine.kernels.kv_cache import (
    SCALE_BYTES,
    GroupCache,
    KvCache,
    StateCache,
    is_quantized,
    kv_view,
)
from tandem.engine.memory import GIB, free_bytes
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.kv_pages import KvPages, window_name

_SCRATCH_PAGES = 1
"""The number of pages that no request gets: only the scratch page, to which other workers write test data."""
_STEP = 16
"""The default page size of a model with state layers is raised in steps of this number of tokens."""


class PagedCache:
    """The memory of a paged KV cache: pages of equal size, initially zero.

    Each page has the KV or the states of one group of layers (`tandem/engine/config/kv.py`).

    `views` has the view for kernels of each group, over all pages. For layers with KV it is
    [pages + 1, layers, parts, kv_heads, page_tokens, head_dim], or a `QuantizedKv` with an 8-bit dtype. `layers` are
    the layers of the group. Index 0 of the dimension `parts` is keys and 1 is values; latent attention has one part.
    If keys and values have different dimensions, it is an `UnequalKv`. The strides may have any order (`kernel_view`).
    For state layers the view is a `StateCache`.
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
        model_dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate the scratch page and as many whole pages for requests as fit into `capacity_bytes` together.

        `dtype` is the dtype of the elements, or int8 or float8_e4m3fn for codes with scales. `step_tokens` is the
        maximum number of prompt tokens in a step; the number of pages that a request needs depends on it.
        `model_dtype` is the dtype of activations, which state layers keep; None = `dtype`. Raises InvalidArgument if no
        page is left for requests, or if `device` has too little free memory.
        """
        self.groups = kv_groups(spec)
        self.model_dtype = dtype if model_dtype is None else model_dtype
        self.page_tokens = page_tokens
        self.kv_pages = KvPages(page_tokens, tuple(kv_group.window for kv_group in self.groups), step_tokens)
        self.item_bytes = dtype.itemsize
        self.scale_bytes = SCALE_BYTES if is_quantized(dtype) else 0
        size = page_bytes(spec, page_tokens, dtype, model_dtype)
        self.pages = capacity_bytes // size - _SCRATCH_PAGES
        if self.pages < 1:
            least = (1 + _SCRATCH_PAGES) * size
            raise InvalidArgument("kv_cache_bytes", f"{capacity_bytes} bytes hold no page; one needs {least} bytes.")
        self.storage = _zeros((self.pages + _SCRATCH_PAGES, size // dtype.itemsize), dtype, device)
        self.views = group_views(self.storage, self.groups, page_tokens, self.model_dtype)

    @property
    def page_bytes(self) -> int:
        """The size of one page in bytes, with all layers of its group."""
        return self.storage[0].nbytes

    @property
    def first(self) -> KvGroup:
        """The first group of layers, which always has KV."""
        group = self.groups[0]
        assert isinstance(group, KvGroup)
        return group

    @property
    def tensor(self) -> KvCache:
        """The view of the first group; the only one of most models without sliding windows."""
        view = self.views[0]
        assert not isinstance(view, StateCache)
        return view

    @property
    def element_bytes(self) -> float:
        """The size of one element in bytes, including the element's share of its scale."""
        dims = self.first.dims
        return self.item_bytes + self.scale_bytes * len(dims) / sum(dims)

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
            ("layout", "; ".join(self.layouts)),
            ("windows", ", ".join(window_name(group.window) for group in self.groups)),
            ("page_tokens", str(self.page_tokens)),
        )

    @property
    def layouts(self) -> tuple[str, ...]:
        """The order of the elements in the pages, one text for each order that a group has, the first group's first."""
        return self.layouts_of([(group.heads, group.depth) for group in self.groups])

    def layouts_of(self, sizes: Sequence[tuple[int, int]]) -> tuple[str, ...]:
        """Return `layouts` of a cache whose groups have these numbers of heads and of layers in a page."""
        texts = (self._layout(group, *size) for group, size in zip(self.groups, sizes, strict=True))
        return tuple(dict.fromkeys(texts))

    def _layout(self, group: PageGroup, heads: int, layers: int) -> str:
        if isinstance(group, KvGroup):
            dims = " and ".join(map(str, dict.fromkeys(group.dims)))
            return f"pages,{heads} heads,{layers} layers,{len(group.dims)} parts,tokens,{dims} dims"
        shape, dtype = group.shape, str(self.model_dtype).removeprefix("torch.")
        state = "x".join(map(str, shape.state)) or "no"
        return (
            f"pages,{heads} heads,{layers} layers,{state} state,{shape.channels} channels,{shape.inputs} inputs,{dtype}"
        )


def page_bytes(spec: ModelSpec, page_tokens: int, dtype: torch.dtype, model_dtype: torch.dtype | None = None) -> int:
    """Return the size of one page in bytes, including its scales; the arguments are those of `PagedCache`."""
    groups = kv_groups(spec)
    item_bytes = (model_dtype or dtype).itemsize
    most = max(used_bytes(group, page_tokens, dtype, item_bytes) for group in groups)
    # The views of states need addresses that are multiples of their alignment in every page.
    aligned = any(isinstance(group, StateGroup) for group in groups)
    return -(-most // ALIGNMENT) * ALIGNMENT if aligned else most


def cache_bytes(
    spec: ModelSpec, pages: int, page_tokens: int, dtype: torch.dtype, model_dtype: torch.dtype | None = None
) -> int:
    """Return the minimum capacity in bytes of a cache with `pages` pages for requests, including its scratch page."""
    return (pages + _SCRATCH_PAGES) * page_bytes(spec, page_tokens, dtype, model_dtype)


def choose_pages(
    spec: ModelSpec, page_tokens: int | None, default: int, dtype: torch.dtype, model_dtype: torch.dtype
) -> tuple[ModelSpec, int]:
    """Return the spec with the number of layers per page, and the number of tokens per page, None = the default.

    A page has the states of as many layers as fit into the KV of its tokens. The default is raised to the smallest
    multiple of _STEP with which the states leave at most 1 / `WASTE` of their pages unused. Raises InvalidArgument if a
    page of the given size is too small for the state of one layer.
    """
    layers = Counter(state for layer in spec.layers if (state := state_of(layer)) is not None)
    if not layers or spec.page_layers:
        return spec, default if page_tokens is None else page_tokens
    sizes = {shape: layer_bytes(shape, model_dtype.itemsize) for shape in layers}
    with_kv = [group for group in kv_groups(spec) if isinstance(group, KvGroup)]

    def kv_bytes(tokens: int) -> int:
        return max(used_bytes(group, tokens, dtype, model_dtype.itemsize) for group in with_kv)

    def fits(tokens: int) -> bool:
        page = kv_bytes(tokens)
        return all(
            page >= size * layers[shape] or (page >= size and WASTE * (page % size) <= page)
            for shape, size in sizes.items()
        )

    least = -(-max(sizes.values()) // kv_bytes(1))
    if page_tokens is None:
        page_tokens = next(tokens for tokens in itertools.count(default, _STEP) if fits(tokens))
    elif page_tokens < least:
        raise InvalidArgument(
            "page_tokens", f"{page_tokens} tokens of KV are smaller than the state of a layer; use {least} or more."
        )
    page = kv_bytes(page_tokens)
    return replace(spec, page_layers=page_layers(spec, lambda shape: page // sizes[shape])), page_tokens


def group_views(
    memory: Tensor, groups: Sequence[PageGroup], page_tokens: int, model_dtype: torch.dtype
) -> tuple[GroupCache, ...]:
    """Return the view of each group over `memory` [pages, elements], in which all groups have their pages.

    Groups whose pages are alike have the same view.
    """
    alike = [_alike(group) for group in groups]
    views = {
        group: state_view(memory, group, model_dtype)
        if isinstance(group, StateGroup)
        else kernel_view(memory, group, page_tokens)
        for group in dict.fromkeys(alike)
    }
    return tuple(views[group] for group in alike)


def _alike(group: PageGroup) -> PageGroup:
    """Return the group without its layers and its window, on which the memory of a page does not depend."""
    if isinstance(group, StateGroup):
        return replace(group, layers=())
    return replace(group, layers=(), window=None)


def kernel_view(memory: Tensor, group: KvGroup, page_tokens: int) -> KvCache:
    """Return `memory` [pages, elements] as a view [pages, layers, parts, heads, page_tokens, dim].

    In memory a page is head-major, so that any range of heads is one contiguous slice. Only this function and
    `state_view` depend on this order: kernels take the strides from the tensor. Elements at the end of a page that the
    group does not need are left out.
    """
    memory = memory[:, : used_bytes(group, page_tokens, memory.dtype) // memory.element_size()]
    return kv_view(memory.view(len(memory), group.heads, group.depth, -1).transpose(1, 2), group.dims, page_tokens)


def state_view(memory: Tensor, group: StateGroup, model_dtype: torch.dtype) -> StateCache:
    """Return `memory` [pages, elements] as a view of the states of a group of state layers.

    In memory a page is [heads, layers, bytes of a head's state], so that any range of heads is one contiguous slice.
    """
    shape, pages = group.shape, len(memory)
    head, state_bytes = head_bytes(shape, model_dtype.itemsize), recurrent_bytes(shape)
    planes = memory.view(torch.uint8)[:, : group.heads * group.depth * head].view(pages, group.heads, group.depth, head)
    planes = planes.transpose(1, 2)
    inputs = planes[..., state_bytes : state_bytes + shape.channels * shape.inputs * model_dtype.itemsize]
    states = planes[..., :state_bytes].view(torch.float32) if shape.state else None
    outer = planes.shape[:3]
    return StateCache(
        None if states is None else states.view(*outer, *shape.state),
        inputs.view(model_dtype).view(*outer, shape.channels, shape.inputs),
    )


def used_bytes(group: PageGroup, page_tokens: int, dtype: torch.dtype, item_bytes: int = 0) -> int:
    """Return the bytes that a group needs of a page.

    `item_bytes` is the size of an element of the model's dtype; only states depend on it.
    """
    if isinstance(group, StateGroup):
        return group.depth * layer_bytes(group.shape, item_bytes)
    scales = SCALE_BYTES * group.depth * group.heads * len(group.dims) if is_quantized(dtype) else 0
    return page_tokens * (group.elements * dtype.itemsize + scales)


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
