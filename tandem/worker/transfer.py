"""The transfer of a worker's KV pages: the layout of the memory of each rank, and the transport of all ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kv_transfer.backends import open_transport
from kv_transfer.base import NoticeHandler, RankTransport, Transport
from kv_transfer.layout import KVLayout
from kv_transfer.rank_plan import RankedPages, even_stages
from kv_transfer.ranks.group_transport import GroupTransport, rank_peer
from tandem.engine.cache.paged_cache import PagedCache, used_bytes
from tandem.engine.config.kv import ALIGNMENT, PageGroup, StateGroup, head_bytes
from tandem.engine.config.sharding import PagePart
from tandem.protocol.messages import PeerRef

OpenTransport = Callable[[NoticeHandler], RankTransport]


@dataclass(frozen=True, slots=True)
class RankTransfer:
    """The settings with which each rank of a worker opens its transport."""

    backend: str
    me: PeerRef
    trusted_network: bool
    stages: int = 1
    """The number of pipeline stages of the worker's ranks."""

    def opener(self, rank: int, cache: PagedCache) -> OpenTransport:
        """Return the function that opens the transport over the cache of a rank of this process."""
        name = rank_peer(self.me, rank)
        return partial(open_transport, self.backend, layout_of(cache), name, trusted_network=self.trusted_network)

    def group_opener(
        self, cache: PagedCache, parts: Sequence[PagePart], others: Sequence[OpenTransport] = ()
    ) -> Callable[[NoticeHandler], Transport]:
        """Return the function that opens the transport of all ranks: the first, with `cache`, and the `others`."""
        openers = [self.opener(0, cache), *others]
        return partial(GroupTransport, self.me, ranked_pages(cache, parts, len(openers), self.stages), openers)


def ranked_pages(cache: PagedCache, parts: Sequence[PagePart], ranks: int, stages: int) -> tuple[RankedPages, ...]:
    """Return how the pages of each group of layers are divided among the ranks of a worker.

    `cache` is that of one rank, and `parts` the parts of pages that it has.
    """
    return tuple(
        _ranked(cache, group, part, ranks // stages, stages) for group, part in zip(cache.groups, parts, strict=True)
    )


def _ranked(cache: PagedCache, group: PageGroup, part: PagePart, tensor_ranks: int, stages: int) -> RankedPages:
    divided = RankedPages(
        tensor_ranks,
        part.heads,
        even_stages(part.layers, stages),
        page_tokens=1,
        token_bytes=(),
    )
    if isinstance(group, StateGroup):
        size = head_bytes(group.shape, cache.model_dtype.itemsize)
        return replace(divided, token_bytes=(size,), alignment=ALIGNMENT)
    return replace(
        divided,
        page_tokens=cache.page_tokens,
        token_bytes=tuple(dim * cache.item_bytes for dim in group.dims),
        scale_bytes=cache.scale_bytes,
    )


def layout_of(cache: PagedCache) -> KVLayout:
    """Return the layout of the whole cache, with the spare page after the pool's pages (see `Peers.warm_up`)."""
    group = cache.first
    return KVLayout(
        base_address=cache.base_address,
        pages=cache.pages + 1,
        layers=group.depth,
        kv_heads=group.heads,
        page_tokens=cache.page_tokens,
        dims=group.dims,
        item_bytes=cache.item_bytes,
        dtype=cache.dtype,
        memory=cache.memory,
        device_id=cache.device_id,
        windows=cache.kv_pages.windows,
        scale_bytes=cache.scale_bytes,
        other_groups=cache.layouts[1:],
        unused_bytes=cache.page_bytes - used_bytes(group, cache.page_tokens, cache.storage.dtype),
    )


def whole_layout(cache: PagedCache, parts: Sequence[PagePart]) -> KVLayout:
    """Return the layout that the cache would have if one rank held the whole model; two workers must agree on it."""
    others = cache.layouts_of([(part.heads, part.layers) for part in parts])[1:]
    return replace(layout_of(cache), kv_heads=parts[0].heads, layers=parts[0].layers, other_groups=others)
