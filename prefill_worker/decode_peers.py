"""The prefill phase's interface to a decode worker, remote or in the same process."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.protocol.messages import Destination, Lease, PeerRef, TransferNotice


@dataclass(frozen=True, slots=True)
class AllocatedPages:
    """Pages in the decode worker's pool to which a prefill worker may write.

    Writes may begin within `write_for_s` seconds after the call to `allocate_pages` was sent.
    """

    page_ids: Sequence[int]
    write_for_s: float


@dataclass(frozen=True, slots=True)
class Renewal:
    """The reply to a renewal: the leases that have ended, and the write window of the others.

    Under the other leases, writes may begin within `write_for_s` seconds after the renewal was sent.
    """

    ended: frozenset[Lease]
    write_for_s: float


class DecodePeers(ABC):
    """The interface to decode workers in other processes.

    Every call has a deadline and raises a `TandemError` if it fails.
    """

    @abstractmethod
    async def connect(self, destination: Destination) -> None:
        """Perform the handshake that must precede writes to this worker; return at once if it was already performed.

        Raises FailedPrecondition if the two workers are incompatible, Unavailable if the worker does not answer or is
        known to be gone.
        """

    @abstractmethod
    async def allocate_pages(self, destination: Destination, pages: int) -> AllocatedPages:
        """Allocate the decode worker's pages for a prompt that fills `pages` pages.

        Leading pages that the decode worker already has are left out. A repeated call returns the same pages and
        restarts the window. Raises StaleEpoch if the lease has ended.
        """

    @abstractmethod
    async def renew(self, peer: PeerRef, address: str, leases: Sequence[Lease], within_s: float) -> Renewal:
        """Renew the permission to write under leases whose pages were allocated.

        Raises an error if the reply takes longer than `within_s` seconds.
        """

    @abstractmethod
    def delivered(self, destination: Destination) -> None:
        """Report that the lease's transfer notice was sent, so that the decode worker detects if the notice was lost.

        The report is sent later, in a batch with others.
        """

    @abstractmethod
    async def release(self, destination: Destination, *, in_doubt: bool) -> None:
        """Release a lease under which no write is in flight and none will follow.

        `in_doubt`: a write has failed, and its data may still land. Raises StaleEpoch if the lease has ended. If the
        worker is known to be gone, nothing is sent and the call succeeds.
        """


class LocalDecode(Protocol):
    """The decode phase of the same process. Every method returns immediately and may be called from any thread.

    If the shared prefix cache has the first pages of a prompt, `allocate_pages` leaves these out, and the decode phase
    reads them from the cache.
    """

    def allocate_pages(self, lease: Lease, pages: int, prefill: PeerRef) -> Sequence[int]:
        """Allocate the pages of a prompt that fills `pages` pages, except leading pages that are cached.

        Raises StaleEpoch if the lease has ended.
        """
        ...

    def allocate_chunk_pages(self, lease: Lease, pages: int, position: int, prefill: PeerRef) -> Sequence[int]:
        """Allocate at most `pages` more pages for groups with a sliding window: as many as are available.

        `position` is the position of the next token to be computed; pages before its window are no longer needed.
        Raises StaleEpoch if the lease has ended.
        """
        ...

    def cached_pages(self, lease: Lease) -> int:
        """Return the number of leading pages of the prompt that are read from the shared prefix cache.

        Raises StaleEpoch if the lease has ended.
        """
        ...

    def release(self, lease: Lease, prefill: PeerRef) -> None:
        """Release a lease under which no write is in flight and none will follow."""
        ...

    def notice(self, notice: TransferNotice, pages: Sequence[int] = (), states: Collection[int] = ()) -> None:
        """Deliver the notice that the prompt's KV is complete; `pages` are its pages, listed as by `KvPages`.

        `states` are the numbers of the state pages that others may reuse (`Prefix.states`).
        """
        ...
