"""The fake of NIXL: transports of one process that copy real bytes between real pools, under a test's control.

    fabric = InMemoryFabric()
    prefill = InMemoryTransport(fabric, prefill_layout, PeerRef("prefill-0", 1), prefill_notices.append)
    decode = InMemoryTransport(fabric, decode_layout, PeerRef("decode-0", 1), decode_notices.append)
    prefill.add_peer(decode.describe())
    prefill.write(PageWrite(...), deadline_s=5.0).result(timeout=5.0)

One thread of the fabric carries out all writes, in the order posted, and calls the notice handlers. `settle()` waits
until it has nothing left to do, so tests need no sleeping.
"""

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from kv_transfer.base import NoticeHandler, PageWrite, Transport, WriteDone
from kv_transfer.in_memory_flight import Flight
from kv_transfer.layout import KVLayout
from kv_transfer.ordered_writes import hold
from tandem.protocol.errors import FailedPrecondition, TransferFailed
from tandem.protocol.messages import PeerDescription, PeerRef


class Fabric(Protocol):
    """The network between all transports of one process, as one of them sees it."""

    def now(self) -> float:
        """Returns the fabric's time in seconds, for deadlines."""

    def attach(self, end: "InMemoryTransport") -> None:
        """Makes a transport reachable under its `me`; it replaces an earlier one of the same incarnation."""

    def detach(self, end: "InMemoryTransport") -> None:
        """Makes a transport unreachable again."""

    def post(self, flight: Flight) -> None:
        """Takes a write that has begun."""

    def drop_flights(self, lost: Callable[[Flight], bool], why: str) -> None:
        """Removes the writes in flight for which `lost` is true, and fails them."""


class InMemoryFabric:
    """The network between the transports of one process. Every switch acts on writes that have not landed yet."""

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._ends: dict[PeerRef, InMemoryTransport] = {}
        self._flights: deque[Flight] = deque()
        self._carrying = False
        self._held = False
        self._delay_s = 0.0
        self._failures: deque[int] = deque()
        self._lost_notices = 0
        self._damages: deque[Callable[[Sequence[int]], None]] = deque()
        self._landed: list[int] = []
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="in-memory-fabric", daemon=True)
        self._thread.start()

    def hold(self) -> None:
        """Stops all landing; posted writes stay in flight, past their deadlines too."""
        with self._wake:
            self._held = True

    def let_go(self, order: Callable[[list[PageWrite]], list[PageWrite]] | None = None) -> None:
        """Lets held writes land, in the order posted or in the one that `order` returns (`reversed` and so on)."""
        with self._wake:
            if order is not None:
                by_write = {id(flight.write): flight for flight in self._flights}
                self._flights = deque(by_write[id(write)] for write in order([f.write for f in self._flights]))
            self._held = False
            self._wake.notify_all()

    def delay(self, seconds: float) -> None:
        """Makes each write from now on take `seconds` to land; 0 = none."""
        with self._wake:
            self._delay_s = seconds

    def fail_next(self, writes: int = 1, *, after_pages: int = 0) -> None:
        """Makes the next writes copy `after_pages` pages each, then fail, quiescent, without a notice."""
        with self._wake:
            self._failures.extend([after_pages] * writes)

    def drop_notices(self, notices: int = 1) -> None:
        """Loses the notices of the next writes that have one; their bytes land."""
        with self._wake:
            self._lost_notices += notices

    def damage_next(self, damage: Callable[[Sequence[int]], None]) -> None:
        """Calls `damage` before the next notice, with the pages that writes have landed on since the last one."""
        with self._wake:
            self._damages.append(damage)

    def kill(self, peer: PeerRef) -> None:
        """Ends the process of `peer`: writes from and to it fail and nothing reaches its memory any more."""
        with self._wake:
            self._ends.pop(peer, None)
        self.drop_flights(lambda flight: peer in (flight.sender, flight.write.peer), f"{peer.worker_id} is gone")

    def settle(self, timeout_s: float = 10.0) -> None:
        """Waits until everything posted has landed and every handler has returned; TimeoutError otherwise."""
        with self._wake:
            if not self._wake.wait_for(lambda: not self._flights and not self._carrying, timeout_s):
                raise TimeoutError(f"{len(self._flights)} writes have not landed in {timeout_s} s")

    def in_flight(self) -> int:
        """Returns the number of writes that were posted and have not landed."""
        with self._wake:
            return len(self._flights)

    def close(self) -> None:
        """Stops the thread; writes in flight fail."""
        with self._wake:
            self._stopped = True
            self._wake.notify_all()
        self._thread.join()
        self.drop_flights(lambda flight: True, "the fabric is closed")

    def now(self) -> float:
        """Returns monotonic seconds."""
        return time.monotonic()

    def attach(self, end: "InMemoryTransport") -> None:
        """Makes a transport reachable."""
        with self._wake:
            self._ends[end.me] = end

    def detach(self, end: "InMemoryTransport") -> None:
        """Makes a transport unreachable, unless another one has replaced it."""
        with self._wake:
            if self._ends.get(end.me) is end:
                del self._ends[end.me]

    def post(self, flight: Flight) -> None:
        """Queues a write for the thread."""
        with self._wake:
            self._flights.append(flight)
            self._wake.notify_all()

    def drop_flights(self, lost: Callable[[Flight], bool], why: str) -> None:
        """Removes the queued writes for which `lost` is true, and fails them."""
        with self._wake:
            dropped = [flight for flight in self._flights if lost(flight)]
            self._flights = deque(flight for flight in self._flights if not lost(flight))
            self._wake.notify_all()
        for flight in dropped:
            flight.future.set_exception(TransferFailed(f"the write failed: {why}; prefill again"))

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._stopped or (self._flights and not self._held))
                if self._stopped:
                    return
                flight, delay_s = self._flights.popleft(), self._delay_s
                self._carrying = True
            time.sleep(delay_s)
            try:
                self._carry(flight)
            except Exception as error:
                flight.future.set_exception(TransferFailed(f"the write could not be carried: {error!r}"))
            finally:
                with self._wake:
                    self._carrying = False
                    self._wake.notify_all()

    def _carry(self, flight: Flight) -> None:
        with self._wake:
            sender, receiver = self._ends.get(flight.sender), self._ends.get(flight.write.peer)
            fails_after = self._failures.popleft() if self._failures else None
            notified = flight.write.notice is not None and self._lost_notices == 0
            self._lost_notices -= flight.write.notice is not None and not notified
            damage = self._damages.popleft() if notified and self._damages else None
        if sender is None or receiver is None:
            flight.future.set_exception(TransferFailed("the write failed: the peer is gone; prefill again"))
            return
        pairs = list(zip(flight.write.local_pages, flight.write.remote_pages, strict=True))
        for local, remote in pairs[:fails_after]:
            size = sender.layout.page_bytes
            ctypes.memmove(receiver.layout.page_address(remote), sender.layout.page_address(local), size)
        if fails_after is not None:
            flight.future.set_exception(TransferFailed("the write failed in flight; prefill again"))
            return
        self._landed += flight.write.remote_pages
        if damage is not None:
            damage(self._landed)
        if notified and flight.write.notice is not None:
            self._landed = []
            receiver.on_notice(flight.write.notice)
        flight.land(sender.layout.page_bytes, self.now(), notified=notified)


