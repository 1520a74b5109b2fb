"""Sizes a day by the workers' speed, so that each hour needs its own split.

Every hour loads the right split to `LOAD`, so the wrong one, with one worker where all but one are needed, gets
`workers - 1` times its load. The prompt of a prefill-heavy hour takes a sixth of the TTFT target; an answer of a
decode-heavy hour is as long as the batch limit allows at the same number of requests per second.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.planner.live_hours import LiveHour
from tandem.cli.load.synthetic import Lengths, Synthetic
from tandem.protocol.errors import FailedPrecondition
from tandem.settings.slo import SloClass

LOAD = 0.93
"""Load of the right split as a share of its peak throughput.

At arrivals this even it meets the targets of nearly all requests, while the wrong split misses them even in a short
hour whose queue only fills.
"""
TTFT_PROMPTS = 6.0
"""The TTFT target, in prompts of a prefill-heavy hour."""
ITL_PART = 0.25
"""The ITL target, in TTFT targets."""
ITL_STEPS, ITL_HANDOVERS = 2.5, 1.5
"""The minimal ITL target, in steps of a full batch and in gaps that a hand-over causes."""
WINDOW_PART, WINDOW_MIN_S = 0.8, 1.0
"""The planner's window: in TTFT targets, and at least in seconds."""
OTHER_ROLE_LOAD = 0.65
"""Maximum load of the one worker that computes the short prompts of a decode-heavy hour."""
SHORT_PROMPT, SHORT_ANSWER = 24, 5
SIGMA, CV = 0.3, 0.5
"""Variation of lengths, and of gaps between arrivals: half of Poisson's, as an hour has only some 250 requests."""
TTFTS_S = (1.2, 1.7, 2.4, 3.4, 4.8, 6.8, 9.6)
"""Candidate TTFT targets; classes must exist when a cluster starts, before its speed is measured."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Peak throughput of `workers - 1` workers of one role together."""

    workers: int
    """Number of workers of the whole cluster."""
    prompt_tokens_per_s: float
    answer_tokens_per_s: float
    """Answer tokens per second with full batches."""
    step_s: float
    """Seconds of a full batch's step."""
    handover_s: float
    """The gap after the first token that nine of ten requests do not exceed."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The day's load and class."""

    slo: SloClass
    prefill_heavy: LiveHour
    decode_heavy: LiveHour
    window_s: float
    """Seconds between two decisions of the planner."""

    @property
    def kinds(self) -> tuple[LiveHour, LiveHour]:
        """Both kinds of hours in the day's order."""
        return self.prefill_heavy, self.decode_heavy

    def as_result(self) -> dict[str, Any]:
        """Returns the sizes for JSON."""
        slo = {"ttft_ms": self.slo.ttft_s * 1e3, "itl_ms": self.slo.itl_s * 1e3, "itl_percent": self.slo.itl_percent}
        kinds = [{"name": kind.name, "rate": kind.rate, **asdict(kind.source)} for kind in self.kinds]
        return {"slo": slo, "kinds": kinds, "window_s": self.window_s}


def promise(ttft_s: float) -> SloClass:
    """Returns the class with this TTFT target."""
    return SloClass(f"planned-{ttft_s:g}s", ttft_s=ttft_s, itl_s=ITL_PART * ttft_s, itl_percent=95.0)


def promises() -> tuple[SloClass, ...]:
    """Returns all classes that a day may be sized for."""
    return tuple(promise(ttft_s) for ttft_s in TTFTS_S)


def size(pace: Pace, load: float = LOAD, classes: Sequence[SloClass] = promises()) -> Sizes:
    """Sizes a day for the tightest class that the workers can meet. FailedPrecondition if they can meet none."""
    for slo in sorted(classes, key=lambda each: each.ttft_s):
        each_s = slo.ttft_s / TTFT_PROMPTS
        rate = load * (pace.workers - 1) / each_s
        short_s = SHORT_PROMPT / _alone(pace.prompt_tokens_per_s, pace) + pace.step_s
        if (
            slo.itl_s >= max(ITL_STEPS * pace.step_s, ITL_HANDOVERS * pace.handover_s)
            and rate * short_s <= OTHER_ROLE_LOAD
        ):
            prompt = each_s * _alone(pace.prompt_tokens_per_s, pace)
            answer = load * pace.answer_tokens_per_s / rate
            return Sizes(
                slo,
                LiveHour("prefill-heavy", round(rate, 3), _source(prompt, SHORT_ANSWER)),
                LiveHour("decode-heavy", round(rate, 3), _source(SHORT_PROMPT, answer)),
                window_s=max(WINDOW_MIN_S, round(WINDOW_PART * slo.ttft_s, 1)),
            )
    raise FailedPrecondition(
        f"steps of {pace.step_s * 1e3:.0f} ms and hand-overs of {pace.handover_s * 1e3:.0f} ms are too slow for "
        f"{max(each.ttft_s for each in classes):g} s to a first token; give each worker more cores"
    )


def _alone(per_s: float, pace: Pace) -> float:
    """Returns one worker's share."""
    return per_s / (pace.workers - 1)


def _source(prompt: float, answer: float) -> Synthetic:
    return Synthetic(Lengths(max(1.0, round(prompt)), SIGMA), Lengths(max(1.0, round(answer)), SIGMA), CV)
