"""The edges of a request's life: one enum for logs, metrics, traces and tests.

Stamps are wall-clock nanoseconds of the process that saw the edge; durations between two hosts therefore carry
their clock offset, durations within one process do not.
"""

import time
from dataclasses import dataclass
from enum import IntEnum


class Edge(IntEnum):
    """An edge, numbered as in `tandem.v1.Edge`; the order is that of a disaggregated request, up to FINISHED.

    From LAST_PAGES_POSTED on they are the parts of a hand-over: between PREFILL_FINISHED and DECODE_ADMITTED. The last
    two end a try with some workers: what comes behind them is of the next one.
    """

    RECEIVED = 1
    TOKENIZED = 2
    PLACED = 3
    RESERVED = 4
    PREFILL_QUEUED = 5
    PREFILL_STARTED = 6
    PREFILL_FINISHED = 7
    TRANSFER_STARTED = 8
    TRANSFER_FINISHED = 9
    FIRST_TOKEN = 10
    DECODE_ADMITTED = 11
    DECODE_STARTED = 12
    FINISHED = 13
    PREEMPTED = 14
    LAST_PAGES_POSTED = 15
    NOTICE_MADE = 16
    NOTICE_POSTED = 17
    NOTICE_SEEN = 18
    KV_CHECKED = 19
    SILENT = 20
    REQUEUED = 21


@dataclass(frozen=True, slots=True)
class EdgeStamp:
    """`edge` was seen at `unix_nanos` (wall clock of the process that saw it)."""

    edge: Edge
    unix_nanos: int

    @classmethod
    def now(cls, edge: Edge) -> "EdgeStamp":
        return cls(edge, time.time_ns())


@dataclass(frozen=True, slots=True)
class TransferStats:
    """What one request's KV transfer moved: bytes, pages, by which back end, and for how long (ns).

    That is the time of all its writes: between two of them nothing moves, for as long as the next chunk is computed.
    """

    bytes: int
    pages: int
    backend: str
    duration_nanos: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """Every edge seen of one request, with its transfer and the workers that served it."""

    edges: tuple[EdgeStamp, ...]
    transfer: TransferStats | None
    prefill_worker: str
    decode_worker: str

    def at(self, edge: Edge) -> int | None:
        """First stamp of `edge` in Unix nanoseconds, None if it was not seen."""
        return min((s.unix_nanos for s in self.edges if s.edge is edge), default=None)

    def seconds(self, start: Edge, end: Edge) -> float | None:
        """Seconds from `start` to `end`, None if either was not seen."""
        a, b = self.at(start), self.at(end)
        return None if a is None or b is None else (b - a) / 1e9
