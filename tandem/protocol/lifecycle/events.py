"""The events in the life of a request: one enum for logs, metrics, traces and tests.

Times are wall-clock nanoseconds of the process that records the event. Durations between two hosts therefore contain
the offset of their clocks; durations within one process do not.
"""

import time
from dataclasses import dataclass
from enum import IntEnum

from tandem.protocol.lifecycle.placement import PlacementStats


class LifecycleEvent(IntEnum):
    """The events in the life of a request, numbered as in `tandem.v1.LifecycleEvent`.

    RECEIVED to FINISHED are in the order in which they occur in a disaggregated request. LAST_PAGES_POSTED to
    KV_CHECKED are the parts of a KV transfer, between PREFILL_FINISHED and DECODE_ADMITTED. SILENT and REQUEUED end an
    attempt: later events belong to the next attempt. SILENT has the time of the last event from the attempt's workers,
    if they sent none for a while before the attempt ended.
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
class EventTime:
    """An event and its time, by the wall clock of the process that recorded it."""

    event: LifecycleEvent
    unix_nanos: int

    @classmethod
    def now(cls, event: LifecycleEvent) -> "EventTime":
        """Return the event with the current time."""
        return cls(event, time.time_ns())


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Statistics of the KV transfer of one request: bytes, pages, back end and duration in nanoseconds.

    The duration is the sum over the transfer's writes, without the time between writes in which the next chunk is
    computed.
    """

    bytes: int
    pages: int
    backend: str
    duration_nanos: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """All recorded events of one request, the statistics of its transfer and placement, and its workers."""

    event_times: tuple[EventTime, ...]
    transfer: TransferStats | None
    prefill_worker: str
    decode_worker: str
    placement: PlacementStats | None = None
    """The placement of the prompt; None before the first token, and after a retry."""

    def at(self, event: LifecycleEvent) -> int | None:
        """Return the time of the first `event` in Unix nanoseconds; None if there is none."""
        return min((s.unix_nanos for s in self.event_times if s.event is event), default=None)

    def seconds(self, start: LifecycleEvent, end: LifecycleEvent) -> float | None:
        """Return the seconds from the first `start` to the first `end`; None if either is missing."""
        a, b = self.at(start), self.at(end)
        return None if a is None or b is None else (b - a) / 1e9
