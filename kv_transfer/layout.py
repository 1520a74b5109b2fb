"""The addresses and strides of the paged KV cache, which the transfer needs because it does not know the engine."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVLayout:
    """A pool of pages in block-major order [pages, kv_heads, layers, parts, page_tokens, head_dim].

    One page of a request is one contiguous range over the layers of a group (`tandem/protocol/kv_pages.py`). This is
    the order of the first group; `other_groups` describes those whose pages have another one. The engine owns the
    memory.
    """

    base_address: int
    """The address of page 0 in this process."""
    pages: int
    layers: int
    kv_heads: int
    page_tokens: int
    dims: tuple[int, ...]
    """The number of elements per token and head of each part: of keys and of values, or of latents (MLA)."""
    item_bytes: int
    """Size in bytes of one element, or of one 8-bit code of a quantized cache."""
    dtype: str
    """The type of the elements or codes, e.g. `bfloat16`."""
    memory: str = "DRAM"
    """The kind of memory: `DRAM` or `VRAM`."""
    device_id: int = 0
    """GPU ordinal; 0 for host memory."""
    windows: tuple[int | None, ...] = (None,)
    """The window of each group, as in `KvPages.windows`."""
    scale_bytes: int = 0
    """Size in bytes of the scale of one token's codes, per head and part.

    The scales of the tokens follow the codes of the same head, layer and part.
    """
    other_groups: tuple[str, ...] = ()
    """The order of the pages of the other groups, one text for each order that differs from that of the first group."""
    unused_bytes: int = 0
    """Size in bytes of the end of a page that the first group does not use, because other groups need more."""

    @property
    def page_bytes(self) -> int:
        """Size of one page in bytes, over all its layers."""
        rows = self.layers * self.kv_heads * self.page_tokens
        return rows * (sum(self.dims) * self.item_bytes + len(self.dims) * self.scale_bytes) + self.unused_bytes

    @property
    def total_bytes(self) -> int:
        """Size of the whole pool in bytes."""
        return self.pages * self.page_bytes

    def page_address(self, page: int) -> int:
        """Return the address of `page`. Raises IndexError if it is outside the pool."""
        if not 0 <= page < self.pages:
            raise IndexError(f"page {page} of a pool of {self.pages}")
        return self.base_address + page * self.page_bytes