class InMemoryTransport(Transport):
    """A transport of the fabric. The pool's memory stays the caller's and must outlive `close`."""

    backend = "in-memory"

    def __init__(self, fabric: Fabric, layout: KVLayout, me: PeerRef, on_notice: NoticeHandler) -> None:
        self.layout = layout
        self.me = me
        self.on_notice = on_notice
        self.expected = 0
        """The last argument of `expect`, for tests."""
        self._fabric = fabric
        self._peers: dict[str, PeerDescription] = {}
        self._posted: set[Flight] = set()
        self._closed = False
        fabric.attach(self)

    def add_peer(self, description: PeerDescription) -> None:
        """Registers a peer, unless a later incarnation is known; FailedPrecondition when its pages differ in size."""
        if description.page_bytes != self.layout.page_bytes:
            raise FailedPrecondition(
                f"pages of {description.peer.worker_id} have {description.page_bytes} bytes, mine"
                f" {self.layout.page_bytes}; start both workers with the same model and page settings"
            )
        known = self._peers.get(description.peer.worker_id)
        if known is not None and known.peer.incarnation < description.peer.incarnation:
            self.remove_peer(known.peer)
        if known is None or known.peer.incarnation <= description.peer.incarnation:
            self._peers[description.peer.worker_id] = description

    def remove_peer(self, peer: PeerRef) -> None:
        """Forgets this incarnation of a peer and earlier ones; writes in flight to it will fail."""
        known = self._peers.get(peer.worker_id)
        if known is not None and known.peer.incarnation <= peer.incarnation:
            del self._peers[peer.worker_id]
            for flight in list(self._posted):
                flight.doomed |= flight.write.peer == known.peer

    def write(self, write: PageWrite, deadline_s: float) -> "Future[WriteDone]":
        """Posts a write on the fabric, once the writes in `behind` have completed."""
        future: Future[WriteDone] = Future()
        future.set_running_or_notify_cancel()
        now = self._fabric.now()
        flight = Flight(self.me, write, now, now + deadline_s, future)
        hold(write.behind, lambda why_not: self._begin(flight, why_not))
        return future

    def _begin(self, flight: Flight, why_not: str) -> None:
        write, future, now = flight.write, flight.future, self._fabric.now()
        known = self._peers.get(write.peer.worker_id)
        if why_not:
            future.set_exception(TransferFailed(f"the write may not begin: {why_not}; prefill again"))
        elif self._closed or known is None or known.peer != write.peer:
            future.set_exception(TransferFailed(f"{write.peer} is not a known peer; introduce it first"))
        elif now >= flight.deadline:
            future.set_exception(TransferFailed("the write was past its deadline before it began; prefill again"))
        elif now >= write.begin_by():
            future.set_exception(TransferFailed("the write may not begin any more; prefill again"))
        else:
            flight.begun_at = now
            self._posted.add(flight)
            future.add_done_callback(lambda _: self._posted.discard(flight))
            self._fabric.post(flight)

    def describe(self) -> PeerDescription:
        """Returns the pool's address and page layout."""
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
        """Records the number of leases for tests."""
        self.expected = leases

    def transport_poll_s(self) -> float:
        """Returns the fabric's time: this transport polls always."""
        return self._fabric.now()

    def transport_name(self) -> str:
        """Returns `in-memory`."""
        return self.backend

    def close(self) -> None:
        """Fails the writes in flight and detaches from the fabric."""
        if not self._closed:
            self._closed = True
            self._fabric.drop_flights(lambda flight: flight.sender == self.me, "the transport is closed")
            self._fabric.detach(self)
