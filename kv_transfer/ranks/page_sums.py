"""Checksums of whole pages, computed by all ranks of a worker."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from kv_transfer.checksums import PageSums
from kv_transfer.rank_plan import RankedPages
from tandem.protocol.errors import TransferFailed

_MASK = (1 << 64) - 1

BeginSums = Callable[[Sequence[int], Sequence[int], Sequence[int]], "Future[Sequence[int]]"]
"""Starts a rank's computation of its part of the checksums of pages, with the arguments of `PageSums`."""


class GroupPageSums:
    """`PageSums` of a worker of several ranks.

    A rank sums the words that it has, each with its index in a page of the whole model, so the sums of ranks that
    together have each word once add up to the checksum of the page, however the model is divided.
    """

    def __init__(self, groups: Sequence[RankedPages], first: PageSums, others: Sequence[BeginSums]) -> None:
        """Create the function from those of the first rank, which is in this process, and of the others in order.

        `groups` is the division of the pages of each group of layers.
        """
        self._first, self._others = first, others
        self._copies = [_copies(pages) for pages in groups]

    def __call__(self, pages: Sequence[int], filled: Sequence[int], groups: Sequence[int] = ()) -> Sequence[int]:
        """Return the checksums. Raises TransferFailed if ranks that have the same heads differ."""
        begun = [begin(pages, filled, groups) for begin in self._others]
        sums = [self._first(pages, filled, groups), *(future.result() for future in begun)]
        totals: list[int] = []
        for number, group in enumerate(groups or [0] * len(pages)):
            copies = {sum(sums[rank][number] for rank in ranks) & _MASK for ranks in self._copies[group]}
            if len(copies) > 1:
                raise TransferFailed("ranks of this worker have different KV of the same heads; prefill again")
            totals += copies
        return totals


def _copies(pages: RankedPages) -> list[list[int]]:
    """Return the ranks of each copy of a page: together, the ranks of a copy have each head of each layer once."""
    same = max(1, pages.tensor_ranks // pages.kv_heads)
    return [[rank for rank in range(pages.ranks) if rank % pages.tensor_ranks % same == copy] for copy in range(same)]
