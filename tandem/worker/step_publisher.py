"""Passes a step's events from the engine thread to the event loop."""

import asyncio
from collections.abc import Callable, Sequence

from tandem.protocol.messages import RoutedEvent, RoutedTokens
from tandem.worker.outbox import Outbox


class StepPublisher:
    """Passes the output of steps to the outbox. Called on the engine thread."""

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
        """Give a step's events and tokens to the outbox, and then have the event loop make the calls. Never waits.

        The event loop is woken once: with two wake-ups, it could write messages while the engine thread waits to make
        the second.
        """
        self._events.call_soon_threadsafe(self._outbox.take_step, step, events, tokens, then)
