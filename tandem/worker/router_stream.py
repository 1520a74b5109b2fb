"""The stream of events to one router."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from tandem.protocol.messages import RequestEvent, StepOutput, StepTokens
from tandem.protocol.prefixes import PrefixChanges

PREFIX_BATCHES_MAX = 64
"""The most batches of prefix changes that wait in one stream; if there are more, the oldest is lost."""

Snapshot = Callable[[tuple[RequestEvent, ...], tuple[PrefixChanges, ...], tuple[StepTokens, ...]], StepOutput]


class RouterStream:
    """The events and tokens that wait to be sent to one router. Made by the outbox; used on the event loop."""

    def __init__(self, router_id: str, snapshot: Snapshot, *, prefixes: bool = False) -> None:
        """Create the stream. `prefixes` is True if the router wants the changes of the prefix cache."""
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
        """Append an event after everything that waits."""
        for some in self.tokens:
            self.pending.extend(some.events())
        self.tokens.clear()
        self.pending.append(event)

    def wake(self) -> None:
        """Send what waits."""
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
