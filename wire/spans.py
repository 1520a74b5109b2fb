"""A timeline as spans that follow each other without a gap: together they are the request's latency.

Edges of workers are seen by other clocks. Each worker's edges are moved together, by as little as puts them where they
must have been: behind what caused them and before what they caused, both by the router's clock. Clocks that agree move
nothing.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from wire.timeline import Edge, EdgeStamp, Timeline


class Phase(StrEnum):
    """Where a request spends its time, in order; values of the label `phase`, and names of spans."""

    QUEUE = "queue"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE = "decode"


_PREFILL_EDGES = (
    Edge.PREFILL_QUEUED,
    Edge.PREFILL_STARTED,
    Edge.PREFILL_FINISHED,
)
"""Of the prefill worker, before its token is out."""
_TRANSFER_EDGES = (Edge.TRANSFER_STARTED, Edge.TRANSFER_FINISHED)
"""Of the prefill worker, before and after."""
_DECODE_EDGES = (Edge.DECODE_ADMITTED, Edge.DECODE_STARTED, Edge.PREEMPTED)
"""Of the decode worker."""

_Mark = tuple[int, Phase]
"""From these nanoseconds on it is in that phase."""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a request's life, in Unix nanoseconds of its router's clock."""

    phase: Phase
    begin_nanos: int
    end_nanos: int
    attempt: int
    """From 1: which try with which workers."""
    worker: str
    """Who did it, empty for the queue and for attempts before the last one."""

    @property
    def seconds(self) -> float:
        """How long it is."""
        return (self.end_nanos - self.begin_nanos) / 1e9


@dataclass(slots=True)
class _Attempt:
    """Edges of one attempt: the first stamp of each, moved where they belong."""

    at: dict[Edge, int] = field(default_factory=dict)

    def add(self, stamp: EdgeStamp) -> None:
        self.at.setdefault(stamp.edge, stamp.unix_nanos)

    def settle(self, end: int) -> None:
        """Move what workers saw between what the router knows; it was over at `end`."""
        reserved = max((self.at[edge] for edge in (Edge.PLACED, Edge.RESERVED) if edge in self.at), default=0)
        seen = [self.at[edge] for edge in _PREFILL_EDGES if edge in self.at]
        if seen:
            # The token leaves the router soon after the prompt is computed: the nearest bound there is.
            token = self.at.get(Edge.FIRST_TOKEN, end)
            late = min(seen[-1] - token, seen[0] - reserved)
            self._move((*_PREFILL_EDGES, *_TRANSFER_EDGES), max(reserved - seen[0], 0) or -max(late, 0))
        seen = [self.at[edge] for edge in _DECODE_EDGES if edge in self.at]
        if seen:
            computed = max(self.at.get(Edge.PREFILL_FINISHED, 0), reserved)
            self._move(_DECODE_EDGES, 0 if computed <= seen[0] and seen[-1] <= end else computed - seen[0])

    def marks(self) -> Iterator[_Mark]:
        """Its phases, each with its beginning."""
        moved = any(edge in self.at for edge in _TRANSFER_EDGES)
        for edge, phase in (
            (Edge.PLACED, Phase.QUEUE),
            (Edge.PREFILL_STARTED, Phase.PREFILL),
            (Edge.PREFILL_FINISHED, Phase.TRANSFER if moved else Phase.DECODE),
            (Edge.DECODE_STARTED, Phase.DECODE),
            (Edge.PREEMPTED, Phase.QUEUE),
        ):
            if edge in self.at:
                yield self.at[edge], phase

    def _move(self, edges: tuple[Edge, ...], by: int) -> None:
        for edge in edges:
            if edge in self.at:
                self.at[edge] += by


def spans_of(timeline: Timeline) -> tuple[Span, ...]:
    """From RECEIVED to FINISHED, in order; () of a request that has not ended. Where several tries were made, time
    until the next one begins counts to what the failed one was at, as far as its workers have told.
    """
    begin, end = timeline.at(Edge.RECEIVED), timeline.at(Edge.FINISHED)
    if begin is None or end is None:
        return ()
    attempts = _attempts(timeline.edges)
    marks: list[tuple[int, Phase, int]] = [(begin, Phase.QUEUE, 1)]
    for number, attempt in enumerate(attempts, 1):
        later = attempts[number].at.get(Edge.PLACED, end) if number < len(attempts) else end
        attempt.settle(later)
        marks.extend((max(begin, min(nanos, end)), phase, number) for nanos, phase in attempt.marks())
    return tuple(_spans(marks, end, len(attempts), timeline))


def _attempts(edges: Iterable[EdgeStamp]) -> list[_Attempt]:
    """Each begins where the request was placed; what came before is of the first."""
    attempts = [_Attempt()]
    for stamp in edges:
        if stamp.edge is Edge.PLACED and Edge.PLACED in attempts[-1].at:
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
