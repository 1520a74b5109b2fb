"""The router's memory of requests that have ended: the newest ones, and the slowest by exemplar.

Each bucket of the histograms of first tokens and of whole answers has one exemplar: the slowest request that fell into
it within a window of time, until one of a later window does. A slow request is rare in its bucket and so is kept for
long, while thousands of fast ones pass by. Memory is bounded by the newest and the buckets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from telemetry.board import EXAMPLE_CHARS, Example, Spread
from wire.tracing.request_trace import RequestTrace
from wire.tracing.timeline import Edge

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
    """Of one histogram. What it holds can be found by the ids that are exported."""

    def __init__(self, spread: Spread, window_s: float, clock: Callable[[], float]) -> None:
        """`clock` in seconds; a window is `window_s` long."""
        self._spread = spread
        self._window_s = window_s
        self._clock = clock
        self._held: dict[int, _Held] = {}

    def offer(self, seconds: float, trace: RequestTrace) -> None:
        """`trace` was observed there with so many seconds."""
        place, window = self._spread.place(seconds), int(self._clock() / self._window_s)
        held = self._held.get(place)
        if held is None or held.window != window or held.seconds < seconds:
            self._held[place] = _Held(window, seconds, trace)
            ended = trace.timeline.at(Edge.FINISHED) or 0
            self._spread.examples[place] = Example(seconds, ended / 1e9, _labels(trace))

    def traces(self) -> list[RequestTrace]:
        """All that are held."""
        return [held.trace for held in self._held.values()]


class TraceBook:
    """Belongs to the event loop."""

    def __init__(self, kept: int, first_tokens: Exemplars, whole_answers: Exemplars) -> None:
        """The newest `kept` are remembered, beside the exemplars."""
        self.kept = kept
        self._newest: deque[RequestTrace] = deque(maxlen=kept)
        self._first_tokens, self._whole_answers = first_tokens, whole_answers
        self.export: Callable[[RequestTrace], None] = lambda _trace: None
        """Hears of each."""

    def add(self, trace: RequestTrace, *, whole: bool) -> None:
        """A request has ended; `whole`: with all of its answer."""
        self._newest.append(trace)
        if trace.ttft_s is not None:
            self._first_tokens.offer(trace.ttft_s, trace)
        if whole:
            self._whole_answers.offer(trace.seconds, trace)
        self.export(trace)

    def find(self, name: str) -> list[RequestTrace]:
        """Those of this request id, name among workers or trace id, the oldest first."""
        return sorted((each for each in self._all() if each.named(name)), key=_arrival)

    def slow(self) -> list[RequestTrace]:
        """The slowest exemplars by their whole life, the slowest first."""
        held = {each.wire_id: each for each in (*self._first_tokens.traces(), *self._whole_answers.traces())}
        return sorted(held.values(), key=lambda each: -each.seconds)[:SLOW_SHOWN]

    def newest(self) -> list[RequestTrace]:
        """The last ones, the newest first."""
        return list(self._newest)[: -SLOW_SHOWN - 1 : -1]

    def _all(self) -> list[RequestTrace]:
        found = (*self._first_tokens.traces(), *self._whole_answers.traces(), *self._newest)
        return list({each.wire_id: each for each in found}.values())


def _arrival(trace: RequestTrace) -> int:
    return trace.timeline.at(Edge.RECEIVED) or 0


def _labels(trace: RequestTrace) -> dict[str, str]:
    """The trace id, and the request id where there is room for it: clients choose how long that is."""
    labels = {_TRACE_ID: trace.context.trace_id, _REQUEST_ID: trace.request_id}
    if sum(len(name) + len(value) for name, value in labels.items()) > EXAMPLE_CHARS:
        del labels[_REQUEST_ID]
    return labels
