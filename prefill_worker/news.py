"""What happened in a step, for those who hear it on another thread."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol


class EventThread(Protocol):
    """Where news are heard: an event loop."""

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any) -> object: ...


class News:
    """Calls to be made there, in order. For the engine thread alone."""

    def __init__(self, events: EventThread) -> None:
        self._events = events
        self._calls: list[Callable[[], None]] = []

    def add(self, call: Callable[[], None]) -> None:
        """To be made with the next."""
        self._calls.append(call)

    def take(self) -> Sequence[Callable[[], None]]:
        """All of them, for somebody who has them made."""
        calls, self._calls = self._calls, []
        return calls

    def announce(self) -> None:
        """Have them made."""
        if calls := self.take():
            self._events.call_soon_threadsafe(_call_all, calls)


def _call_all(calls: Iterable[Callable[[], None]]) -> None:
    for call in calls:
        call()
