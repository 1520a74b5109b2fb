"""A transport that sends KV pages over NIXL and its UCX back end, in host or device memory.

One thread owns the agent; all other threads pass commands to it through a queue. The thread waits on the queue with a
timeout, and polls the agent after each wait. The timeout depends on the events that are expected:

- writes in flight: 20 µs to 500 µs, shortest when the oldest write should end (`kv_transfer/poll_backoff.py`);
- a notice that was announced: `DUE_LISTEN_S`;
- other notices, or a peer's connection: `LISTEN_S`, because UCX makes progress only while polled;
- nothing: `REST_S`, so that a peer in the middle of a transfer is served late, but always.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from google.protobuf.message import DecodeError

from kv_transfer.base import NoticeHandler, PageRanges, PageWrite, RankTransport, WriteDone
from kv_transfer.layout import KVLayout
from kv_transfer.nixl_backend.agent import UCX, PoolAgent, agent_name
from kv_transfer.nixl_backend.peers import Links
from kv_transfer.nixl_backend.pending_write import PendingWrite
from kv_transfer.nixl_backend.ucx_log import UCX_LOG
from kv_transfer.nixl_backend.ucx_transports import UcxTransports, host_id
from kv_transfer.nixl_backend.writes import Writes
from kv_transfer.ordered_writes import hold
from kv_transfer.poll_backoff import wait_precisely
from tandem.protocol.errors import FailedPrecondition, TandemError, TransferFailed
from tandem.protocol.messages import PeerDescription, PeerRef, TransferNotice

LOOK_GAP_S = 0.1
"""Maximum time between two polls that counts as polling time, in seconds."""


class Listening:
    """A clock of the time in which the transport polled: it stands still during long gaps between polls.

    Used by the transport's thread; any thread may read `seconds`. Owned by the transport.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        """The time for which the thread has polled, in seconds."""
        self._looked_at = time.monotonic()

    def poll(self) -> None:
        """Record a poll: add the time since the previous poll to `seconds`, unless it exceeds LOOK_GAP_S."""
        now = time.monotonic()
        gap = now - self._looked_at
        if gap <= LOOK_GAP_S:
            self.seconds += gap
        self._looked_at = now


log = logging.getLogger(__name__)

DUE_LISTEN_S = 20e-6
LISTEN_S = 0.15e-3
REST_S = 0.1
CONNECT_ATTENTION_S = 1.0
START_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 5.0
_CLOSED = "this worker's transport is closed"


