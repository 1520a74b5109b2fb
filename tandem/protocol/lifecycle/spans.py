"""Divides the life of a request into consecutive spans, whose durations add up to its latency.

Workers record events by their own clocks. All events of a worker in an attempt are therefore shifted by the same time,
so that by the router's clock they follow their cause (such as the reservation) and precede their effect (such as the
first token). Events that are between the two already, as with synchronized clocks, are not shifted.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum

from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent, Timeline


class Phase(StrEnum):
    """The phases of a request, in order; used as values of the metric label `phase` and as names of spans."""

    QUEUE = "queue"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE = "decode"
    STALL = "stall"
    """The time without events from the request's workers, until the router abandoned these workers."""


_PREFILL_EVENTS = (
    LifecycleEvent.PREFILL_QUEUED,
    LifecycleEvent.PREFILL_STARTED,
    LifecycleEvent.PREFILL_FINISHED,
)
"""Events that the prefill worker records before it sends the first token."""
_TRANSFER_EVENTS = (LifecycleEvent.TRANSFER_STARTED, LifecycleEvent.TRANSFER_FINISHED)
"""Events that the prefill worker records before or after it sends the first token."""
_DECODE_EVENTS = (LifecycleEvent.DECODE_ADMITTED, LifecycleEvent.DECODE_STARTED, LifecycleEvent.PREEMPTED)
"""Events that the decode worker records."""

_Mark = tuple[int, Phase]
"""The start of a phase: its time in nanoseconds, and the phase."""


@dataclass(frozen=True, slots=True)
class Span:
    """A phase of a request's life; begin and end are in Unix nanoseconds of the router's clock."""

    phase: Phase
    begin_nanos: int
    end_nanos: int
    attempt: int
    """Number of the attempt, from 1."""
    worker: str
    """The id of the worker in this phase; empty for the queue and for attempts before the last one."""

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return (self.end_nanos - self.begin_nanos) / 1e9


@dataclass(slots=True)
class _Attempt:
    """The first time of each event of one attempt, by the router's clock after `align`."""

    at: dict[LifecycleEvent, int] = field(default_factory=dict)

    def add(self, stamp: EventTime) -> None:
        self.at.setdefault(stamp.event, stamp.unix_nanos)

    @property
    def began(self) -> int | None:
        """Start of the attempt by the router's clock; None if the request never left the queue."""
        return self.at.get(LifecycleEvent.REQUEUED, self.at.get(LifecycleEvent.PLACED))

    def align(self, end: int) -> None:
        """Shift the events of each worker to times between their cause and their effect; the attempt ended at `end`."""
        end = min(end, self.at.get(LifecycleEvent.SILENT, end))
        reserved = max(
            (self.at[event] for event in (LifecycleEvent.PLACED, LifecycleEvent.RESERVED) if event in self.at),
            default=0,
        )
        seen = [self.at[event] for event in _PREFILL_EVENTS if event in self.at]
        if seen:
            # The first token leaves the router soon after the prompt is computed, unless it is held back
            # (`router/requests/first_token.py`): this is the tightest available bound.
            token = self.at.get(LifecycleEvent.FIRST_TOKEN, end)
            token = end if token < reserved else token  # the token is that of an earlier attempt
            # Events before the reservation move forward; events after the token move back, but not before the
            # reservation.
            late = min(seen[-1] - token, seen[0] - reserved)
            self._move((*_PREFILL_EVENTS, *_TRANSFER_EVENTS), max(reserved - seen[0], 0) or -max(late, 0))
        seen = [self.at[event] for event in _DECODE_EVENTS if event in self.at]
        if seen:
            computed = max(self.at.get(LifecycleEvent.PREFILL_FINISHED, 0), reserved)
            self._move(_DECODE_EVENTS, 0 if computed <= seen[0] and seen[-1] <= end else computed - seen[0])

    def marks(self) -> Iterator[_Mark]:
        """Yield the start of each phase of the attempt."""
        moved = any(event in self.at for event in _TRANSFER_EVENTS)
        for event, phase in (
            (LifecycleEvent.REQUEUED, Phase.QUEUE),
            (LifecycleEvent.PLACED, Phase.QUEUE),
            (LifecycleEvent.PREFILL_STARTED, Phase.PREFILL),
            (LifecycleEvent.PREFILL_FINISHED, Phase.TRANSFER if moved else Phase.DECODE),
            (LifecycleEvent.DECODE_STARTED, Phase.DECODE),
            (LifecycleEvent.PREEMPTED, Phase.QUEUE),
            (LifecycleEvent.SILENT, Phase.STALL),
        ):
            if event in self.at:
                yield self.at[event], phase

    def _move(self, event_times: tuple[LifecycleEvent, ...], by: int) -> None:
        for event in event_times:
            if event in self.at:
                self.at[event] += by


def spans_of(timeline: Timeline) -> tuple[Span, ...]:
    """Return the spans of a request from RECEIVED to FINISHED, in order; empty if it has not ended.

    Each attempt has its own spans; a failed attempt ends with STALL or with the phase in which it failed.
    """
    begin, end = timeline.at(LifecycleEvent.RECEIVED), timeline.at(LifecycleEvent.FINISHED)
    if begin is None or end is None:
        return ()
    attempts = _attempts(timeline.event_times)
    marks: list[tuple[int, Phase, int]] = [(begin, Phase.QUEUE, 1)]
    for number, attempt in enumerate(attempts, 1):
        later = attempts[number].began if number < len(attempts) else None
        attempt.align(end if later is None else later)
        marks.extend((max(begin, min(nanos, end)), phase, number) for nanos, phase in attempt.marks())
    return tuple(_spans(marks, end, len(attempts), timeline))


def seconds_by_phase(spans: Iterable[Span], until: int | None = None) -> dict[Phase, float]:
    """Return the seconds spent in each phase, up to the time `until` in Unix nanoseconds; None = to the end."""
    seconds: dict[Phase, float] = {}
    for span in spans:
        end = span.end_nanos if until is None else min(until, span.end_nanos)
        if end > span.begin_nanos:
            seconds[span.phase] = seconds.get(span.phase, 0.0) + (end - span.begin_nanos) / 1e9
    return seconds


def last_attempt(timeline: Timeline) -> Timeline:
    """Return the timeline with only the events of the last attempt, after the last return to the queue."""
    begun = [place for place, stamp in enumerate(timeline.event_times) if stamp.event is LifecycleEvent.REQUEUED]
    return replace(timeline, event_times=timeline.event_times[begun[-1] :]) if begun else timeline


def _attempts(event_times: Iterable[EventTime]) -> list[_Attempt]:
    """Divide the events into attempts: each attempt but the first begins with a return to the queue."""
    attempts = [_Attempt()]
    for stamp in event_times:
        if stamp.event is LifecycleEvent.REQUEUED:
            attempts.append(_Attempt())
        attempts[-1].add(stamp)
    return attempts


def _spans(marks: list[tuple[int, Phase, int]], end: int, last: int, timeline: Timeline) -> Iterator[Span]:
    workers = {Phase.PREFILL: timeline.prefill_worker, Phase.TRANSFER: timeline.prefill_worker}
    workers[Phase.DECODE] = timeline.decode_worker or timeline.prefill_worker
    at, phase, attempt = marks[0]
    for nanos, following, number in [*marks[1:], (end, None, 0)]:
        if (following, number) == (phase, attempt):
            continue
        until = max(at, nanos)
        if until > at:
            yield Span(phase, at, until, attempt, workers.get(phase, "") if attempt == last else "")
        if following is not None:
            at, phase, attempt = until, following, number
