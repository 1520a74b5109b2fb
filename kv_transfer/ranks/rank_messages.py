"""The messages between the first rank and the transport of another rank, over a pipe."""

import contextlib
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kv_transfer.base import PageRanges, RankTransport
from tandem.protocol.messages import PeerDescription, PeerRef, TransferNotice

CLOSE_TIMEOUT_S = 15.0
SILENT_S = 0.5
"""Seconds without a message after which a rank is silent: half of the delay of reports of delivered notices.

Only time in which this process waits for a message counts: a busy host or a debugger delays both processes.
"""
OPENING = -1
"""The number of the result of an `Open` that failed."""


@dataclass(frozen=True, slots=True)
class Status:
    """The facts about a transport that change."""

    poll_s: float
    name: str
    kinds: str
    warnings: tuple[str, ...]

    @classmethod
    def of(cls, transport: RankTransport) -> "Status":
        """Return the present facts of a transport."""
        return cls(
            transport.transport_poll_s(),
            transport.transport_name(),
            transport.transport_kinds(),
            transport.warnings(),
        )


@dataclass(frozen=True, slots=True)
class Opened:
    """The rank's transport is open."""

    backend: str
    description: PeerDescription
    facts: tuple[tuple[str, str], ...]
    open_ports: tuple[str, ...]
    status: Status


@dataclass(frozen=True, slots=True)
class Open:
    """A request to open the transport; the first message."""


@dataclass(frozen=True, slots=True)
class Close:
    """A request to close the transport; the last message."""


@dataclass(frozen=True, slots=True)
class AddPeer:
    """A call of `Transport.add_peer`."""

    description: PeerDescription
    ranges: PageRanges


@dataclass(frozen=True, slots=True)
class RemovePeer:
    """A call of `Transport.remove_peer`."""

    peer: PeerRef


@dataclass(frozen=True, slots=True)
class Expect:
    """A call of `Transport.expect`."""

    leases: int


@dataclass(frozen=True, slots=True)
class Write:
    """A write that may begin at once; `begin_by` and `deadline` are times of `time.monotonic`."""

    number: int
    peer: PeerRef
    local_pages: tuple[int, ...]
    remote_pages: tuple[int, ...]
    groups: tuple[int, ...]
    notice: TransferNotice | None
    begin_by: float
    deadline: float


@dataclass(frozen=True, slots=True)
class Sums:
    """A request for the checksums of pages."""

    number: int
    pages: tuple[int, ...]
    filled: tuple[int, ...]
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SharePages:
    """A request to map the memory in the file `path`, to which pages are copied; sent once, before any `CopyPages`."""

    number: int
    path: Path


@dataclass(frozen=True, slots=True)
class CopyPages:
    """A request to copy pages to the first rows of the memory of `SharePages`, or back if `to_pool`."""

    number: int
    pages: tuple[int, ...]
    to_pool: bool


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a write or of checksums, or the message of its error."""

    number: int
    value: Any
    error: str | None = None


class ReceivedMessages:
    """Iterates over the messages that a rank sends over a pipe, until it closes its end, and measures its silence."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.silent_s = 0.0
        """Seconds without a message, in steps of `SILENT_S`; 0 before the first one. Any thread may read it."""

    def __iter__(self) -> Iterator[object]:
        """Wait for messages, on the thread that iterates."""
        reports = False
        while True:
            try:
                if not self._pipe.poll(SILENT_S):
                    self.silent_s += SILENT_S if reports else 0.0
                    continue
                message = self._pipe.recv()
            except (EOFError, OSError):
                return
            reports, self.silent_s = True, 0.0
            yield message

    def ignore(self) -> None:
        """Wait for messages that only show that the rank runs, until it closes its end."""
        for _ in self:
            pass


class Outbox:
    """Sends messages to the other end of a pipe on a thread, so that no caller waits for the other end to read."""

    def __init__(self, pipe: Connection, name: str) -> None:
        self._pipe = pipe
        self._messages: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, message: object) -> None:
        """Send a message after those that were put before; without effect once the other end is closed."""
        self._messages.put(message)

    def close(self) -> None:
        """Send what was put before, and end the thread; return when both are done, or after `CLOSE_TIMEOUT_S`."""
        self._messages.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            for message in iter(self._messages.get, None):
                self._pipe.send(message)
