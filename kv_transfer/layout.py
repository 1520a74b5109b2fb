"""What the transfer knows of a paged cache: addresses and strides, nothing of the engine.

Pages of workers with different tensor-parallel sizes hold different heads of the same tokens. Each layout names those
of its rank (`rank_heads`), and either side of a transfer finds where the heads both hold lie in its own page:

    both = shared_heads(mine.heads, theirs.heads)              # heads 0-3 and 2-3 have 2-3 in common
    head_slices(mine, both), head_slices(theirs, both)         # pair one to one
"""

from collections.abc import Sequence
from dataclasses import dataclass

from wire.errors import InvalidArgument

KEYS_AND_VALUES = 2


@dataclass(frozen=True, slots=True)
class KVLayout:
    """A pool of pages in block-major order [pages, layers, 2, kv_heads, page_tokens, head_dim].

    One page of one request is one contiguous range over all layers. The memory stays the engine's.
    """

    base_address: int
    """First byte of page 0 in this process."""
    pages: int
    layers: int
    kv_heads: int
    page_tokens: int
    head_dim: int
    item_bytes: int
    """Bytes of one element."""
    dtype: str
    """Element type, e.g. `bfloat16`."""
    memory: str = "DRAM"
    """`DRAM` or `VRAM`."""
    device_id: int = 0
    """GPU ordinal; 0 for host memory."""
    first_head: int = 0
    """Which of the model's KV heads is the first of a page: not 0 for later ranks of tensor parallelism."""

    @property
    def heads(self) -> range:
        """The model's KV heads whose keys and values a page holds."""
        return range(self.first_head, self.first_head + self.kv_heads)

    @property
    def head_bytes(self) -> int:
        """Bytes of one head's keys, or values, in one layer of one page."""
        return self.page_tokens * self.head_dim * self.item_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self.layers * KEYS_AND_VALUES * self.kv_heads * self.head_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.pages * self.page_bytes

    def page_address(self, page: int) -> int:
        """First byte of `page`; IndexError outside the pool."""
        if not 0 <= page < self.pages:
            raise IndexError(f"page {page} of a pool of {self.pages}")
        return self.base_address + page * self.page_bytes


@dataclass(frozen=True, slots=True)
class PageSlice:
    """A contiguous part of a page: `offset` from the page's first byte, both in bytes."""

    offset: int
    bytes: int


def rank_heads(kv_heads: int, ranks: int, rank: int) -> range:
    """The kv heads, of all `kv_heads` of the model, that `rank` of `ranks` tensor-parallel workers holds.

    InvalidArgument when the heads cannot be divided equally, or there is no such rank.
    """
    if ranks < 1 or kv_heads % ranks:
        raise InvalidArgument(
            "tensor_parallel",
            f"{kv_heads} KV heads cannot be divided equally among {ranks} ranks; choose a divisor of {kv_heads}",
        )
    if not 0 <= rank < ranks:
        raise InvalidArgument("tensor_parallel", f"rank {rank} is not one of {ranks}; count ranks from 0")
    share = kv_heads // ranks
    return range(rank * share, (rank + 1) * share)


def shared_heads(mine: range, theirs: range) -> range:
    """The heads both sides hold; may be empty."""
    first = max(mine.start, theirs.start)
    return range(first, max(first, min(mine.stop, theirs.stop)))


def head_slices(layout: KVLayout, heads: range) -> Sequence[PageSlice]:
    """Where the model's `heads` lie in a page of `layout`.

    One slice for keys and one for values of each layer, in that order, never merged: for the same `heads`, the slices
    of any two layouts of a model pair one to one and are of equal length. InvalidArgument for heads that are not held.
    """
    held = layout.heads
    if not heads:
        return ()
    if heads.start < held.start or heads.stop > held.stop:
        raise InvalidArgument(
            "heads", f"{_named(heads)} are asked for and this worker holds {_named(held)}; ask the rank that has them"
        )
    start, size = (heads.start - held.start) * layout.head_bytes, len(heads) * layout.head_bytes
    one = layout.kv_heads * layout.head_bytes
    return tuple(PageSlice(part * one + start, size) for part in range(layout.layers * KEYS_AND_VALUES))


def _named(heads: range) -> str:
    return f"KV heads {heads.start} to {heads.stop - 1}"
