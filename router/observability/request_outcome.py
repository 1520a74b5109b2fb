"""Judges whether a request met the targets of its SLO class, and which phase caused a miss.

Token times are the times at which tokens leave the router. The percentile of the gaps is computed by nearest rank,
which only needs the number of gaps above the target.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from router.refusal import Refusal, reason_of
from tandem.protocol.errors import ResourceExhausted, TandemError
from tandem.protocol.lifecycle.events import LifecycleEvent, Timeline
from tandem.protocol.lifecycle.spans import Phase, Span, last_attempt, seconds_by_phase
from tandem.settings.slo import SloClass


class Outcome(StrEnum):
    """The outcome of a request: it met the targets of its SLO class, missed one, was rejected, or failed.

    The values are those of the metric label `outcome`. Goodput counts MET.
    """

    MET = "met"
    MISSED_TTFT = "missed_ttft"
    MISSED_ITL = "missed_itl"
    REJECTED = "rejected"
    """The request was rejected at once, for lack of capacity."""
    FAILED = "failed"
    """The request ended without a complete answer."""


@dataclass(slots=True)
class GapTracker:
    """The gaps between one answer's tokens as they leave the router, in seconds.

    All times must be of the same clock.
    """

    target_s: float = math.inf
    """The ITL target in seconds; a longer gap misses it."""
    tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    worst_s: float = 0.0
    over: int = 0
    """Number of gaps above the target, without the first gap."""
    first_over: bool = False
    """True if the gap after the first token, which contains the KV transfer, is above the target."""
    first_gap_s: float = 0.0

    @classmethod
    def of(cls, target_s: float, moments: Iterable[float]) -> GapTracker:
        """Return the gaps of an answer whose tokens leave one by one at `moments`, in seconds, ascending."""
        tracker = cls(target_s)
        for moment in moments:
            tracker.leave(1, float(moment))
        return tracker

    def leave(self, tokens: int, now: float) -> float | None:
        """Record that `tokens` >= 1 tokens leave together, and return the gap before them in seconds.

        Returns None for the first tokens of the answer.
        """
        before, self.tokens = self.tokens, self.tokens + tokens
        if not before:
            self.first_s = self.last_s = now
            return None
        gap, self.last_s = now - self.last_s, now
        if before == 1:
            self.first_gap_s, self.first_over = gap, gap > self.target_s
        else:
            self.over += gap > self.target_s
            self.worst_s = max(self.worst_s, gap)
        return gap

    @property
    def gaps(self) -> int:
        """Number of gaps between tokens so far."""
        return max(0, self.tokens - 1)

    @property
    def mean_gap_s(self) -> float | None:
        """Mean gap between tokens, in seconds; None for fewer than two tokens."""
        return (self.last_s - self.first_s) / self.gaps if self.gaps else None


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """The seconds that a request spent in each phase over all attempts; None for a phase that it never entered."""

    queue_s: float | None
    prefill_s: float | None
    transfer_s: float | None
    decode_s: float | None
    stall_s: float | None = None

    @classmethod
    def of(cls, spans: Iterable[Span], until: int | None = None) -> PhaseTimes:
        """Return the sums of an ended request's spans by phase, up to the time `until` in Unix nanoseconds.

        Without `until` the times add up to the latency of the request.
        """
        seconds = seconds_by_phase(spans, until)
        return cls(*(seconds.get(phase) for phase in Phase))


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """An outcome, and the phase that caused it; the phase is None for MET."""

    outcome: Outcome
    phase: Phase | None = None


MET = RequestOutcome(Outcome.MET)
_GRAVEST_FIRST = (Outcome.FAILED, Outcome.MISSED_TTFT, Outcome.MISSED_ITL)


class JointOutcome:
    """The outcome of a client's request with one or more answers: the worst outcome among its answers.

    All `RoutedRequest`s of the client's request share it, on the event loop.
    """

    def __init__(self, answers: int = 1) -> None:
        self._answers = answers
        self._outcomes: list[RequestOutcome | None] = []

    def add(self, verdict: RequestOutcome | None) -> RequestOutcome | None:
        """Add one answer's outcome; `verdict` is None if the client cancelled the answer before it missed a target.

        When the last answer is added, returns the worst outcome among the answers. Returns None before that, and also
        if no answer failed or missed a target but the client cancelled one: then the request does not count.
        """
        outcomes = self._outcomes
        outcomes.append(verdict)
        if len(outcomes) < self._answers:
            return None
        for outcome in _GRAVEST_FIRST:
            for answer_outcome in outcomes:
                if answer_outcome is not None and answer_outcome.outcome is outcome:
                    return answer_outcome
        return None if None in outcomes else MET


def judge(
    slo: SloClass, pace: GapTracker, ttft_s: float | None, times: PhaseTimes, first: PhaseTimes | None = None
) -> RequestOutcome:
    """Return the outcome of one answer, which may have ended early.

    `ttft_s` is the time to the first token, or the time waited if there was none. `times` has the phase times of the
    whole request, `first` those before the first token; None if they are the same.
    """
    first = first or times
    if ttft_s is not None and ttft_s > slo.ttft_s:
        waits = {Phase.QUEUE: first.queue_s, Phase.STALL: first.stall_s, Phase.PREFILL: first.prefill_s}
        return RequestOutcome(Outcome.MISSED_TTFT, max(waits, key=lambda phase: waits[phase] or 0.0))
    allowed = pace.gaps - math.ceil(round(slo.itl_percent / 100 * pace.gaps, 6))
    stalled = (times.stall_s or 0.0) - (first.stall_s or 0.0) > min(pace.target_s, slo.worst_gap_s)
    if pace.over > allowed or pace.worst_s > slo.worst_gap_s:
        return RequestOutcome(Outcome.MISSED_ITL, Phase.STALL if stalled else Phase.DECODE)
    if pace.over + pace.first_over > allowed or pace.first_gap_s > slo.worst_gap_s:
        handed = Phase.DECODE if times.transfer_s is None else Phase.TRANSFER
        return RequestOutcome(Outcome.MISSED_ITL, Phase.STALL if stalled else handed)
    return MET


def rejected(error: TandemError) -> RequestOutcome:
    """Return the outcome of a request that ended with `error` at once: FAILED if no worker could serve it."""
    if not isinstance(error, ResourceExhausted):
        return RequestOutcome(Outcome.FAILED, Phase.QUEUE)
    return RequestOutcome(Outcome.REJECTED, Phase.DECODE if reason_of(error) is Refusal.SLO_ITL else Phase.QUEUE)


def failed(timeline: Timeline) -> RequestOutcome:
    """Return the outcome of a request that ended with an error: FAILED, in the phase that its last attempt reached."""
    timeline = last_attempt(timeline)
    if timeline.at(LifecycleEvent.PLACED) is None:
        return RequestOutcome(Outcome.FAILED, Phase.QUEUE)
    if timeline.at(LifecycleEvent.PREFILL_FINISHED) is None:
        return RequestOutcome(Outcome.FAILED, Phase.PREFILL)
    arrived = timeline.at(LifecycleEvent.DECODE_ADMITTED) is not None
    return RequestOutcome(Outcome.FAILED, Phase.DECODE if arrived else Phase.TRANSFER)
