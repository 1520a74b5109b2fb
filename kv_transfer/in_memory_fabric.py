"""The network of the in-memory fake of NIXL: writes between real pools of one process, controlled by a test.

A thread of the fabric lands all writes in the order posted and delivers their notices. `wait_until_idle` waits for the
thread, so tests need no sleeping. A fabric with `schedule` has no thread: a virtual clock or a test lands the writes.

    fabric = InMemoryFabric(clock, schedule=lambda write: None)
    fabric.land(fabric.writes[0], 1)      # one page of the first write
    fabric.land(fabric.writes[0])         # its other pages: the writer's future is done
    fabric.deliver(fabric.notices[0])     # its notice arrives
    fabric.fail(fabric.writes[0])         # a write fails; pages that are still in the network may land until `rest`

Without the thread, writes can overtake each other, end in the middle, or land after the death of their writer or after
their own failure, and notices can come late, twice or never. The contract (`kv_transfer/base.py`) always holds: once a
write has completed, its local pages are not read again, and if it succeeded, no byte of it lands later; and a notice
exists only after every byte of its write has landed.
"""

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.base import NoticeHandler, PageRanges, PageWrite, WriteDone, ranges_of, written_bytes
from kv_transfer.layout import KVLayout
from tandem.protocol.errors import TransferFailed
from tandem.protocol.messages import PeerRef, TransferNotice

NO_MEMORY = 0
"""The address of a pool without memory: writes to or from it move no bytes and only take time."""


@dataclass(slots=True, eq=False)
class InFlightWrite:
    """A write that was posted and is not quiescent. Times are in seconds by the fabric's clock."""

    sender: PeerRef
    write: PageWrite
    begun_at: float
    deadline: float
    future: "Future[WriteDone]"
    ranges: PageRanges = ()
    """The ranges of each page that the write copies (`RankTransport.add_peer`); empty = whole pages."""
    peer_removed: bool = False
    """True if the sender has removed the peer: the write then fails in any case."""
    landed: int = 0
    """The number of pages that have landed."""
    orphan: list[bytes] | None = None
    """The contents of the pages that may still land although the sender is dead or the write has failed; else None."""
    failed: bool = False
    """True if the sender has seen the write fail; its notice is never delivered."""

    def complete(self, page_bytes: int, now: float) -> None:
        """Complete the write after its last byte has landed.

        A write without a notice fails if its deadline has passed. A write with a notice succeeds, because the notice
        has been sent.
        """
        if self.peer_removed:
            self.fail("the peer was removed")
        elif now > self.deadline and self.write.notice is None:
            self.fail("it ended after its deadline")
        else:
            moved = written_bytes(self.write, self.ranges, page_bytes)
            self.future.set_result(WriteDone(moved, int((now - self.begun_at) * 1e9), time.time_ns()))

    def fail(self, why: str) -> None:
        """Fail the write with the reason `why`."""
        self.future.set_exception(TransferFailed(f"the write failed: {why}; prefill again"))


@dataclass(frozen=True, slots=True)
class PendingNotice:
    """A notice whose write has landed, so that the notice can arrive now."""

    peer: PeerRef
    notice: TransferNotice


class Endpoint(Protocol):
    """The interface of a transport that the fabric uses."""

    me: PeerRef
    layout: KVLayout
    on_notice: NoticeHandler


