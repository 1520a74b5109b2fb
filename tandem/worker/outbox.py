"""The way out of a worker: one stream of events for each router.

`StepPublisher` takes a step's events from the engine thread; here they are sorted by router, and the streams wake. A
stream that is slower than the steps sends several of them as one message.

What changes in the prefix cache goes to those routers that asked for it, in batches that are numbered: a stream that is
much too slow loses some of them, which its router sees by the numbers.

A router's requests live no longer than its stream: when it ends, or when nobody attaches within `attach_grace_s` of a
router's first request, `on_gone` is told.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from prefill_worker.request import call_all
from tandem.protocol.messages import RequestEvent, RoutedEvent, RoutedTokens, StepOutput, StepTokens, WorkerLoad
from tandem.protocol.prefixes import PrefixChanges
from tandem.worker.router_stream import RouterStream

log = logging.getLogger(__name__)


class Outbox:
    """Every router's stream. Lives on the event loop."""

    def __init__(
        self,
        events: asyncio.AbstractEventLoop,
        load: Callable[[], WorkerLoad],
        on_gone: Callable[[str], Sequence[RequestEvent]],
        attach_grace_s: float,
        changes: Callable[[], PrefixChanges | None] = lambda: None,
    ) -> None:
        """`on_gone(router_id)` aborts its requests and returns what a stream that replaces the lost one must hear.

        `changes` gives the next batch of the prefix cache's, if there is one.
        """
        self._events = events
        self._load = load
        self._on_gone = on_gone
        self._attach_grace_s = attach_grace_s
        self._changes = changes
        self._streams: dict[str, RouterStream] = {}
        self._step = 0
        self._closed = False

    def post(self, routed: RoutedEvent) -> None:
        """Something happened between steps."""
        stream = self._streams.get(routed.router_id)
        if stream is not None:
            stream.add(routed.event)
            stream.wake()

    def expect(self, router_id: str) -> None:
        """A request of this router arrives: keep its events for the stream that must follow soon."""
        if router_id not in self._streams:
            stream = self._streams[router_id] = RouterStream(router_id, self._snapshot)
            self._events.call_later(self._attach_grace_s, self._lose_unattached, stream)

    def attach(self, router_id: str, *, prefixes: bool = False) -> RouterStream:
        """The stream of one router.

        A second attach ends the first stream, and its requests with it: the router hears of each on the new one.
        """
        known = self._streams.get(router_id)
        stream = RouterStream(router_id, self._snapshot, prefixes=prefixes)
        if known is not None and known.attached:
            stream.pending.extend(self._on_gone(router_id))
        elif known is not None:
            stream.pending, known.pending = known.pending, []
            stream.tokens, known.tokens = known.tokens, []
        if known is not None:
            known.close()
        stream.attached = True
        stream.closed = self._closed
        self._streams[router_id] = stream
        return stream

    def detach(self, stream: RouterStream) -> None:
        """The stream ended: abort its router's requests, unless another stream has taken its place. Idempotent."""
        if self._streams.get(stream.router_id) is stream:
            del self._streams[stream.router_id]
            self._on_gone(stream.router_id)
        stream.close()

    def close(self) -> None:
        """End every stream once it has sent what is pending; later ones end at once."""
        self._closed = True
        for stream in self._streams.values():
            stream.close()

    def _lose_unattached(self, stream: RouterStream) -> None:
        if not stream.attached:
            self.detach(stream)

    def take_step(
        self,
        step: int,
        events: Sequence[RoutedEvent],
        tokens: Sequence[RoutedTokens],
        then: Sequence[Callable[[], None]],
    ) -> None:
        """Take what a step did, and make the calls behind that."""
        self._step = step
        for routed in events:
            stream = self._streams.get(routed.router_id)
            if stream is not None:
                stream.add(routed.event)
        for some in tokens:
            stream = self._streams.get(some.router_id)
            if stream is not None:
                stream.tokens.append(some.tokens)
        # Behind what the step's end sets going: hand-overs post their last pages before this thread writes messages.
        self._events.call_soon(self._send_step)
        call_all(then)

    def _send_step(self) -> None:
        try:
            changes = self._changes()
        except Exception:
            log.exception("what changed in the prefix cache is not told; the step's events are")
            changes = None
        for stream in self._streams.values():
            if changes is not None and stream.prefixes:
                stream.changes.append(changes)
            stream.wake()

    def _snapshot(
        self,
        events: tuple[RequestEvent, ...],
        changes: tuple[PrefixChanges, ...],
        tokens: tuple[StepTokens, ...],
    ) -> StepOutput:
        return StepOutput(self._step, events, self._load(), changes, tokens)
