"""Converts a timeline into contiguous spans, whose sum is the request's latency.

Workers stamp their edges with other clocks. All edges of a worker are shifted together, by the smallest amount that
puts them after their cause and before their effect, which are both measured by the router's clock. With synchronized
clocks nothing is shifted.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum

from tandem.protocol.lifecycle.timeline import Edge, EdgeStamp, Timeline


class Phase(StrEnum):
    """The phases of a request, in order; values of the metric label `phase` and names of spans."""

    QUEUE = "queue"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE = "decode"
    STALL = "stall"
    """The time without events from the request's workers, until the router abandoned them."""


_PREFILL_EDGES = (
    Edge.PREFILL_QUEUED,
    Edge.PREFILL_STARTED,
    Edge.PREFILL_FINISHED,
)
"""Edges of the prefill worker before it sends the first token."""
_TRANSFER_EDGES = (Edge.TRANSFER_STARTED, Edge.TRANSFER_FINISHED)
"""Edges of the prefill worker before or after it sends the first token."""
_DECODE_EDGES = (Edge.DECODE_ADMITTED, Edge.DECODE_STARTED, Edge.PREEMPTED)
"""Edges of the decode worker."""

_Mark = tuple[int, Phase]
"""The time in nanoseconds at which a phase begins."""


@dataclass(frozen=True, slots=True)
class Span:
    """An interval of a request's life, in Unix nanoseconds of its router's clock."""

    phase: Phase
    begin_nanos: int
    end_nanos: int
    attempt: int
    """The number of the attempt, from 1."""
    worker: str
    """The worker of the phase; empty for the queue and for attempts before the last one."""

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return (self.end_nanos - self.begin_nanos) / 1e9


@dataclass(slots=True)
class _Attempt:
    """The edges of one attempt: the first stamp of each, shifted by `settle`."""

    at: dict[Edge, int] = field(default_factory=dict)

    def add(self, stamp: EdgeStamp) -> None:
        self.at.setdefault(stamp.edge, stamp.unix_nanos)

    @property
    def began(self) -> int | None:
        """Start of the attempt by the router's clock; None if the request never left the queue."""
        return self.at.get(Edge.REQUEUED, self.at.get(Edge.PLACED))

    def settle(self, end: int) -> None:
        """Shift the workers' edges so that they lie between the router's; the attempt ended at `end`."""
        end = min(end, self.at.get(Edge.SILENT, end))
        reserved = max((self.at[edge] for edge in (Edge.PLACED, Edge.RESERVED) if edge in self.at), default=0)
        seen = [self.at[edge] for edge in _PREFILL_EDGES if edge in self.at]
        if seen:
            # The first token leaves the router soon after the prompt is computed, unless it is held back
            # (`router/requests/first_token.py`): this is the tightest available bound.
            token = self.at.get(Edge.FIRST_TOKEN, end)
            token = end if token < reserved else token  # the token is that of an earlier attempt
            # Edges before the reservation move forward; edges after the token move back, but not before the
            # reservation.
            late = min(seen[-1] - token, seen[0] - reserved)
            self._move((*_PREFILL_EDGES, *_TRANSFER_EDGES), max(reserved - seen[0], 0) or -max(late, 0))
        seen = [self.at[edge] for edge in _DECODE_EDGES if edge in self.at]
        if seen:
            computed = max(self.at.get(Edge.PREFILL_FINISHED, 0), reserved)
            self._move(_DECODE_EDGES, 0 if computed <= seen[0] and seen[-1] <= end else computed - seen[0])

    def marks(self) -> Iterator[_Mark]:
        """Yield the phases of the attempt with the times at which they begin."""
        moved = any(edge in self.at for edge in _TRANSFER_EDGES)
        for edge, phase in (
            (Edge.REQUEUED, Phase.QUEUE),
            (Edge.PLACED, Phase.QUEUE),
            (Edge.PREFILL_STARTED, Phase.PREFILL),
            (Edge.PREFILL_FINISHED, Phase.TRANSFER if moved else Phase.DECODE),
            (Edge.DECODE_STARTED, Phase.DECODE),
            (Edge.PREEMPTED, Phase.QUEUE),
            (Edge.SILENT, Phase.STALL),
        ):
            if edge in self.at:
                yield self.at[edge], phase

    def _move(self, edges: tuple[Edge, ...], by: int) -> None:
        for edge in edges:
            if edge in self.at:
                self.at[edge] += by


def spans_of(timeline: Timeline) -> tuple[Span, ...]:
    """Return the spans from RECEIVED to FINISHED, in order; () if the request has not ended.

    Each attempt has its own phases; an unsuccessful attempt ends with STALL or with the phase in which it failed.
    """
    begin, end = timeline.at(Edge.RECEIVED), timeline.at(Edge.FINISHED)
    if begin is None or end is None:
        return ()
    attempts = _attempts(timeline.edges)
    marks: list[tuple[int, Phase, int]] = [(begin, Phase.QUEUE, 1)]
    for number, attempt in enumerate(attempts, 1):
        later = attempts[number].began if number < len(attempts) else None
        attempt.settle(end if later is None else later)
        marks.extend((max(begin, min(nanos, end)), phase, number) for nanos, phase in attempt.marks())
    return tuple(_spans(marks, end, len(attempts), timeline))


def seconds_by_phase(spans: Iterable[Span], until: int | None = None) -> dict[Phase, float]:
    """Return the seconds spent in each phase, up to `until` in Unix nanoseconds, None = to the end."""
    found: dict[Phase, float] = {}
    for span in spans:
        end = span.end_nanos if until is None else min(until, span.end_nanos)
        if end > span.begin_nanos:
            found[span.phase] = found.get(span.phase, 0.0) + (end - span.begin_nanos) / 1e9
    return found


def last_attempt(timeline: Timeline) -> Timeline:
    """Return the part of the timeline since the request last returned to the queue."""
    begun = [place for place, stamp in enumerate(timeline.edges) if stamp.edge is Edge.REQUEUED]
    return replace(timeline, edges=timeline.edges[begun[-1] :]) if begun else timeline


def _attempts(edges: Iterable[EdgeStamp]) -> list[_Attempt]:
    """Split the edges into attempts: each but the first begins with a return to the queue."""
    attempts = [_Attempt()]
    for stamp in edges:
        if stamp.edge is Edge.REQUEUED:
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