class InMemoryFabric:
    """The network between the transports of one process. Faults apply only to writes that have not landed yet."""

    def __init__(
        self,
        clock: Callable[[], float] | None = None,
        *,
        schedule: Callable[[InFlightWrite], None] | None = None,
        on_page: Callable[[InFlightWrite, int, int], None] | None = None,
    ) -> None:
        """Start the thread that carries out the writes, unless `schedule` is given.

        `schedule` is called with each posted write; the owner of the fabric then completes the write by `land`, `fail`
        or `rest`, and all calls must come from one thread. `clock` returns seconds; None = monotonic time. `on_page` is
        called before each page is written, with the write, the local page and the remote page.
        """
        self.writes: list[InFlightWrite] = []
        """Writes that are not quiescent, in the order posted, except the one that the thread is landing."""
        self.notices: list[PendingNotice] = []
        """Notices that can arrive now."""
        self._clock, self._schedule, self._on_page = clock, schedule, on_page
        self._ends: dict[PeerRef, Endpoint] = {}
        self._changed = threading.Condition()
        self._landing = self._held = self._stopped = False
        self._delay_s = 0.0
        self._failures: deque[int] = deque()
        self._lost_notices = 0
        self._damages: deque[Callable[[Sequence[int]], None]] = deque()
        self._landed: list[int] = []
        """The remote pages that have been written since the last notice."""
        if schedule is None:
            self._thread = threading.Thread(target=self._run, name="in-memory-fabric", daemon=True)
            self._thread.start()

    # ---- for transports ----

    def now(self) -> float:
        """Return the fabric's time in seconds, for deadlines."""
        return time.monotonic() if self._clock is None else self._clock()

    def attach(self, end: Endpoint) -> None:
        """Make a transport reachable under its worker incarnation `end.me`.

        It replaces an earlier transport of that incarnation.
        """
        with self._changed:
            self._ends[end.me] = end

    def detach(self, end: Endpoint) -> None:
        """Make a transport unreachable and fail its writes. Does not affect a transport that has replaced it."""
        with self._changed:
            if self._ends.get(end.me) is end:
                del self._ends[end.me]
        self._drop(lambda posted: posted.sender == end.me, "the transport is closed")

    def post(self, posted: InFlightWrite) -> None:
        """Put a write that has begun into the network."""
        with self._changed:
            self.writes.append(posted)
            self._changed.notify_all()
        if self._schedule is not None:
            self._schedule(posted)

    # ---- for the clock or the test that schedules writes ----

    def land(self, posted: InFlightWrite, pages: int | None = None) -> None:
        """Copy the next `pages` pages of a write to the receiver, or all remaining ones if `pages` is None.

        After the last page, the notice is sent and the write completes. Fails the write if its sender or receiver is
        gone.
        """
        sender, receiver = self._ends.get(posted.sender), self._ends.get(posted.write.peer)
        if receiver is None or (sender is None and posted.orphan is None):
            self.fail(posted)
            return
        self._copy(posted, receiver, pages)
        if posted.landed == len(posted.write.local_pages):
            self._remove(posted)
            self._send_notice(posted)
            if posted.orphan is None:
                posted.complete(receiver.layout.page_bytes, self.now())

    def fail(self, posted: InFlightWrite, *, after_notice: bool = False) -> None:
        """Break the connection of a write: its sender sees it fail, but its other pages may still land until `rest`.

        With `after_notice`, the connection breaks after all pages have landed and the notice has been sent.
        """
        sender, receiver = self._ends.get(posted.sender), self._ends.get(posted.write.peer)
        if after_notice and receiver is not None and not posted.failed:
            self._copy(posted, receiver, None)
            self._send_notice(posted)
        if posted.orphan is not None or sender is None or receiver is None or after_notice:
            self.rest(posted, "its connection broke" if sender and receiver else "the peer is gone")
            return
        posted.orphan = [_bytes_of(sender, page) for page in posted.write.local_pages]
        posted.failed = True
        posted.fail("its connection broke")

    def rest(self, posted: InFlightWrite, why: str = "its connection broke") -> None:
        """Make a write quiescent: no further page lands. It fails, unless its sender is dead or has seen it fail."""
        self._remove(posted)
        if posted.orphan is None:
            posted.fail(why)

    def deliver(self, pending: PendingNotice, *, again: bool = False) -> None:
        """Deliver a notice. With `again`, it stays in `notices`, so that it can be delivered once more."""
        if not again:
            self.notices.remove(pending)
        receiver = self._ends.get(pending.peer)
        if receiver is not None:
            receiver.on_notice(pending.notice)

    def lose_notice(self, pending: PendingNotice) -> None:
        """Drop a notice. Its sender assumes that the notice has arrived."""
        self.notices.remove(pending)

    def kill(self, peer: PeerRef) -> None:
        """Simulate the death of `peer`: writes to it fail, and its memory does not change from now on.

        With the thread, its own writes fail too. Without it, their pages may still land until `remove_dead`.
        """
        with self._changed:
            end = self._ends.pop(peer, None)
        if self._schedule is not None and end is not None:
            for posted in self.writes:
                if posted.sender == peer and not posted.failed:
                    posted.orphan = [_bytes_of(end, page) for page in posted.write.local_pages]

        def lost(posted: InFlightWrite) -> bool:
            return posted.write.peer == peer or (posted.sender == peer and self._schedule is None)

        self._drop(lost, f"{peer.worker_id} is gone")

    def remove_dead(self, peer: PeerRef) -> None:
        """Drop the writes of a dead sender that have not landed. Its notices may still arrive."""
        self.writes = [posted for posted in self.writes if posted.sender != peer]

    # ---- for tests of the thread ----

    def hold(self) -> None:
        """Copy no further write until `release`. Posted writes stay in flight, even after their deadlines."""
        with self._changed:
            self._held = True

    def release(self, order: Callable[[list[PageWrite]], list[PageWrite]] | None = None) -> None:
        """End `hold`: let writes land in the order posted, or in the order that `order` returns, e.g. `reversed`."""
        with self._changed:
            if order is not None:
                by_write = {id(posted.write): posted for posted in self.writes}
                self.writes = [by_write[id(write)] for write in order([posted.write for posted in self.writes])]
            self._held = False
            self._changed.notify_all()

    def delay(self, seconds: float) -> None:
        """Delay the landing of each write by `seconds` from now on; 0 = no delay."""
        with self._changed:
            self._delay_s = seconds

    def fail_next(self, writes: int = 1, *, after_pages: int = 0) -> None:
        """Let the next `writes` writes copy `after_pages` pages each and then fail, quiescent and without a notice."""
        with self._changed:
            self._failures.extend([after_pages] * writes)

    def drop_notices(self, notices: int = 1) -> None:
        """Lose the next `notices` notices. The bytes of their writes land."""
        with self._changed:
            self._lost_notices += notices

    def damage_next(self, damage: Callable[[Sequence[int]], None]) -> None:
        """Call `damage` before the next notice, with the remote pages written since the previous notice."""
        with self._changed:
            self._damages.append(damage)

    def wait_until_idle(self, timeout_s: float = 10.0) -> None:
        """Wait until every posted write has landed and every handler has returned.

        Raises TimeoutError if that takes longer than `timeout_s` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self.writes and not self._landing, timeout_s):
                raise TimeoutError(f"{len(self.writes)} writes have not landed in {timeout_s} s")

    def close(self) -> None:
        """Stop the thread and fail the writes in flight."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()
        self._drop(lambda posted: True, "the fabric is closed")

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or (self.writes and not self._held))
                if self._stopped:
                    return
                posted, self._landing = self.writes.pop(0), True
                delay_s, after_pages = self._delay_s, self._failures.popleft() if self._failures else None
            time.sleep(delay_s)
            try:
                if after_pages is None:
                    self.land(posted)
                else:
                    self._copy(posted, self._ends[posted.write.peer], after_pages)
                    self.rest(posted)
            except Exception as error:
                posted.fail(f"it could not be carried: {error!r}")
            finally:
                with self._changed:
                    self._landing = False
                    self._changed.notify_all()

    # ---- parts ----

    def _copy(self, posted: InFlightWrite, receiver: Endpoint, pages: int | None) -> None:
        """Copy the next `pages` pages of a write, or all remaining ones if `pages` is None."""
        pairs = list(enumerate(zip(posted.write.local_pages, posted.write.remote_pages, strict=True)))
        for index, (local, remote) in pairs[posted.landed :][:pages]:
            if self._on_page is not None:
                self._on_page(posted, local, remote)
            source = _bytes_of(self._ends[posted.sender], local) if posted.orphan is None else posted.orphan[index]
            address = receiver.layout.page_address(remote)
            for part in ranges_of(posted.write, posted.ranges, index) if source else ():
                ctypes.memmove(address + part.target_start, source[part.source_start : part.source_end], part.bytes)
            if not posted.ranges:
                ctypes.memmove(address, source, len(source))
            posted.landed += 1
            self._landed.append(remote)

    def _send_notice(self, posted: InFlightWrite) -> None:
        """Add the notice of a landed write to `notices`. With the thread, it is delivered at once."""
        if posted.write.notice is None or posted.failed:
            return
        pending = PendingNotice(posted.write.peer, posted.write.notice)
        self.notices.append(pending)
        landed, self._landed = self._landed, []
        if self._schedule is not None:
            return
        with self._changed:
            lost = self._lost_notices > 0
            self._lost_notices -= lost
            damage = self._damages.popleft() if self._damages and not lost else None
        if lost:
            self._landed = landed
            self.lose_notice(pending)
            return
        if damage is not None:
            damage(landed)
        self.deliver(pending)

    def _remove(self, posted: InFlightWrite) -> None:
        with self._changed:
            if posted in self.writes:
                self.writes.remove(posted)

    def _drop(self, lost: Callable[[InFlightWrite], bool], why: str) -> None:
        """Remove the writes for which `lost` returns True, and fail them with `why`.

        Writes whose sender is dead or has already seen them fail are removed without an error.
        """
        with self._changed:
            dropped = [posted for posted in self.writes if lost(posted)]
            self.writes = [posted for posted in self.writes if posted not in dropped]
            self._changed.notify_all()
        for posted in dropped:
            if posted.orphan is None:
                posted.fail(why)


def _bytes_of(end: Endpoint, page: int) -> bytes:
    layout = end.layout
    return b"" if layout.base_address == NO_MEMORY else ctypes.string_at(layout.page_address(page), layout.page_bytes)
