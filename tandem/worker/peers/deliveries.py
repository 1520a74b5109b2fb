"""A notice leaves once and is not answered.

So the decode worker hears once more, in words, which have left long ago: where one was lost it would keep the lease's
pages for as long as this process lives.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from tandem.protocol.errors import DeadlineExceeded, Unavailable
from tandem.protocol.messages import Destination, Lease, PeerRef

log = logging.getLogger(__name__)

MOST_LEASES = 1024
"""The most leases of one call; more wait for the next."""
MOST_WAITING = 16 * MOST_LEASES
"""The most leases kept for one unreachable peer; older ones are dropped, and end with either process."""

Tell = Callable[[PeerRef, str, Sequence[Lease]], Awaitable[bool]]
"""A call with (peer, address, leases) that returns True if they were delivered or the peer is gone."""


@dataclass(slots=True)
class _Peer:
    """Leases whose notices have left to one run of a worker: `late` before the last call, `fresh` since."""

    address: str
    late: list[Lease] = field(default_factory=list)
    fresh: list[Lease] = field(default_factory=list)
    telling: asyncio.Task[None] | None = None


class Deliveries:
    """Tells each peer what was delivered to it, all of one or two periods at once. Lives on the event loop."""

    def __init__(self, tell: Tell, period_s: float) -> None:
        """`period_s`: time that a notice has at least before its lease is named, in seconds."""
        self._tell = tell
        self._period_s = period_s
        self._peers: dict[PeerRef, _Peer] = {}

    def add(self, destination: Destination) -> None:
        """The notice of this lease has left."""
        peer = self._peers.setdefault(destination.peer, _Peer(destination.address))
        peer.fresh.append(destination.lease)
        if len(peer.late) + len(peer.fresh) > MOST_WAITING and peer.late:
            del peer.late[0]
        if peer.telling is None:
            peer.telling = asyncio.ensure_future(self._tell_all(destination.peer, peer))

    async def close(self) -> None:
        """Tell nobody any more: who loses this worker looks after its leases."""
        telling = [peer.telling for peer in self._peers.values() if peer.telling is not None]
        for each in telling:
            each.cancel()
        await asyncio.gather(*telling, return_exceptions=True)

    async def _tell_all(self, ref: PeerRef, peer: _Peer) -> None:
        while peer.late or peer.fresh:
            await asyncio.sleep(self._period_s)
            some = peer.late[:MOST_LEASES]
            if not some or await self._heard(ref, peer.address, some):
                # The oldest may have been forgotten meanwhile.
                heard = set(some)
                peer.late = [*(lease for lease in peer.late if lease not in heard), *peer.fresh]
                peer.fresh = []
        del self._peers[ref]

    async def _heard(self, peer: PeerRef, address: str, leases: Sequence[Lease]) -> bool:
        try:
            return await self._tell(peer, address, leases)
        except (Unavailable, DeadlineExceeded) as error:
            log.info("%d deliveries to %s are named again: %s", len(leases), peer.worker_id, error.message)
            return False
        except Exception:
            # Said again, it would be refused again.
            log.exception("%s does not want to hear of %d deliveries", peer.worker_id, len(leases))
            return True
