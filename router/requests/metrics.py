"""The router's metrics: counters and histograms of requests, and the outcomes by SLO class."""

from __future__ import annotations

import time
from collections.abc import Callable

from router.config import RouterConfig
from router.observability.goodput import Goodput
from router.observability.prediction_quality import PlacementRecord
from router.observability.recent_traces import Exemplars, TraceStore
from router.observability.request_outcome import Outcome, PhaseTimes, RequestOutcome, failed, judge, rejected
from router.refusal import Refusal, reason_of
from router.requests.request import RoutedRequest
from tandem.metrics import families as f
from tandem.metrics.registry import Registry
from tandem.protocol.errors import TandemError
from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent
from tandem.protocol.lifecycle.placement import TOKEN_SOURCES
from tandem.protocol.lifecycle.spans import Phase, Span, spans_of
from tandem.protocol.messages import FinishReason

_ROLE = "router"
_TTFT, _ITL = "ttft", "itl"


class RouterMetrics:
    """Owns the router's metric registry, the goodput and the trace store.

    The dispatcher owns it and updates it on the event loop; the values may be read from any thread.
    """

    def __init__(self, config: RouterConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns the time in seconds; it measures the gaps between tokens."""
        labels = {"model": config.served.name, "role": _ROLE, "worker": config.name}
        self.registry = registry = Registry(labels)
        self.clock = clock
        self._classes = tuple(slo.name for slo in config.slo_classes)
        self.goodput = Goodput(self._classes, config.goodput_window_s, clock)
        self._ttft = registry.histogram(f.TIME_TO_FIRST_TOKEN)
        self._itl = registry.histogram(f.INTER_TOKEN_LATENCY)
        self._tpot = registry.histogram(f.TIME_PER_OUTPUT_TOKEN)
        self._e2e = registry.histogram(f.E2E_REQUEST_LATENCY)
        self._phases = tuple(
            registry.histogram(family)
            for family in (f.QUEUE_TIME, f.PREFILL_TIME, f.TRANSFER_TIME, f.DECODE_TIME, f.STALL_TIME)
        )
        window_s = config.slow_window_s
        examples = (Exemplars(spread, window_s, clock) for spread in (self._ttft, self._e2e))
        self.traces = TraceStore(config.traces_kept, *examples)
        self._model = config.served.name
        self._retries = registry.counter(f.REQUEST_RETRIES)
        self._prompt_tokens = registry.counter(f.PROMPT_TOKENS)
        self._cached_tokens = registry.counter(f.CACHED_PROMPT_TOKENS)
        self._generation_tokens = registry.counter(f.GENERATION_TOKENS)
        self._begin_at_zero()
        registry.read(lambda: {f.GOODPUT: {(name,): rate for name, rate in self.goodput.per_second().items()}})

    # At the listener

    def offered(self, answers: int, prompt_tokens: int, answer_tokens: float) -> None:
        """Count a request for `answers` answers to one prompt; `answer_tokens` is the expected length of one answer."""
        self.registry.counter(f.OFFERED_REQUESTS).add(answers)
        self.registry.counter(f.OFFERED_PROMPT_TOKENS).add(prompt_tokens)
        self.registry.counter(f.OFFERED_ANSWER_TOKENS).add(answers * answer_tokens)

    def refused(self, slo_class: str, error: TandemError) -> None:
        """Count a rejected request by its reason, and against its SLO class unless the request was invalid."""
        reason = reason_of(error)
        self.registry.counter(f.ADMISSION_REJECTIONS, reason).add()
        if reason is not Refusal.INVALID and slo_class in self._classes:
            self._count(slo_class, rejected(error))

    def turn_gap(self, gap_s: float) -> None:
        """Observe the seconds between a prompt and the prompt that continues it."""
        self.registry.histogram(f.TURN_GAP).observe(gap_s)

    # In flight

    def retried(self) -> None:
        """Count a failed attempt that is retried."""
        self._retries.add()

    def tokens_leave(self, request: RoutedRequest, tokens: int) -> float | None:
        """Count a chunk of `tokens` tokens that is sent to the client.

        Returns the gap between the chunk's first token and the token before it, in seconds; None if the chunk has no
        tokens or is the first of the answer.
        """
        if not tokens:
            return None
        gap = request.pace.leave(tokens, self.clock())
        if gap is None:
            ttft_s = request.timeline().seconds(LifecycleEvent.RECEIVED, LifecycleEvent.FIRST_TOKEN)
            if ttft_s is not None:
                self._ttft.observe(ttft_s)
        else:
            self._itl.observe(gap)
        if tokens > 1:
            self._itl.observe(0.0, tokens - 1)
        self._generation_tokens.add(tokens)
        return gap

    def placed(self, record: PlacementRecord) -> None:
        """Record the predicted and the actual latencies of a placement whose request has received all its tokens."""
        registry = self.registry
        registry.counter(f.PLACEMENTS).add()
        registry.counter(f.REGRET).add(record.regret_s)
        for source, tokens in record.stats.tokens_by_source.items():
            registry.counter(f.PLACED_TOKENS, source).add(tokens)
        for quantity, predicted, actual in (
            (_TTFT, record.prediction.ttft_s, record.ttft_s),
            (_ITL, record.prediction.itl_s, record.itl_s or 0.0),
        ):
            if actual > 0:
                registry.counter(f.PREDICTED, quantity).add(predicted)
                registry.counter(f.ACTUAL, quantity).add(actual)
                registry.histogram(f.PREDICTION_ERROR, quantity).observe(abs(predicted - actual) / actual)

    # At the end: only the first of these calls counts

    def finished(self, request: RoutedRequest, reason: FinishReason) -> None:
        """Count an answer that has ended with `reason`; called when its last message is sent to the client."""
        if request.counted:
            return
        if reason is FinishReason.ABORT:
            self.left(request)
            return
        request.counted = True
        timeline = request.timeline()
        spans, pace = spans_of(timeline), request.pace
        times = PhaseTimes.of(spans)
        self.registry.counter(f.REQUEST_SUCCESS, reason.name.lower()).add()
        prompt = len(request.admitted.prompt_token_ids)
        self._prompt_tokens.add(prompt)
        self._cached_tokens.add(min(request.cached_tokens, prompt))
        for spread, seconds in zip(
            (self._e2e, self._tpot, *self._phases),
            (
                timeline.seconds(LifecycleEvent.RECEIVED, LifecycleEvent.FINISHED),
                pace.mean_gap_s,
                times.queue_s,
                times.prefill_s,
                times.transfer_s,
                times.decode_s,
                times.stall_s,
            ),
            strict=True,
        ):
            if seconds is not None:
                spread.observe(seconds)
        self._judge(request, spans)
        self.traces.add(request.trace(self._model, reason.name.lower()), whole=True)

    def left(self, request: RoutedRequest) -> None:
        """Count a request whose client disconnected, unless the request has been counted before.

        The request counts against its SLO class only if it had already missed a target. For a failed request, which
        `failed` has counted, only the trace is stored, because the client has now received the error.
        """
        if request.failure:
            outcome, request.failure = request.failure, ""
            self.traces.add(request.trace(self._model, outcome), whole=False)
        if request.counted:
            return
        request.counted = True
        request.event_times.append(EventTime.now(LifecycleEvent.FINISHED))
        self.registry.counter(f.REQUEST_SUCCESS, FinishReason.ABORT.name.lower()).add()
        self._judge(request, spans_of(request.timeline()), met_counts=False)
        self.traces.add(request.trace(self._model, FinishReason.ABORT.name.lower()), whole=False)

    def failed(self, request: RoutedRequest, error: TandemError) -> None:
        """Count a request that failed; its trace is stored by `left`, once the client has received the error."""
        if request.counted:
            return
        request.counted, request.failure = True, error.code
        self.registry.counter(f.REQUEST_FAILURES, error.code).add()
        self._ended(request, failed(request.timeline()))

    def _judge(self, request: RoutedRequest, spans: tuple[Span, ...], *, met_counts: bool = True) -> None:
        timeline, slo = request.timeline(), request.admitted.slo
        ttft_s = timeline.seconds(
            LifecycleEvent.RECEIVED, LifecycleEvent.FIRST_TOKEN if request.pace.tokens else LifecycleEvent.FINISHED
        )
        before_first = PhaseTimes.of(spans, timeline.at(LifecycleEvent.FIRST_TOKEN))
        verdict = judge(slo, request.pace, ttft_s, PhaseTimes.of(spans), before_first)
        self._ended(request, verdict if met_counts or verdict.outcome is not Outcome.MET else None)

    def _ended(self, request: RoutedRequest, verdict: RequestOutcome | None) -> None:
        """Add the outcome of one answer; the SLO outcome counts once per client request, when its last answer ends."""
        joint = request.joint.add(verdict)
        if joint is not None:
            self._count(request.admitted.slo.name, joint)

    def _count(self, slo_class: str, verdict: RequestOutcome) -> None:
        self.registry.counter(f.SLO_REQUESTS, slo_class, verdict.outcome).add()
        if verdict.phase is not None:
            self.registry.counter(f.SLO_MISSED, slo_class, verdict.phase).add()
        else:
            self.goodput.met(slo_class)

    def _begin_at_zero(self) -> None:
        """Create all series with value 0, so that Prometheus sees the first event of a series as an increase."""
        registry = self.registry
        for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT):
            registry.counter(f.REQUEST_SUCCESS, reason.name.lower())
        for refusal in Refusal:
            registry.counter(f.ADMISSION_REJECTIONS, refusal)
        for name in self._classes:
            for outcome in Outcome:
                registry.counter(f.SLO_REQUESTS, name, outcome)
            for phase in Phase:
                registry.counter(f.SLO_MISSED, name, phase)
        for source in TOKEN_SOURCES:
            registry.counter(f.PLACED_TOKENS, source)
        for quantity in (_TTFT, _ITL):
            registry.counter(f.PREDICTED, quantity)
            registry.counter(f.ACTUAL, quantity)
            registry.histogram(f.PREDICTION_ERROR, quantity)
        offered = (f.OFFERED_REQUESTS, f.OFFERED_PROMPT_TOKENS, f.OFFERED_ANSWER_TOKENS)
        registry.histogram(f.TURN_GAP)
        for family in (f.PLACEMENTS, f.REGRET, *offered):
            registry.counter(family)
        for code in _codes(TandemError):
            registry.counter(f.REQUEST_FAILURES, code)


def _codes(kind: type[TandemError]) -> set[str]:
    """Return the error codes of all subclasses of `kind`."""
    return {code for subclass in kind.__subclasses__() for code in (subclass.code, *_codes(subclass))}
