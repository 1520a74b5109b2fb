"""Reports to each decode worker the leases whose transfer notices were sent to it.

A transfer notice completes the transfer of a lease's pages. It is sent once and is not answered. The decode worker
therefore gets a later report of the leases whose notices were sent long ago: if a notice was lost, the decode worker
would otherwise keep the lease's pages for as long as this process lives.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from tandem.protocol.errors import DeadlineExceeded, Unavailable
from tandem.protocol.messages import Destination, Lease, PeerRef

log = logging.getLogger(__name__)

MOST_LEASES = 1024
"""Maximum number of leases in one report; further leases wait for the next report."""
MOST_WAITING = 16 * MOST_LEASES
"""Maximum number of leases that are kept for one unreachable peer.

Beyond this number the oldest leases are dropped; their pages become free when either process ends.
"""

ReportDeliveries = Callable[[PeerRef, str, Sequence[Lease]], Awaitable[bool]]
"""A call with (peer, address, leases) that returns True if the report was delivered or the peer is gone."""


@dataclass(slots=True)
class _Peer:
    """Leases whose notices were sent to one incarnation of a worker.

    The next report names the leases in `late`. Then those in `fresh` become `late`: until the next report, their
    notices have time to arrive.
    """

    address: str
    late: list[Lease] = field(default_factory=list)
    fresh: list[Lease] = field(default_factory=list)
    reporting: asyncio.Task[None] | None = None
    """The task that sends the reports."""


class Deliveries:
    """Reports to each peer, in one call per period, the leases whose transfer notices were sent at least a period ago.

    Used on the event loop. Owned by `Peers`.
    """

    def __init__(self, report: ReportDeliveries, period_s: float) -> None:
        """Begin without leases; a lease is reported at least `period_s` seconds after its notice was sent."""
        self._report = report
        self._period_s = period_s
        self._peers: dict[PeerRef, _Peer] = {}

    def add(self, destination: Destination) -> None:
        """Add a lease whose notice was sent."""
        peer = self._peers.setdefault(destination.peer, _Peer(destination.address))
        peer.fresh.append(destination.lease)
        if len(peer.late) + len(peer.fresh) > MOST_WAITING and peer.late:
            del peer.late[0]
        if peer.reporting is None:
            peer.reporting = asyncio.ensure_future(self._report_all(destination.peer, peer))

    async def close(self) -> None:
        """Stop reporting. A last report is not needed: a decode worker ends the leases of a worker that has ended."""
        reporting = [peer.reporting for peer in self._peers.values() if peer.reporting is not None]
        for task in reporting:
            task.cancel()
        await asyncio.gather(*reporting, return_exceptions=True)

    async def _report_all(self, ref: PeerRef, peer: _Peer) -> None:
        while peer.late or peer.fresh:
            await asyncio.sleep(self._period_s)
            some = peer.late[:MOST_LEASES]
            if not some or await self._is_reported(ref, peer.address, some):
                # The oldest leases may have been dropped in the meantime.
                reported = set(some)
                peer.late = [*(lease for lease in peer.late if lease not in reported), *peer.fresh]
                peer.fresh = []
        del self._peers[ref]

    async def _is_reported(self, peer: PeerRef, address: str, leases: Sequence[Lease]) -> bool:
        try:
            return await self._report(peer, address, leases)
        except (Unavailable, DeadlineExceeded) as error:
            log.info("%d deliveries to %s are reported again: %s", len(leases), peer.worker_id, error.message)
            return False
        except Exception:
            # The peer would refuse a repeated call as well.
            log.exception("%s refuses a report of %d deliveries", peer.worker_id, len(leases))
            return True
