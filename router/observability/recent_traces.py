"""The traces of ended requests that a router keeps: the newest ones, and the slowest of each latency bucket.

Time is divided into windows. Each bucket of the TTFT and end-to-end latency histograms has one exemplar: the slowest
request in the bucket, within the latest window in which any request fell into the bucket. Few requests fall into the
buckets of high latencies, so the exemplars of these buckets are kept for a long time. Memory is bounded by the number
of newest requests and of buckets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tandem.metrics.registry import EXEMPLAR_CHARS, Exemplar, Histogram
from tandem.protocol.lifecycle.events import LifecycleEvent
from tandem.protocol.lifecycle.request_trace import RequestTrace

_TRACE_ID, _REQUEST_ID = "trace_id", "request_id"
SLOW_SHOWN = 20
"""Maximum number of requests in a list of the slowest or the newest requests."""


@dataclass(frozen=True, slots=True)
class _Held:
    """The exemplar of one bucket, with the number of its time window."""

    window: int
    seconds: float
    trace: RequestTrace


class Exemplars:
    """The exemplars of one histogram; their traces can be found by the ids that the metrics export."""

    def __init__(self, spread: Histogram, window_s: float, clock: Callable[[], float]) -> None:
        """`spread` is the histogram; `window_s` is the length of a time window in seconds of `clock`."""
        self._spread = spread
        self._window_s = window_s
        self._clock = clock
        self._held: dict[int, _Held] = {}

    def offer(self, seconds: float, trace: RequestTrace) -> None:
        """Make `trace`, with latency `seconds`, the exemplar of its bucket if it is the slowest in this window."""
        place, window = self._spread.place(seconds), int(self._clock() / self._window_s)
        held = self._held.get(place)
        if held is None or held.window != window or held.seconds < seconds:
            self._held[place] = _Held(window, seconds, trace)
            ended = trace.timeline.at(LifecycleEvent.FINISHED) or 0
            self._spread.exemplars[place] = Exemplar(seconds, ended / 1e9, _labels(trace))

    def traces(self) -> list[RequestTrace]:
        """Return the traces of this histogram's exemplars, at most one per bucket."""
        return [held.trace for held in self._held.values()]


class TraceStore:
    """The traces that a router keeps. The `RouterMetrics` own it; all calls are on the event loop."""

    def __init__(self, kept: int, first_tokens: Exemplars, whole_answers: Exemplars) -> None:
        """`kept` is the number of newest requests to keep, in addition to the exemplars."""
        self.kept = kept
        self._newest: deque[RequestTrace] = deque(maxlen=kept)
        self._first_tokens, self._whole_answers = first_tokens, whole_answers
        self.export: Callable[[RequestTrace], None] = lambda _trace: None
        """A callback for the trace of each ended request."""

    def add(self, trace: RequestTrace, *, whole: bool) -> None:
        """Add the trace of an ended request; `whole` is True if the answer is complete."""
        self._newest.append(trace)
        if trace.ttft_s is not None:
            self._first_tokens.offer(trace.ttft_s, trace)
        if whole:
            self._whole_answers.offer(trace.seconds, trace)
        self.export(trace)

    def find(self, name: str) -> list[RequestTrace]:
        """Return the traces whose request id, internal id or trace id is `name`, the oldest first."""
        return sorted((trace for trace in self._all() if trace.named(name)), key=_arrival)

    def slow(self) -> list[RequestTrace]:
        """Return the exemplars with the longest end-to-end latencies, at most `SLOW_SHOWN`, the slowest first."""
        held = {trace.internal_id: trace for trace in (*self._first_tokens.traces(), *self._whole_answers.traces())}
        return sorted(held.values(), key=lambda trace: -trace.seconds)[:SLOW_SHOWN]

    def newest(self) -> list[RequestTrace]:
        """Return the traces of the last requests, at most `SLOW_SHOWN`, the newest first."""
        return list(self._newest)[: -SLOW_SHOWN - 1 : -1]

    def _all(self) -> list[RequestTrace]:
        traces = (*self._first_tokens.traces(), *self._whole_answers.traces(), *self._newest)
        return list({trace.internal_id: trace for trace in traces}.values())


def _arrival(trace: RequestTrace) -> int:
    return trace.timeline.at(LifecycleEvent.RECEIVED) or 0


def _labels(trace: RequestTrace) -> dict[str, str]:
    """Return an exemplar's labels: the trace id, and the request id if both fit into `EXEMPLAR_CHARS` characters."""
    labels = {_TRACE_ID: trace.context.trace_id, _REQUEST_ID: trace.request_id}
    if sum(len(name) + len(value) for name, value in labels.items()) > EXEMPLAR_CHARS:
        del labels[_REQUEST_ID]
    return labels
