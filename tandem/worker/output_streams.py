"""The output of a worker: one stream of events for each router.

The engine thread publishes the events of each step. The event loop passes each event to the stream of its router. A
stream that is slower than the steps sends the events of several steps as one message.

Changes of the prefix cache are sent to the routers that request them, in numbered batches. A stream that is much too
slow loses some batches; its router notices the missing numbers.

A router's requests are aborted (`on_gone`) when its stream ends, or when no stream is attached within `attach_grace_s`
seconds of its first request.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from prefill_worker.request import call_all
from tandem.protocol.errors import Unavailable
from tandem.protocol.messages import RequestEvent, RoutedEvent, RoutedTokens, StepOutput, StepTokens, WorkerLoad
from tandem.protocol.prefixes import PrefixChanges

log = logging.getLogger(__name__)


PREFIX_BATCHES_MAX = 64
"""Maximum number of batches of prefix changes that wait in one stream; beyond it the oldest batch is lost."""

Snapshot = Callable[[tuple[RequestEvent, ...], tuple[PrefixChanges, ...], tuple[StepTokens, ...]], StepOutput]


class OutputStream:
    """The events and tokens that wait to be sent to one router. Made by `OutputStreams`; used on the event loop."""

    def __init__(self, router_id: str, snapshot: Snapshot, *, prefixes: bool = False) -> None:
        """Create the stream; `prefixes` is True if the router has requested the changes of the prefix cache."""
        self.router_id = router_id
        self.pending: list[RequestEvent] = []
        self.tokens: list[StepTokens] = []
        """Tokens to be sent after `pending`."""
        self.prefixes = prefixes
        self.changes: deque[PrefixChanges] = deque(maxlen=PREFIX_BATCHES_MAX)
        self.attached = False
        self.closed = False
        self._snapshot = snapshot
        self._changed = asyncio.Event()

    def add(self, event: RequestEvent) -> None:
        """Append an event after all waiting events and tokens."""
        for some in self.tokens:
            self.pending.extend(some.events())
        self.tokens.clear()
        self.pending.append(event)

    def wake(self) -> None:
        """Make the stream send a message with all waiting events and tokens."""
        self._changed.set()

    def close(self) -> None:
        """Close the stream. The reader ends once it has sent everything that is pending."""
        self.closed = True
        self._changed.set()

    async def messages(self) -> AsyncIterator[StepOutput]:
        """Yield one message at once, then one for each step, or for several steps if the reader is slower."""
        self._changed.set()
        while not self.closed or self.pending or self.tokens:
            await self._changed.wait()
            self._changed.clear()
            pending, self.pending = self.pending, []
            tokens, self.tokens = self.tokens, []
            changes = tuple(self.changes)
            self.changes.clear()
            yield self._snapshot(tuple(pending), changes, tuple(tokens))


class OutputStreams:
    """The event streams of all routers. Owned by the worker, and used on the event loop except for `publish`."""

    def __init__(
        self,
        events: asyncio.AbstractEventLoop,
        load: Callable[[], WorkerLoad],
        on_gone: Callable[[str], Sequence[RequestEvent]],
        attach_grace_s: float,
        changes: Callable[[], PrefixChanges | None] = lambda: None,
    ) -> None:
        """Create the streams of a worker that no router is attached to.

        `on_gone(router_id)` aborts the router's requests and returns an event for each; a stream that replaces the lost
        one must send these events. `changes` returns the next batch of changes of the prefix cache, or None.
        """
        self._events = events
        self._load = load
        self._on_gone = on_gone
        self._attach_grace_s = attach_grace_s
        self._changes = changes
        self._streams: dict[str, OutputStream] = {}
        self._step = 0
        self._closed = False

    def post(self, routed: RoutedEvent) -> None:
        """Send an event that happened between steps."""
        stream = self._streams.get(routed.router_id)
        if stream is not None:
            stream.add(routed.event)
            stream.wake()

    def expect(self, router_id: str) -> None:
        """Collect the events of a router that sends a request before it attaches to its stream, until it attaches."""
        if router_id not in self._streams:
            stream = self._streams[router_id] = OutputStream(router_id, self._snapshot)
            self._events.call_later(self._attach_grace_s, self._lose_unattached, stream)

    def attach(self, router_id: str, *, prefixes: bool = False) -> OutputStream:
        """Attach a router to its stream, and return the stream.

        A second attach ends the first stream and aborts its requests: the router gets an event for each request on the
        new stream. Raises Unavailable after `close`: a router must not send requests to a worker that ends.
        """
        if self._closed:
            raise Unavailable("this worker is ending; attach to the one that replaces it")
        known = self._streams.get(router_id)
        stream = OutputStream(router_id, self._snapshot, prefixes=prefixes)
        if known is not None and known.attached:
            stream.pending.extend(self._on_gone(router_id))
        elif known is not None:
            stream.pending, known.pending = known.pending, []
            stream.tokens, known.tokens = known.tokens, []
        if known is not None:
            known.close()
        stream.attached = True
        self._streams[router_id] = stream
        return stream

    def detach(self, stream: OutputStream) -> None:
        """Abort the requests of a router whose stream has ended, unless another stream has replaced it. Idempotent."""
        if self._streams.get(stream.router_id) is stream:
            del self._streams[stream.router_id]
            self._on_gone(stream.router_id)
        stream.close()

    def close(self) -> None:
        """End every stream once it has sent all pending events and tokens; no router can attach from now on."""
        self._closed = True
        for stream in self._streams.values():
            stream.close()

    def _lose_unattached(self, stream: OutputStream) -> None:
        if not stream.attached:
            self.detach(stream)

    def publish(
        self,
        step: int,
        events: Sequence[RoutedEvent],
        tokens: Sequence[RoutedTokens] = (),
        then: Sequence[Callable[[], None]] = (),
    ) -> None:
        """Pass a step's events and tokens to the event loop, which then makes the calls `then`.

        Called on the engine thread. The function never waits. It wakes the event loop only once: with two wake-ups, the
        event loop could write messages while the engine thread waits to make the second one.
        """
        self._events.call_soon_threadsafe(self._take_step, step, events, tokens, then)

    def _take_step(
        self,
        step: int,
        events: Sequence[RoutedEvent],
        tokens: Sequence[RoutedTokens],
        then: Sequence[Callable[[], None]],
    ) -> None:
        self._step = step
        for routed in events:
            stream = self._streams.get(routed.router_id)
            if stream is not None:
                stream.add(routed.event)
        for some in tokens:
            stream = self._streams.get(some.router_id)
            if stream is not None:
                stream.tokens.append(some.tokens)
        # Messages are written after the calls `then`: hand-overs post their last pages first.
        self._events.call_soon(self.send_changes)
        call_all(then)

    def send_changes(self) -> None:
        """Send each router a message with all that waits for it: events, tokens and changes of the prefix cache."""
        try:
            changes = self._changes()
        except Exception:
            log.exception("the changes of the prefix cache are not sent; the step's events are")
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
