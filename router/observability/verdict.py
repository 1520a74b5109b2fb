"""Whether a request got what its class promises, and if not, which phase was to blame.

Tokens are judged as they leave the router. A percentile of the gaps is by nearest rank, so it needs no gaps, only how
many of them were too long.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from router.refusal import Refusal, reason_of
from router.slo import SloClass
from wire.errors import ResourceExhausted, TandemError
from wire.tracing.spans import Phase, Span, last_try, seconds_by_phase
from wire.tracing.timeline import Edge, Timeline


class Outcome(StrEnum):
    """Values of the label `outcome`; goodput is MET."""

    MET = "met"
    MISSED_TTFT = "missed_ttft"
    MISSED_ITL = "missed_itl"
    SHED = "shed"
    """Turned away at once."""
    FAILED = "failed"
    """It ended without the whole answer."""


@dataclass(slots=True)
class TokenPace:
    """How the tokens of one answer leave the router, in seconds of one clock."""

    target_s: float = math.inf
    """Gaps beyond it are too long."""
    tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    worst_s: float = 0.0
    over: int = 0
    """Gaps that were too long, but for the first one."""
    first_over: bool = False
    """Whether the gap behind the first token was: the one in which the request is handed over."""
    first_gap_s: float = 0.0

    def leave(self, tokens: int, now: float) -> float | None:
        """So many tokens, at least one, leave together; the gap before them, None if they are the first."""
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
        """Between each token and the next."""
        return max(0, self.tokens - 1)

    @property
    def mean_gap_s(self) -> float | None:
        """None of a single token."""
        return (self.last_s - self.first_s) / self.gaps if self.gaps else None


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """How long a request was in each phase, over all tries, in seconds; None = it never was."""

    queue_s: float | None
    prefill_s: float | None
    transfer_s: float | None
    decode_s: float | None
    stall_s: float | None = None

    @classmethod
    def of(cls, spans: Iterable[Span], until: int | None = None) -> PhaseTimes:
        """Of an ended request, as far as `until` in Unix nanoseconds; without, they add up to its latency."""
        found = seconds_by_phase(spans, until)
        return cls(*(found.get(phase) for phase in Phase))


@dataclass(frozen=True, slots=True)
class Verdict:
    """`phase` is to blame for any outcome but MET."""

    outcome: Outcome
    phase: Phase | None = None


MET = Verdict(Outcome.MET)
_GRAVEST_FIRST = (Outcome.FAILED, Outcome.MISSED_TTFT, Outcome.MISSED_ITL)


class JointVerdict:
    """On a client's request with all its answers: that on the worst of them."""

    def __init__(self, answers: int = 1) -> None:
        self._answers = answers
        self._found: list[Verdict | None] = []

    def add(self, verdict: Verdict | None) -> Verdict | None:
        """One more answer has ended; None: its client gave it up before anything was missed. With the last one, that on
        the request, None if the client gave it up so; before, None.
        """
        found = self._found
        found.append(verdict)
        if len(found) < self._answers:
            return None
        for outcome in _GRAVEST_FIRST:
            for each in found:
                if each is not None and each.outcome is outcome:
                    return each
        return None if None in found else MET


def judge(
    slo: SloClass, pace: TokenPace, ttft_s: float | None, times: PhaseTimes, first: PhaseTimes | None = None
) -> Verdict:
    """Of an answer as far as it has come; `ttft_s` is how long it has waited where no token has come, `first` what
    `times` are before its first token, if they differ.
    """
    first = first or times
    if ttft_s is not None and ttft_s > slo.ttft_s:
        waits = {Phase.QUEUE: first.queue_s, Phase.STALL: first.stall_s, Phase.PREFILL: first.prefill_s}
        return Verdict(Outcome.MISSED_TTFT, max(waits, key=lambda phase: waits[phase] or 0.0))
    allowed = pace.gaps - math.ceil(round(slo.itl_percent / 100 * pace.gaps, 6))
    stalled = (times.stall_s or 0.0) - (first.stall_s or 0.0) > min(pace.target_s, slo.worst_gap_s)
    if pace.over > allowed or pace.worst_s > slo.worst_gap_s:
        return Verdict(Outcome.MISSED_ITL, Phase.STALL if stalled else Phase.DECODE)
    if pace.over + pace.first_over > allowed or pace.first_gap_s > slo.worst_gap_s:
        handed = Phase.DECODE if times.transfer_s is None else Phase.TRANSFER
        return Verdict(Outcome.MISSED_ITL, Phase.STALL if stalled else handed)
    return MET


def turned_away(error: TandemError) -> Verdict:
    """Of a request that the listener answered with this: shed, for what it would have missed, or nobody could take it."""
    if not isinstance(error, ResourceExhausted):
        return Verdict(Outcome.FAILED, Phase.QUEUE)
    return Verdict(Outcome.SHED, Phase.DECODE if reason_of(error) is Refusal.SLO_ITL else Phase.QUEUE)


def failed(timeline: Timeline) -> Verdict:
    """Of a request that ended with an error: the phase that its last try was in."""
    timeline = last_try(timeline)
    if timeline.at(Edge.PLACED) is None:
        return Verdict(Outcome.FAILED, Phase.QUEUE)
    if timeline.at(Edge.PREFILL_FINISHED) is None:
        return Verdict(Outcome.FAILED, Phase.PREFILL)
    arrived = timeline.at(Edge.DECODE_ADMITTED) is not None
    return Verdict(Outcome.FAILED, Phase.DECODE if arrived else Phase.TRANSFER)
