"""The prefill half's interface to a decode worker, remote or in the same process."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.protocol.messages import Destination, Lease, PeerRef, TransferNotice


@dataclass(frozen=True, slots=True)
class AllocatedPages:
    """Pages in the decode worker's pool that a prefill worker may write to.

    `write_for_s` is the length of the permission, in seconds from the request on.
    """

    page_ids: Sequence[int]
    write_for_s: float


@dataclass(frozen=True, slots=True)
class Renewal:
    """The result of a renewal: the leases that are over, and the write permission of the others.

    `write_for_s` is the length of that permission, in seconds from the request on.
    """

    ended: frozenset[Lease]
    write_for_s: float


class DecodePeers(ABC):
    """Decode workers in other processes. Every call has a deadline and ends with a `TandemError` when it fails."""

    @abstractmethod
    async def connect(self, destination: Destination) -> None:
        """Make the handshake that writes to this worker need; returns at once if it was made before.

        FailedPrecondition if the two workers are incompatible, Unavailable if it does not answer or is known to be
        gone.
        """

    @abstractmethod
    async def allocate_pages(self, destination: Destination, pages: int) -> AllocatedPages:
        """Allots the pages that receive the last of the prompt's `pages`; the decode worker has the earlier ones.

        A repeated call gives the same pages for as long as the first one. StaleEpoch if the lease is over.
        """

    @abstractmethod
    async def renew(self, peer: PeerRef, address: str, leases: Sequence[Lease], within_s: float) -> Renewal:
        """Renews the permission to write under leases whose pages were allotted.

        A reply that takes longer than `within_s` seconds counts as none.
        """

    @abstractmethod
    def delivered(self, destination: Destination) -> None:
        """Reports that the notice was sent, later and batched with others, in case it was lost in transit."""

    @abstractmethod
    async def release(self, destination: Destination, *, in_doubt: bool) -> None:
        """Reports that no write under the lease is in flight and none will follow.

        `in_doubt`: a write failed, and its data may still land. StaleEpoch if the lease is over. If the worker is
        known to be gone, nothing is sent and the call succeeds.
        """


class LocalDecode(Protocol):
    """The decode half of this process. Every method returns at once and may be called from any thread.

    The prompt's pages that `allocate_pages` leaves out are read by the decode half from the shared cache.
    """

    def allocate_pages(self, lease: Lease, pages: int, prefill: PeerRef) -> Sequence[int]:
        """Allots the pages that receive the last of the prompt's `pages`; StaleEpoch if the lease is over."""
        ...

    def allocate_chunk_pages(self, lease: Lease, pages: int, position: int, prefill: PeerRef) -> Sequence[int]:
        """Takes at most `pages` more pages, for groups with a window; no token from `position` on sees those behind it.

        Fewer if there are no more. StaleEpoch if the lease is over.
        """
        ...

    def cached_pages(self, lease: Lease) -> int:
        """Returns the number of the prompt's first pages that are read from the shared cache.

        StaleEpoch as `allocate_pages`.
        """
        ...

    def release(self, lease: Lease, prefill: PeerRef) -> None:
        """Reports that no write under the lease is in flight and none will follow."""
        ...

    def notice(self, notice: TransferNotice, pages: Sequence[int] = ()) -> None:
        """Delivers the notice that the prompt's KV is complete, in these `pages` (`KvPages`)."""
        ...
