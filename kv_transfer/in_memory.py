"""An in-memory fake of NIXL: transports in one process that copy real bytes between real pools, controlled by a test.

A test sends a write as follows:

    fabric = InMemoryFabric()
    prefill = InMemoryTransport(fabric, prefill_layout, PeerRef("prefill-0", 1), prefill_notices.append)
    decode = InMemoryTransport(fabric, decode_layout, PeerRef("decode-0", 1), decode_notices.append)
    prefill.add_peer(decode.describe())
    prefill.write(PageWrite(...), deadline_s=5.0).result(timeout=5.0)
"""

from concurrent.futures import Future

from kv_transfer.base import NoticeHandler, PageRanges, PageWrite, RankTransport, WriteDone
from kv_transfer.in_memory_fabric import InFlightWrite, InMemoryFabric
from kv_transfer.layout import KVLayout
from kv_transfer.ordered_writes import hold
from tandem.protocol.errors import FailedPrecondition, TransferFailed
from tandem.protocol.messages import PeerDescription, PeerRef


class InMemoryTransport(RankTransport):
    """A transport that sends over an `InMemoryFabric`.

    The caller owns the pool's memory, which must outlive `close`.
    """

    backend = "in-memory"

    def __init__(self, fabric: InMemoryFabric, layout: KVLayout, me: PeerRef, on_notice: NoticeHandler) -> None:
        self.layout = layout
        self.me = me
        self.on_notice = on_notice
        self.expected = 0
        """The argument of the latest call of `expect`, for tests."""
        self._fabric = fabric
        self._peers: dict[str, PeerDescription] = {}
        self._ranges: dict[str, PageRanges] = {}
        self._posted: set[InFlightWrite] = set()
        self._closed = False
        fabric.attach(self)

    def add_peer(self, description: PeerDescription, ranges: PageRanges = ()) -> None:
        """Register a peer, unless a later incarnation is known.

        Raises FailedPrecondition if its pages differ in size and there are no `ranges`.
        """
        if not ranges and description.page_bytes != self.layout.page_bytes:
            raise FailedPrecondition(
                f"pages of {description.peer.worker_id} have {description.page_bytes} bytes, mine"
                f" {self.layout.page_bytes}; start both workers with the same model and page settings"
            )
        known = self._peers.get(description.peer.worker_id)
        if known is not None and known.peer.incarnation < description.peer.incarnation:
            self.remove_peer(known.peer)
        if known is None or known.peer.incarnation <= description.peer.incarnation:
            self._peers[description.peer.worker_id] = description
            self._ranges[description.peer.worker_id] = ranges

    def remove_peer(self, peer: PeerRef) -> None:
        """Remove this incarnation of a peer and earlier ones; writes in flight to it will fail."""
        known = self._peers.get(peer.worker_id)
        if known is not None and known.peer.incarnation <= peer.incarnation:
            del self._peers[peer.worker_id]
            for posted in list(self._posted):
                posted.peer_removed |= posted.write.peer == known.peer

    def write(self, write: PageWrite, deadline_s: float) -> "Future[WriteDone]":
        """Post a write on the fabric as soon as the writes in `after` have completed, and return its future."""
        future: Future[WriteDone] = Future()
        future.set_running_or_notify_cancel()
        now = self._fabric.now()
        posted = InFlightWrite(self.me, write, now, now + deadline_s, future)
        hold(write.after, lambda why_not: self._begin(posted, why_not))
        return future

    def _begin(self, posted: InFlightWrite, why_not: str) -> None:
        write, future, now = posted.write, posted.future, self._fabric.now()
        known = self._peers.get(write.peer.worker_id)
        if why_not:
            future.set_exception(TransferFailed(f"the write may not begin: {why_not}; prefill again"))
        elif self._closed or known is None or known.peer != write.peer:
            future.set_exception(TransferFailed(f"{write.peer} is not a known peer; introduce it first"))
        elif now >= posted.deadline:
            future.set_exception(TransferFailed("the write was past its deadline before it began; prefill again"))
        elif now >= write.begin_by():
            future.set_exception(TransferFailed("the write may no longer begin; prefill again"))
        else:
            posted.begun_at, posted.ranges = now, self._ranges[write.peer.worker_id]
            self._posted.add(posted)
            future.add_done_callback(lambda _: self._posted.discard(posted))
            self._fabric.post(posted)

    def describe(self) -> PeerDescription:
        """Return the pool's address and page layout."""
        layout = self.layout
        return PeerDescription(
            self.me,
            b"in-memory",
            layout.base_address,
            layout.page_bytes,
            layout.pages,
            layout.device_id,
            layout.memory,
            "here",
        )

    def expect(self, leases: int) -> None:
        """Record the number of leases, for tests."""
        self.expected = leases

    def transport_poll_s(self) -> float:
        """Return the fabric's time, because this transport polls all the time."""
        return self._fabric.now()

    def transport_name(self) -> str:
        """Return `in-memory`."""
        return self.backend

    def close(self) -> None:
        """Fail the writes in flight and detach from the fabric."""
        if not self._closed:
            self._closed = True
            self._fabric.detach(self)
