"""Writes in flight, and when each is known to be quiet.

A put of UCX cannot be taken back: `release_xfer_handle` frees NIXL's bookkeeping, and even removing the agent closes
the endpoint with a flush. So a write is quiet only
- when NIXL says DONE: the endpoint was flushed, every byte is in the peer's memory;
- `ERROR_REST_S` after it failed: UCX ends everything on a failed endpoint and posts no more; what a network card or a
  copy engine had begun ends within microseconds, what lies in socket buffers reaches the peer in that time or never;
- when its peer is removed: its process, and so the memory written to, is gone.
A deadline therefore ends no write in flight; it decides how the write ends when it has come to rest. And a write to a
removed peer fails at once for its caller, but is looked after until UCX is done with it: before that its handle, the
peer's metadata and the endpoint may not be freed (UCX still follows their pointers).
"""

import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from kv_transfer.base import PageWrite, WriteDone
from kv_transfer.layout import KVLayout
from kv_transfer.nixl_agent import PoolAgent, TransferState
from kv_transfer.nixl_peers import Link, Links
from kv_transfer.pace import LAST_LOOK_S, Pace
from wire.convert import encode_notice
from wire.errors import TransferFailed
from wire.messages import PeerDescription

ERROR_REST_S = 0.5


@dataclass(slots=True, eq=False)
class Flight:
    """A write from the call that asked for it to the end of its future. Times are monotonic seconds."""

    write: PageWrite
    asked_at: float
    deadline: float
    future: "Future[WriteDone]"
    link: Link | None = None
    handle: Any = None
    rests_at: float | None = None

    @property
    def told(self) -> bool:
        """Whether the caller knows how it ended."""
        return self.future.done()

    def fail(self, why: str) -> None:
        if not self.told:
            error = TransferFailed(f"write to {self.write.peer.worker_id}: {why}; prefill again")
            self.future.set_exception(error)


class Writes:
    """All writes in flight. For the transport's thread alone."""

    def __init__(self, agent: PoolAgent, links: Links, layout: KVLayout) -> None:
        self._agent, self._links, self._layout = agent, links, layout
        self._flights: list[Flight] = []
        self._pace = Pace()
        self.reached: list[PeerDescription] = []
        """Peers of connections whose first write has ended well, for whoever takes them off."""

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def waited_for(self) -> bool:
        """Whether somebody waits for one of them."""
        return any(not flight.told for flight in self._flights)

    @property
    def handles(self) -> list[Any]:
        """NIXL's handles of all that has not come to rest."""
        return [flight.handle for flight in self._flights]

    @property
    def next_look_s(self) -> float:
        """How long to wait before the next `poll`."""
        return self._pace.wait_s(self._bytes_of(self._flights[0])) if self._flights else LAST_LOOK_S

    def post(self, flight: Flight) -> None:
        """Begin a write, or fail it when it is late, impossible or its peer is out of reach: nothing moved then."""
        link = self._links.find(flight.write.peer)
        wrong = self._wrong(flight, link)
        if wrong or link is None:
            flight.fail(wrong)
            return
        try:
            connection = self._links.connected(link)
        except TransferFailed as error:
            flight.future.set_exception(error)
            return
        notice = b"" if flight.write.notice is None else encode_notice(flight.write.notice)
        try:
            if not flight.write.local_pages:
                self._agent.notify(connection, notice)
                flight.future.set_result(self._done(flight))
                return
            flight.handle = self._agent.prepare(connection, flight.write.local_pages, flight.write.remote_pages, notice)
        except Exception as error:
            link.broken = True
            flight.fail(f"it could not be posted: {error!r}")
            return
        flight.link = link
        link.in_flight += 1
        self._pace.began(len(self._flights))
        self._flights.append(flight)
        self._note(flight, self._agent.start(flight.handle))

    def poll(self) -> None:
        """Make progress and end what has come to rest."""
        before = len(self._flights)
        for flight in list(self._flights):
            if flight.rests_at is None:
                self._note(flight, self._agent.state(flight.handle))
            elif time.monotonic() >= flight.rests_at:
                self._take(flight).fail("the connection failed")
        if len(self._flights) == before:
            self._pace.in_vain()

    def abandon(self, link: Link, why: str) -> None:
        """Fail every write to a peer whose memory is gone."""
        for flight in self._flights:
            if flight.link is link:
                flight.fail(why)

    def abandon_all(self, why: str) -> None:
        """Fail every write: the transport ends."""
        for flight in self._flights:
            flight.fail(why)

    def _wrong(self, flight: Flight, link: Link | None) -> str:
        write = flight.write
        if link is None:
            return "that peer is not known here; introduce it first"
        if time.monotonic() >= flight.deadline:
            return "it was past its deadline before it began"
        if len(write.local_pages) != len(write.remote_pages):
            return f"{len(write.local_pages)} pages do not go onto {len(write.remote_pages)}"
        if not write.local_pages and write.notice is None:
            return "it has neither pages nor a notice"
        for side, pages, total in (
            ("local", write.local_pages, self._layout.pages),
            ("remote", write.remote_pages, link.description.pages),
        ):
            outside = [page for page in pages if not 0 <= page < total]
            if outside:
                return f"{side} page {outside[0]} is outside a pool of {total}"
        return ""

    def _note(self, flight: Flight, state: TransferState) -> None:
        if state is TransferState.MOVING:
            return
        self._agent.release(flight.handle)
        if state is TransferState.FAILED:
            if flight.link is not None:
                flight.link.broken = True
            flight.rests_at = time.monotonic() + (0.0 if flight.told else ERROR_REST_S)
            return
        self._take(flight)
        if flight.told:
            return
        self._pace.ended(self._bytes_of(flight))
        if flight.link is not None and not flight.link.reached:
            flight.link.reached = True
            self.reached.append(flight.link.description)
        # A notice that has left cannot be called back: the peer goes on with the request, so the write was a success.
        if time.monotonic() >= flight.deadline and flight.write.notice is None:
            flight.fail("it came to rest after its deadline")
        else:
            flight.future.set_result(self._done(flight))

    def _take(self, flight: Flight) -> Flight:
        self._flights.remove(flight)
        if flight.link is not None:
            flight.link.in_flight -= 1
        return flight

    def _done(self, flight: Flight) -> WriteDone:
        return WriteDone(self._bytes_of(flight), int((time.monotonic() - flight.asked_at) * 1e9))

    def _bytes_of(self, flight: Flight) -> int:
        return len(flight.write.local_pages) * self._layout.page_bytes
