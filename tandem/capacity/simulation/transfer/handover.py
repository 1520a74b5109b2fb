"""The hand-over of a simulated prompt's KV to its decode worker: the steps of `prefill_worker/handoff.py` in time."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from prefill_worker.notice import make_notice
from prefill_worker.request import PrefillRequest
from prefill_worker.scheduler import PrefillScheduler
from tandem.capacity.simulation.clock import VirtualClock
from tandem.capacity.simulation.network import Network, Wire
from tandem.protocol.ending import failure_event
from tandem.protocol.errors import TandemError
from tandem.protocol.kv_pages import KvPages
from tandem.protocol.lifecycle.timeline import TransferStats
from tandem.protocol.messages import Destination, Lease, PeerRef, RequestEvent, TransferNotice, hash_token_ids


class DecodeEnd(Protocol):
    """The calls of a hand-over to the decode worker."""

    def allocate_pages(self, lease: Lease, pages: int, prefill: PeerRef) -> int:
        """Returns the number of pages to be sent."""

    def notice(self, notice: TransferNotice) -> None:
        """Takes the notice that the lease's KV has arrived."""

    def release(self, lease: Lease, prefill: PeerRef) -> None:
        """Releases the lease of a cancelled hand-over."""


class PrefillEnd(Protocol):
    """The calls of a hand-over to its prefill worker."""

    peer: PeerRef
    wire: Wire
    page_bytes: int
    kv: KvPages

    def tell(self, request: PrefillRequest, event: RequestEvent) -> None:
        """Sends the event to the router."""

    def decode_end(self, peer: PeerRef) -> DecodeEnd:
        """Returns the decode worker."""

    def visit(self) -> AbstractContextManager[None]:
        """Returns a context for changes of the worker from outside of a step."""


class VirtualHandover:
    """Hands one request over and releases its pages; call `look` whenever its progress has changed."""

    def __init__(
        self, request: PrefillRequest, half: PrefillScheduler, here: PrefillEnd, clock: VirtualClock, network: Network
    ) -> None:
        self._request, self._half, self._here = request, half, here
        self._clock, self._network = clock, network
        self._asked = self._closing = False
        self.over = False
        self._sending: int | None = None
        self._skipped = self._sent = 0
        self._moving_s = self._last_landing = 0.0
        self._bytes = 0

    def abort(self) -> None:
        """Cancels the hand-over."""
        if self.over:
            return
        self._half.withdraw(self._request)
        destination = self._request.task.destination
        if destination is not None and not self._closing:
            self._there(destination).release(destination.lease, self._here.peer)
        self._end()

    def look(self) -> None:
        """Continues after progress of the engine, or after the pages were allotted."""
        progress, destination = self._request.progress, self._request.task.destination
        if self.over or self._closing:
            return
        if progress.failure is not None or (progress.released and destination is None) or self._answered:
            self._end()
        elif destination is not None and self._request.local:
            if progress.released:
                self._closing = True
                self._clock.after(self._network.event_s, self._deliver_here)
        elif destination is not None and progress.computed_tokens + progress.released > 0:
            self._send(destination)

    @property
    def _answered(self) -> bool:
        """True if the first token was the last."""
        return self._request.progress.finish_reason is not None

    def _send(self, destination: Destination) -> None:
        if not self._asked:
            self._asked = True
            self._clock.after(self._network.call_s, lambda: self._ask(destination))
        if self._sending is None:
            return
        needed, progress = self._request.pages_needed, self._request.progress
        ready = needed - 1 if progress.released else progress.computed_tokens // self._here.kv.page_tokens
        if ready > self._sent:
            self._last_landing = self._post(ready)
        if progress.released:
            self._closing = True
            self._clock.at(self._last_landing, lambda: self._send_last(destination))

    def _ask(self, destination: Destination) -> None:
        if self.over:
            return
        missing = self._there(destination).allocate_pages(
            destination.lease, self._request.pages_needed, self._here.peer
        )
        skipped = self._here.kv.skipped(self._request.prompt_tokens, missing)
        assert skipped is not None
        self._skipped = self._sent = skipped

        def permitted() -> None:
            self._sending = missing
            self.look()

        self._clock.after(self._network.call_s, permitted)

    def _post(self, end: int) -> float:
        """Sends the pages up to number `end`; returns when they will have arrived."""
        size = len(self._here.kv.seen(self._request.prompt_tokens, self._sent, end)) * self._here.page_bytes
        self._sent, self._bytes = end, self._bytes + size
        landing = self._here.wire.write(self._clock.now, size)
        self._moving_s += landing - self._clock.now
        return landing

    def _send_last(self, destination: Destination) -> None:
        if not self.over:
            self._clock.at(self._post(self._request.pages_needed), lambda: self._deliver_there(destination))

    def _deliver_there(self, destination: Destination) -> None:
        if self.over:
            return
        stats = TransferStats(self._bytes, self._sending or 0, "virtual", round(self._moving_s * 1e9))
        self._there(destination).notice(
            make_notice(
                self._request,
                self._here.peer,
                self._request.progress.first_token_id or 0,
                token_hash=hash_token_ids(self._request.task.prompt_token_ids),
                skipped=self._skipped,
            )
        )
        with self._here.visit():
            self._end()
        self._here.tell(self._request, RequestEvent(self._request.task.ref, transfer=stats))

    def _deliver_here(self) -> None:
        """Ends a local hand-over, of which the prefill half has notified the decode half."""
        if not self.over:
            with self._here.visit():
                self._end()

    def _there(self, destination: Destination) -> DecodeEnd:
        return self._here.decode_end(destination.peer)

    def _end(self) -> None:
        self.over = True
        if not self._request.progress.released:
            self._half.withdraw(self._request)
        self._half.free(self._request)
        failure: TandemError | None = self._request.progress.failure
        if failure is not None:
            self._here.tell(self._request, failure_event(self._request.task.ref, failure))
