"""The progress of prompts, told by the engine thread to the coroutines that hand them over on the event loop."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from wire.errors import TandemError
from wire.messages import FinishReason

log = logging.getLogger(__name__)


class Progress:
    """How far the engine is with one prompt. It lives on the event loop: the engine thread's updates arrive there as
    calls, so nothing here is locked.

    `released` means that the engine never touches this request's pages again.
    """

    def __init__(self) -> None:
        self.computed_tokens = 0
        self.first_token_id: int | None = None
        self.finish_reason: FinishReason | None = None
        self.failure: TandemError | None = None
        self.released = False
        self._changed = asyncio.Event()

    def advance(self, computed_tokens: int) -> None:
        """The KV of the first `computed_tokens` positions is in the pages."""
        self.computed_tokens = computed_tokens
        self._changed.set()

    def finish(self, first_token_id: int, finish_reason: FinishReason | None) -> None:
        """The whole prompt is computed; `finish_reason` is set when the first token is the last as well."""
        self.first_token_id = first_token_id
        self.finish_reason = finish_reason
        self.release()

    def release(self, failure: TandemError | None = None) -> None:
        """The engine is through with this request; `failure` says why if it did not finish by itself."""
        self.failure = self.failure or failure
        self.released = True
        self._changed.set()

    async def beyond(self, tokens: int) -> None:
        """Wait until more than `tokens` positions are computed or the engine has released the request."""
        while self.computed_tokens <= tokens and not self.released:
            self._changed.clear()
            await self._changed.wait()

    async def until_released(self) -> None:
        """Wait until the engine never touches the pages again."""
        while not self.released:
            self._changed.clear()
            await self._changed.wait()


class EventThread(Protocol):
    """The event loop on which updates are delivered."""

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any) -> object: ...


class ProgressUpdates:
    """Calls to be made on the event loop, in order. Only the engine thread uses it."""

    def __init__(self, events: EventThread) -> None:
        self._events = events
        self._calls: list[Callable[[], None]] = []

    def add(self, call: Callable[[], None]) -> None:
        """Deliver this call with the next ones."""
        self._calls.append(call)

    def take(self) -> Sequence[Callable[[], None]]:
        """Return all calls, to a caller who delivers them."""
        calls, self._calls = self._calls, []
        return calls

    def deliver(self) -> None:
        """Have the event loop make the calls."""
        if calls := self.take():
            self._events.call_soon_threadsafe(call_all, calls)


def call_all(calls: Iterable[Callable[[], None]]) -> None:
    """Make each call, even if others fail: they concern different requests."""
    for call in calls:
        try:
            call()
        except Exception:
            log.exception("a hand-over did not hear of its step")
