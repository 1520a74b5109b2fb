"""Messages in flight between processes, which the test delivers in any order, late, more than once or never."""

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from tests.model.processes import Process, ProcessLoop

Key = tuple[str | int, ...]


class Message:
    """A message in flight; a `fragile` message may be lost or arrive twice."""

    def __init__(self, key: Key, arrive: Callable[[], None], fragile: bool) -> None:
        self.key = key
        self.arrive = arrive
        self.fragile = fragile


class OpenCall(Protocol):
    """A call that has not ended for its client (`calls.py`)."""

    client: Process
    server: Process | None
    address: str

    def lose_connection(self) -> None:
        """End the call, because its connection is lost."""

    def cancel(self) -> None:
        """Cancel the call on behalf of the client."""

    def is_on(self, channel: object) -> bool:
        """Return True if the call was made on this channel."""


class Network:
    """All messages in flight between processes."""

    def __init__(self, loop: ProcessLoop, report: Callable[[str], None]) -> None:
        """Create an empty network; `report` is called for handlers that failed unexpectedly."""
        self.loop = loop
        self.report = report
        self.listeners: dict[str, tuple[Process, Any]] = {}
        self.calls: list[OpenCall] = []
        self.streams = 0
        self._lines: dict[Key, deque[Message]] = {}
        self._numbers: dict[Key, int] = {}

    def listen(self, address: str, process: Process, servicer: Any) -> None:
        """Direct requests to `address` to this servicer from now on."""
        self.listeners[address] = (process, servicer)

    def listener(self, address: str) -> tuple[Process, Any] | None:
        """Return the live process that listens at `address`, and its servicer; None = there is none."""
        listener = self.listeners.get(address)
        return listener if listener is not None and listener[0].alive else None

    def send(self, key: Key, arrive: Callable[[], None], *, fragile: bool = False) -> None:
        """Send a message that may overtake others and be overtaken. Numbering makes its key the same in every run."""
        self._numbers[key] = number = self._numbers.get(key, 0) + 1
        self.send_in_line((*key, number), arrive, fragile=fragile)

    def send_in_line(self, line: Key, arrive: Callable[[], None], *, fragile: bool = False) -> None:
        """Send a message that arrives after all earlier messages of the same line."""
        self._lines.setdefault(line, deque()).append(Message(line, arrive, fragile))

    def cut(self, line: Key) -> None:
        """Drop all messages in flight on this line."""
        self._lines.pop(line, None)

    def waiting(self) -> list[Message]:
        """Return the messages that may arrive next: the first of each line."""
        return [line[0] for _, line in sorted(self._lines.items())]

    def deliver(self, message: Message) -> None:
        """Deliver the message, unless the delivery of an earlier one has dropped it."""
        line = self._lines.get(message.key)
        if line is not None and line[0] is message:
            self.lose(message)
            self.repeat(message)

    def lose(self, message: Message) -> None:
        """Drop the message; callers may drop only fragile ones."""
        line = self._lines[message.key]
        assert line.popleft() is message
        if not line:
            del self._lines[message.key]

    def repeat(self, message: Message) -> None:
        """Deliver the message, but keep it in flight."""
        with self.loop.running():
            message.arrive()
        self.loop.run_ready()

    def connections(self) -> list[tuple[str, str]]:
        """Return client and address of every connection with a call on it."""
        return sorted({(call.client.name, call.address) for call in self.calls})

    def break_connection(self, client: str, address: str) -> None:
        """End every call on the connection, at its client and at its server, each when it is notified."""
        with self.loop.running():
            for call in [call for call in self.calls if (call.client.name, call.address) == (client, address)]:
                call.lose_connection()
        self.loop.run_ready()

    def remove_dead(self, process: Process) -> None:
        """Break all connections of a process that was killed."""
        with self.loop.running():
            for call in [call for call in self.calls if process in (call.client, call.server)]:
                call.lose_connection()
        self.loop.run_ready()
