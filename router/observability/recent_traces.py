"""The traces of ended requests that a router keeps: the newest ones, and the slowest of each latency bucket.

Each bucket of the TTFT and end-to-end latency histograms has one exemplar: the slowest request observed in it within
a time window, until it is replaced by one of a later window. Slow requests are rare in their buckets and are
therefore kept for long. Memory is bounded by the number of newest requests and of buckets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tandem.metrics.registry import EXEMPLAR_CHARS, Exemplar, Histogram
from tandem.protocol.lifecycle.request_trace import RequestTrace
from tandem.protocol.lifecycle.timeline import Edge

_TRACE_ID, _REQUEST_ID = "trace_id", "request_id"
SLOW_SHOWN = 20
"""Most requests in a list of slow ones."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A bucket's exemplar."""

    window: int
    seconds: float
    trace: RequestTrace


class Exemplars:
    """The exemplars of one histogram; their traces can be found by the exported ids."""

    def __init__(self, spread: Histogram, window_s: float, clock: Callable[[], float]) -> None:
        """`clock` and `window_s`, the length of a window, are in seconds."""
        self._spread = spread
        self._window_s = window_s
        self._clock = clock
        self._held: dict[int, _Held] = {}

    def offer(self, seconds: float, trace: RequestTrace) -> None:
        """Offer `trace`, which the histogram observed with `seconds`, as an exemplar."""
        place, window = self._spread.place(seconds), int(self._clock() / self._window_s)
        held = self._held.get(place)
        if held is None or held.window != window or held.seconds < seconds:
            self._held[place] = _Held(window, seconds, trace)
            ended = trace.timeline.at(Edge.FINISHED) or 0
            self._spread.exemplars[place] = Exemplar(seconds, ended / 1e9, _labels(trace))

    def traces(self) -> list[RequestTrace]:
        """Return the traces of all exemplars."""
        return [held.trace for held in self._held.values()]


class TraceStore:
    """The kept traces. Belongs to the event loop."""

    def __init__(self, kept: int, first_tokens: Exemplars, whole_answers: Exemplars) -> None:
        """`kept` is the number of newest requests to keep, in addition to the exemplars."""
        self.kept = kept
        self._newest: deque[RequestTrace] = deque(maxlen=kept)
        self._first_tokens, self._whole_answers = first_tokens, whole_answers
        self.export: Callable[[RequestTrace], None] = lambda _trace: None
        """Called with each ended trace."""

    def add(self, trace: RequestTrace, *, whole: bool) -> None:
        """Add an ended request; `whole` is true if its answer is complete."""
        self._newest.append(trace)
        if trace.ttft_s is not None:
            self._first_tokens.offer(trace.ttft_s, trace)
        if whole:
            self._whole_answers.offer(trace.seconds, trace)
        self.export(trace)

    def find(self, name: str) -> list[RequestTrace]:
        """Return the traces with this request id, wire id or trace id, the oldest first."""
        return sorted((each for each in self._all() if each.named(name)), key=_arrival)

    def slow(self) -> list[RequestTrace]:
        """Return the exemplars with the longest end-to-end latency, the slowest first."""
        held = {each.wire_id: each for each in (*self._first_tokens.traces(), *self._whole_answers.traces())}
        return sorted(held.values(), key=lambda each: -each.seconds)[:SLOW_SHOWN]

    def newest(self) -> list[RequestTrace]:
        """Return the traces of the last requests, the newest first."""
        return list(self._newest)[: -SLOW_SHOWN - 1 : -1]

    def _all(self) -> list[RequestTrace]:
        found = (*self._first_tokens.traces(), *self._whole_answers.traces(), *self._newest)
        return list({each.wire_id: each for each in found}.values())


def _arrival(trace: RequestTrace) -> int:
    return trace.timeline.at(Edge.RECEIVED) or 0


def _labels(trace: RequestTrace) -> dict[str, str]:
    """Return the trace id, and the request id if it fits, because clients choose its length."""
    labels = {_TRACE_ID: trace.context.trace_id, _REQUEST_ID: trace.request_id}
    if sum(len(name) + len(value) for name, value in labels.items()) > EXEMPLAR_CHARS:
        del labels[_REQUEST_ID]
    return labels
