"""What a router counts: every request from the listener to its end, judged by what its class promises.

Belongs to the event loop, as the dispatcher that tells it does; the numbers may be read from any thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from router.config import RouterConfig
from router.observability.goodput import Goodput
from router.observability.prediction_quality import PlacementRecord
from router.observability.recent_traces import Exemplars, TraceBook
from router.observability.verdict import Outcome, PhaseTimes, Verdict, failed, judge, turned_away
from router.refusal import Refusal, reason_of
from router.requests.request import RoutedRequest
from telemetry import families as f
from telemetry.board import Board
from wire.errors import TandemError
from wire.messages import FinishReason
from wire.tracing.spans import Phase, Span, spans_of
from wire.tracing.timeline import Edge, EdgeStamp

_ROLE = "router"
_TTFT, _ITL = "ttft", "itl"


class RouterMetrics:
    """Owns the router's board."""

    def __init__(self, config: RouterConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` in seconds, the one of the requests' token paces."""
        labels = {"model": config.model_name, "role": _ROLE, "worker": config.name}
        self.board = board = Board(labels)
        self.clock = clock
        self._classes = tuple(slo.name for slo in config.slo_classes)
        self.goodput = Goodput(self._classes, config.goodput_window_s, clock)
        self._ttft = board.spread(f.TIME_TO_FIRST_TOKEN)
        self._itl = board.spread(f.INTER_TOKEN_LATENCY)
        self._tpot = board.spread(f.TIME_PER_OUTPUT_TOKEN)
        self._e2e = board.spread(f.E2E_REQUEST_LATENCY)
        self._phases = tuple(
            board.spread(each) for each in (f.QUEUE_TIME, f.PREFILL_TIME, f.TRANSFER_TIME, f.DECODE_TIME, f.STALL_TIME)
        )
        window_s = config.slow_window_s
        examples = (Exemplars(spread, window_s, clock) for spread in (self._ttft, self._e2e))
        self.traces = TraceBook(config.traces_kept, *examples)
        self._model = config.model_name
        self._retries = board.count(f.REQUEST_RETRIES)
        self._prompt_tokens = board.count(f.PROMPT_TOKENS)
        self._cached_tokens = board.count(f.CACHED_PROMPT_TOKENS)
        self._generation_tokens = board.count(f.GENERATION_TOKENS)
        self._begin_at_zero()
        board.read(lambda: {f.GOODPUT: {(name,): rate for name, rate in self.goodput.per_second().items()}})

    def watch(self, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        """Whom to ask how many requests there are."""
        self.board.read(lambda: {f.REQUESTS_RUNNING: running(), f.REQUESTS_WAITING: waiting()})

    # At the listener

    def offered(self, answers: int, prompt_tokens: int, answer_tokens: float) -> None:
        """So many answers are asked for, to one prompt, each of them about so long."""
        self.board.count(f.OFFERED_REQUESTS).add(answers)
        self.board.count(f.OFFERED_PROMPT_TOKENS).add(prompt_tokens)
        self.board.count(f.OFFERED_ANSWER_TOKENS).add(answers * answer_tokens)

    def refused(self, slo_class: str, error: TandemError) -> None:
        """A request was turned away. Who asks for what cannot be has missed nothing."""
        reason = reason_of(error)
        self.board.count(f.ADMISSION_REJECTIONS, reason).add()
        if reason is not Refusal.INVALID and slo_class in self._classes:
            self._count(slo_class, turned_away(error))

    # On the way

    def retried(self) -> None:
        """An attempt failed, another follows."""
        self._retries.add()

    def tokens_leave(self, request: RoutedRequest, tokens: int) -> float | None:
        """A piece of the answer is on its way to the client, with so many tokens; perhaps none, but text. → the gap
        between its first token and the one before, in seconds.
        """
        if not tokens:
            return None
        gap = request.pace.leave(tokens, self.clock())
        if gap is None:
            ttft_s = request.timeline().seconds(Edge.RECEIVED, Edge.FIRST_TOKEN)
            if ttft_s is not None:
                self._ttft.observe(ttft_s)
        else:
            self._itl.observe(gap)
        if tokens > 1:
            self._itl.observe(0.0, tokens - 1)
        self._generation_tokens.add(tokens)
        return gap

    def placed(self, record: PlacementRecord) -> None:
        """What was expected of a placement, and what came."""
        board = self.board
        board.count(f.PLACEMENTS).add()
        board.count(f.REGRET).add(record.regret_s)
        for quantity, predicted, actual in (
            (_TTFT, record.prediction.ttft_s, record.ttft_s),
            (_ITL, record.prediction.itl_s, record.itl_s or 0.0),
        ):
            if actual > 0:
                board.count(f.PREDICTED, quantity).add(predicted)
                board.count(f.ACTUAL, quantity).add(actual)
                board.spread(f.PREDICTION_ERROR, quantity).observe(abs(predicted - actual) / actual)

    # At the end: whichever comes first counts

    def finished(self, request: RoutedRequest, reason: FinishReason) -> None:
        """The last message of an answer leaves."""
        if request.counted:
            return
        if reason is FinishReason.ABORT:
            self.left(request)
            return
        request.counted = True
        timeline = request.timeline()
        spans, pace = spans_of(timeline), request.pace
        times = PhaseTimes.of(spans)
        self.board.count(f.REQUEST_SUCCESS, reason.name.lower()).add()
        prompt = len(request.admitted.prompt_token_ids)
        self._prompt_tokens.add(prompt)
        self._cached_tokens.add(min(request.cached_tokens, prompt))
        for spread, seconds in zip(
            (self._e2e, self._tpot, *self._phases),
            (
                timeline.seconds(Edge.RECEIVED, Edge.FINISHED),
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
        """Its client gave it up: that counts against its class only if something was missed already. Or, of one that
        failed, its client has heard so: nothing more leaves.
        """
        if request.failure:
            outcome, request.failure = request.failure, ""
            self.traces.add(request.trace(self._model, outcome), whole=False)
        if request.counted:
            return
        request.counted = True
        request.edges.append(EdgeStamp.now(Edge.FINISHED))
        self.board.count(f.REQUEST_SUCCESS, FinishReason.ABORT.name.lower()).add()
        self._judge(request, spans_of(request.timeline()), met_counts=False)
        self.traces.add(request.trace(self._model, FinishReason.ABORT.name.lower()), whole=False)

    def failed(self, request: RoutedRequest, error: TandemError) -> None:
        """It ended with an error. Its trace comes when its client has all that was on its way."""
        if request.counted:
            return
        request.counted, request.failure = True, error.code
        self.board.count(f.REQUEST_FAILURES, error.code).add()
        self._ended(request, failed(request.timeline()))

    def _judge(self, request: RoutedRequest, spans: tuple[Span, ...], *, met_counts: bool = True) -> None:
        timeline, slo = request.timeline(), request.admitted.slo
        ttft_s = timeline.seconds(Edge.RECEIVED, Edge.FIRST_TOKEN if request.pace.tokens else Edge.FINISHED)
        before_first = PhaseTimes.of(spans, timeline.at(Edge.FIRST_TOKEN))
        verdict = judge(slo, request.pace, ttft_s, PhaseTimes.of(spans), before_first)
        self._ended(request, verdict if met_counts or verdict.outcome is not Outcome.MET else None)

    def _ended(self, request: RoutedRequest, verdict: Verdict | None) -> None:
        """Answers end one by one; what promises are kept of is their client's request."""
        joint = request.joint.add(verdict)
        if joint is not None:
            self._count(request.admitted.slo.name, joint)

    def _count(self, slo_class: str, verdict: Verdict) -> None:
        self.board.count(f.SLO_REQUESTS, slo_class, verdict.outcome).add()
        if verdict.phase is not None:
            self.board.count(f.SLO_MISSED, slo_class, verdict.phase).add()
        else:
            self.goodput.met(slo_class)

    def _begin_at_zero(self) -> None:
        """So that the first of each is an increase."""
        board = self.board
        for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT):
            board.count(f.REQUEST_SUCCESS, reason.name.lower())
        for refusal in Refusal:
            board.count(f.ADMISSION_REJECTIONS, refusal)
        for name in self._classes:
            for outcome in Outcome:
                board.count(f.SLO_REQUESTS, name, outcome)
            for phase in Phase:
                board.count(f.SLO_MISSED, name, phase)
        for quantity in (_TTFT, _ITL):
            board.count(f.PREDICTED, quantity)
            board.count(f.ACTUAL, quantity)
            board.spread(f.PREDICTION_ERROR, quantity)
        offered = (f.OFFERED_REQUESTS, f.OFFERED_PROMPT_TOKENS, f.OFFERED_ANSWER_TOKENS)
        for each in (f.PLACEMENTS, f.REGRET, *offered):
            board.count(each)
        for code in _codes(TandemError):
            board.count(f.REQUEST_FAILURES, code)


def _codes(kind: type[TandemError]) -> set[str]:
    """Of all kinds of it."""
    return {code for each in kind.__subclasses__() for code in (each.code, *_codes(each))}
