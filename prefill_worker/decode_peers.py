"""The prefill phase's interface to a decode worker, remote or in the same process."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.protocol.messages import Destination, Lease, PeerRef, TransferNotice


@dataclass(frozen=True, slots=True)
class AllocatedPages:
    """Pages in the decode worker's pool that a prefill worker may write to.

    `write_for_s` is the length of the write window in seconds, from when the request was sent.
    """

    page_ids: Sequence[int]
    write_for_s: float


@dataclass(frozen=True, slots=True)
class Renewal:
    """The reply to a renewal: the leases that have ended, and the write window of the others.

    `write_for_s` is the length of the window in seconds, from when the request was sent.
    """

    ended: frozenset[Lease]
    write_for_s: float


class DecodePeers(ABC):
    """Decode workers in other processes. Every call has a deadline and raises a `TandemError` if it fails."""

    @abstractmethod
    async def connect(self, destination: Destination) -> None:
        """Make the handshake that writes to this worker need, and return at once if it was made before.

        Raises FailedPrecondition if the two workers are incompatible, Unavailable if the worker does not answer or is
        known to be gone.
        """

    @abstractmethod
    async def allocate_pages(self, destination: Destination, pages: int) -> AllocatedPages:
        """Allocate the pages that receive the last of the prompt's `pages`; the decode worker has the earlier ones.

        A repeated call returns the same pages and the same window. Raises StaleEpoch if the lease has ended.
        """

    @abstractmethod
    async def renew(self, peer: PeerRef, address: str, leases: Sequence[Lease], within_s: float) -> Renewal:
        """Renew the permission to write under leases whose pages were allocated.

        A reply that takes longer than `within_s` seconds counts as no reply.
        """

    @abstractmethod
    def delivered(self, destination: Destination) -> None:
        """Report that the notice was sent, in case it was lost in transit.

        The report is sent later, batched with others.
        """

    @abstractmethod
    async def release(self, destination: Destination, *, in_doubt: bool) -> None:
        """Report that no write under the lease is in flight and none will follow.

        `in_doubt`: a write failed, and its data may still land. Raises StaleEpoch if the lease has ended. If the worker
        is known to be gone, nothing is sent and the call succeeds.
        """


class LocalDecode(Protocol):
    """The decode phase of this process. Every method returns at once and may be called from any thread.

    The decode phase reads the pages that `allocate_pages` leaves out from the shared prefix cache.
    """

    def allocate_pages(self, lease: Lease, pages: int, prefill: PeerRef) -> Sequence[int]:
        """Allocate the pages that receive the last of the prompt's `pages`.

        Raises StaleEpoch if the lease has ended.
        """
        ...

    def allocate_chunk_pages(self, lease: Lease, pages: int, position: int, prefill: PeerRef) -> Sequence[int]:
        """Allocate at most `pages` more pages, for groups with a window; fewer if too few are left.

        No token from `position` on attends to the pages before its window. Raises StaleEpoch if the lease has ended.
        """
        ...

    def cached_pages(self, lease: Lease) -> int:
        """Return how many of the prompt's first pages are read from the shared prefix cache.

        Raises StaleEpoch if the lease has ended.
        """
        ...

    def release(self, lease: Lease, prefill: PeerRef) -> None:
        """Report that no write under the lease is in flight and none will follow."""
        ...

    def notice(self, notice: TransferNotice, pages: Sequence[int] = ()) -> None:
        """Deliver the notice that the prompt's KV is complete, in these `pages` (`KvPages`)."""
        ...
