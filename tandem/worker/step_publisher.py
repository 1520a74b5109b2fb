"""The way of a step's events from the engine thread to the event loop."""

import asyncio
from collections.abc import Callable, Sequence

from tandem.protocol.messages import RoutedEvent, RoutedTokens
from tandem.worker.outbox import Outbox


class StepPublisher:
    """Belongs to the engine thread."""

    def __init__(self, events: asyncio.AbstractEventLoop, outbox: Outbox) -> None:
        self._events = events
        self._outbox = outbox

    def publish(
        self,
        step: int,
        events: Sequence[RoutedEvent],
        tokens: Sequence[RoutedTokens] = (),
        then: Sequence[Callable[[], None]] = (),
    ) -> None:
        """Give a step's events to the outbox, and have the calls made on the event loop behind that. Never waits.

        It wakes the event loop once: between two calls that thread might write messages while this one waits for it.
        """
        self._events.call_soon_threadsafe(self._outbox.take_step, step, events, tokens, then)