class NixlTransport(RankTransport):
    """A transport over a registered page pool: its NIXL agent, the peers, and the writes of pages.

    The engine owns the pool's memory, which must outlive `close`. Creating the transport raises FailedPrecondition if
    NIXL is missing, and TransferFailed if the pool cannot be registered, or not in time.
    """

    backend = UCX

    def __init__(
        self,
        layout: KVLayout,
        me: PeerRef,
        on_notice: NoticeHandler,
        *,
        trusted_network: bool = False,
    ) -> None:
        self._layout, self._me, self._on_notice = layout, me, on_notice
        self._trusted_network = trusted_network
        self._open_ports: tuple[str, ...] = ()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._expected = 0
        self._listening = Listening()
        self._attentive_until = 0.0
        self._ucx_transports = UcxTransports(UCX, agent_name(me), layout, host_id())
        self._closing = self._left = False
        self._gate = threading.Lock()
        started: Future[PeerDescription] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="nixl", daemon=True)
        self._thread.start()
        try:
            self._description = started.result(timeout=START_TIMEOUT_S)
        except TimeoutError:
            self._closing = True
            raise TransferFailed(
                f"NIXL has not opened within {START_TIMEOUT_S:g} s; try `tandem doctor`; perhaps a device hangs"
            ) from None

    # ---- for every thread ----

    def add_peer(self, description: PeerDescription, ranges: PageRanges = ()) -> None:
        """Register a peer.

        Raises FailedPrecondition if its pages differ in size and there are no `ranges`, or if it is on another host and
        the network is not trusted.
        """
        if not ranges and description.page_bytes != self._layout.page_bytes:
            raise FailedPrecondition(
                f"pages of {description.peer.worker_id} have {description.page_bytes} bytes, mine"
                f" {self._layout.page_bytes}; start both workers with the same model and page settings"
            )
        if description.host and description.host != host_id() and not self._trusted_network:
            raise FailedPrecondition(
                f"{description.peer.worker_id} is on another host, and KV pages cross no network that is not declared"
                " trusted; start the cluster with --trusted-network if only workers can reach workers there"
            )
        self._command(partial(self._add_peer, description, ranges))

    def remove_peer(self, peer: PeerRef) -> None:
        """Remove this incarnation of a peer and earlier ones; writes in flight to it will fail."""
        self._command(partial(self._remove_peer, peer))

    def write(self, write: PageWrite, deadline_s: float) -> "Future[WriteDone]":
        """Post a write, which the transport's thread carries out."""
        future: Future[WriteDone] = Future()
        # A running future cannot be cancelled: a posted write is always waited for.
        future.set_running_or_notify_cancel()
        now = time.monotonic()
        flight = PendingWrite(write, now, now + deadline_s, future)
        if not self._command(partial(self._take, flight)):
            flight.fail(_CLOSED)
        return future

    def describe(self) -> PeerDescription:
        """Return the agent's metadata and the pool's layout."""
        return self._description

    def expect(self, leases: int) -> None:
        """Set the number of leases for which a notice or a write may arrive; it decides how often the thread polls."""
        if leases != self._expected:
            self._expected = leases
            self._command(lambda: None)

    def transport_poll_s(self) -> float:
        """Return the total time for which the thread has polled, in seconds."""
        return self._listening.seconds

    def transport_name(self) -> str:
        """Return `UCX` and the UCX transports to the peers."""
        return self._ucx_transports.name

    def transport_kinds(self) -> str:
        """Return `UCX` and the kinds of UCX transports in use, without peers."""
        return self._ucx_transports.kinds

    def facts(self) -> tuple[tuple[str, str], ...]:
        """Return the fact whether KV pages may cross a network, which must be the same on both workers."""
        network = "trusted" if self._trusted_network else "none"
        return (("kv_network", network),)

    def open_ports(self) -> tuple[str, ...]:
        """Return host:port of each TCP socket on which UCX listens."""
        return self._open_ports

    def warnings(self) -> tuple[str, ...]:
        """Return warnings about peers that are reached over a slow transport, with advice."""
        return self._ucx_transports.warnings

    def close(self) -> None:
        """Wait for a bounded time for writes in flight, deregister the pool and stop the thread."""
        with self._gate:
            if not self._closing:
                self._closing = True
                self._commands.put(lambda: None)
        self._thread.join(timeout=2 * CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("the transfer thread of %s did not stop; it is abandoned", agent_name(self._me))

    def _command(self, command: Callable[[], None]) -> bool:
        """Queue a command for the transport's thread; return False, without queueing, if the transport closes."""
        with self._gate:
            if not self._closing:
                self._commands.put(command)
            return not self._closing

    # ---- for its own thread ----

    def _take(self, flight: PendingWrite) -> None:
        write = flight.write
        if write.notice is not None and not all(earlier.done() for earlier in write.after):
            self._writes.announce(write.peer)
        hold(write.after, partial(self._begin, flight))

    def _begin(self, flight: PendingWrite, why_not: str) -> None:
        """Begin a write whose dependencies have ended, or fail it if `why_not` is set or the thread is stopping."""
        if why_not or self._left:
            flight.fail(why_not or _CLOSED)
            return
        flight.begun_at = time.monotonic()
        self._guarded(partial(self._writes.post, flight))

    def _run(self, started: "Future[PeerDescription]") -> None:
        wait_precisely()
        try:
            trusted = self._trusted_network
            self._agent = PoolAgent(self._layout, self._me, trusted_network=trusted)
            self._open_ports = self._agent.open_ports
            self._links = Links(self._agent)
            self._writes = Writes(self._agent, self._links, self._layout, self._deliver)
            started.set_result(self._agent.describe())
        except TandemError as error:
            started.set_exception(error)
            return
        except Exception as error:
            started.set_exception(
                TransferFailed(f"NIXL could not register the page pool: {error!r}; try `tandem doctor`")
            )
            return
        pause_s = LISTEN_S
        while not self._closing:
            pause_s = LISTEN_S if self._guarded(self._step, pause_s) else min(2 * pause_s, REST_S)
        self._guarded(self._finish)

    def _step(self) -> None:
        self._process_commands(self._poll_timeout_s())
        self._writes.poll()
        self._links.watch()
        self._links.sweep()
        self._receive()
        while self._writes.reached:
            self._ucx_transports.learn(self._writes.reached.pop(), UCX_LOG.text())

    def _poll_timeout_s(self) -> float:
        if self._writes.notice_due:
            return DUE_LISTEN_S
        if self._writes.waited_for:
            return self._writes.next_look_s
        if self._expected or time.monotonic() < self._attentive_until:
            return LISTEN_S
        return REST_S

    def _process_commands(self, timeout_s: float) -> None:
        """Run the queued commands; wait at most `timeout_s` seconds for the first of them."""
        try:
            command = self._commands.get(timeout=timeout_s)
            while True:
                self._guarded(command)
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def _receive(self) -> None:
        self._listening.poll()
        for sender, data in self._agent.notices():
            self._guarded(partial(self._receive_one, sender, data))

    def _receive_one(self, sender: str, data: bytes) -> None:
        try:
            self._writes.receive(sender, data)
        except DecodeError:
            log.warning("a notice from %s cannot be read; it was dropped", sender)

    def _deliver(self, sender: str, notice: TransferNotice) -> None:
        if agent_name(notice.prefill) != sender:
            log.warning("a notice from %s claims to be %s's; it was dropped", sender, agent_name(notice.prefill))
            return
        self._guarded(partial(self._on_notice, notice))

    def _add_peer(self, description: PeerDescription, ranges: PageRanges) -> None:
        replaced = self._links.replaced_by(description)
        if replaced is not None:
            self._writes.abandon(replaced, "the worker was restarted")
            self._links.drop(replaced)
            self._ucx_transports.forget(replaced.description.peer)
        self._links.add(description, ranges)
        self._attentive_until = time.monotonic() + CONNECT_ATTENTION_S

    def _remove_peer(self, peer: PeerRef) -> None:
        link = self._links.find_until(peer)
        if link is not None:
            self._writes.abandon(link, "the worker is gone")
            self._links.drop(link)
            self._ucx_transports.forget(link.description.peer)

    def _finish(self) -> None:
        """Wait at most `CLOSE_TIMEOUT_S` for unfinished transfers, and then close the agent."""
        self._process_commands(0)
        self._left = True
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while self._writes.unfinished and time.monotonic() < deadline:
            time.sleep(self._writes.next_look_s)
            self._links.watch()
            self._writes.poll()
            self._receive()
        self._writes.abandon_all("this worker is closing")
        handles = self._writes.handles
        if handles:
            log.warning("%d transfers of %s never completed", len(handles), agent_name(self._me))
            self._agent.leak([self._links, *handles])
            return
        self._links.drop_all()
        self._agent.close()

    def _guarded(self, act: Callable[[], None], pause_s: float = LISTEN_S) -> bool:
        """Run `act` and log any exception; return True if there was none.

        The thread survives every error. After an error it sleeps for `pause_s` seconds, so that an error that recurs in
        every iteration does not cause a busy loop.
        """
        try:
            act()
        except Exception:
            log.exception("the transfer thread of %s continues after an error", agent_name(self._me))
            time.sleep(pause_s)
            return False
        return True
