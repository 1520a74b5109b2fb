"""What the prefill half asks of a decode worker, far away or in the same process."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from wire.messages import Destination, Lease, PeerRef, TransferNotice


@dataclass(frozen=True, slots=True)
class Allotment:
    """Page numbers in the decode worker's pool, and for how long from the request on they may be written to, in
    seconds.
    """

    page_ids: Sequence[int]
    write_for_s: float


@dataclass(frozen=True, slots=True)
class Renewal:
    """What became of leases that were named: those that are over, and for how long from the request on may be written
    under the others, in seconds.
    """

    over: frozenset[Lease]
    write_for_s: float


class DecodePeers(ABC):
    """Decode workers in other processes. Every call has a deadline and ends with a `TandemError` when it fails."""

    @abstractmethod
    async def connect(self, destination: Destination) -> None:
        """Be introduced, so that writes to this worker are possible; at once if that has happened.

        FailedPrecondition if the two workers do not fit together, Unavailable if it does not answer or is known to be
        gone.
        """

    @abstractmethod
    async def allot(self, destination: Destination, pages: int) -> Allotment:
        """Where to write the last of the prompt's `pages`: those before them are there already.

        Asked again it gives the same pages for as long as the first time. StaleEpoch if the lease is over.
        """

    @abstractmethod
    async def renew(self, peer: PeerRef, address: str, leases: Sequence[Lease], within_s: float) -> Renewal:
        """Ask for permission to go on writing under leases whose pages were allotted; an answer that takes longer than
        `within_s` is none.
        """

    @abstractmethod
    def delivered(self, destination: Destination) -> None:
        """The notice has left: the decode worker is told so, later and among others, lest it was lost on the way."""

    @abstractmethod
    async def release(self, destination: Destination, *, in_doubt: bool) -> None:
        """Say that no write under the lease is in flight and none will follow; `in_doubt`: one failed, and what it left
        behind may still land. StaleEpoch if the lease is over.

        A worker that is known to be gone needs no telling: that is a success.
        """


class LocalDecode(Protocol):
    """The decode half of this very process. Every method answers at once, from any thread.

    What `allot` leaves out of the prompt's pages, that half reads in the cache of both.
    """

    def allot(self, lease: Lease, pages: int, prefill: PeerRef) -> Sequence[int]: ...

    def release(self, lease: Lease, prefill: PeerRef) -> None: ...

    def notice(self, notice: TransferNotice) -> None: ...
