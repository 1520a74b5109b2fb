"""What a day must ask of workers that are so fast, for the split of each hour to matter: pure arithmetic.

Every hour loads the right split to `LOAD`, so the wrong one, which has one worker where it needs all but one, is asked
for `workers - 1` times as much. The prompt of a prefill-heavy hour takes a sixth of the target for its first token; an
answer of a decode-heavy hour is as long as the batch limit allows at the same number of requests a second.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.load.synthetic import Lengths, Synthetic
from benchmarks.planner.live_hours import LiveHour
from router.slo import SloClass
from wire.errors import FailedPrecondition

LOAD = 0.93
"""Of the right split, in parts of what it serves when everything comes at once: arrivals this even let it keep nearly
all of it, and the wrong split is not to be pardoned by an hour so short that its queue only fills.
"""
TTFT_PROMPTS = 6.0
"""The target for the first token, in prompts of a prefill-heavy hour."""
ITL_PART = 0.25
"""The target between tokens, in targets for the first one."""
ITL_STEPS, ITL_HANDOVERS = 2.5, 1.5
"""What it must be at least, in steps of a full batch and in gaps that a hand-over leaves."""
WINDOW_PART, WINDOW_MIN_S = 0.8, 1.0
"""The planner's window, in targets for the first token, and at least in seconds."""
OTHER_ROLE_LOAD = 0.65
"""Most load of the one worker that computes the short prompts of a decode-heavy hour."""
SHORT_PROMPT, SHORT_ANSWER = 24, 5
SIGMA, CV = 0.3, 0.5
"""Of lengths, and of the gaps between arrivals: half as uneven as Poisson's, for an hour has but some 250 requests."""
TTFTS_S = (1.2, 1.7, 2.4, 3.4, 4.8, 6.8, 9.6)
"""Targets to choose from: classes are made when a cluster starts, before anybody knows how fast it is."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What `workers - 1` workers of one role serve together when more comes than they can take."""

    workers: int
    """Of the whole cluster."""
    prompt_tokens_per_s: float
    answer_tokens_per_s: float
    """With full batches."""
    step_s: float
    """Of a full batch."""
    handover_s: float
    """Gap behind the first token that nine in ten do not exceed."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is asked, and what is promised."""

    slo: SloClass
    prefill_heavy: LiveHour
    decode_heavy: LiveHour
    window_s: float
    """Between two looks of the planner."""

    @property
    def kinds(self) -> tuple[LiveHour, LiveHour]:
        """In the order that a day has them."""
        return self.prefill_heavy, self.decode_heavy

    def as_result(self) -> dict[str, Any]:
        """Ready for JSON."""
        slo = {"ttft_ms": self.slo.ttft_s * 1e3, "itl_ms": self.slo.itl_s * 1e3, "itl_percent": self.slo.itl_percent}
        kinds = [{"name": kind.name, "rate": kind.rate, **asdict(kind.source)} for kind in self.kinds]
        return {"slo": slo, "kinds": kinds, "window_s": self.window_s}


def promise(ttft_s: float) -> SloClass:
    """The class with this target for its first token."""
    return SloClass(f"planned-{ttft_s:g}s", ttft_s=ttft_s, itl_s=ITL_PART * ttft_s, itl_percent=95.0)


def promises() -> tuple[SloClass, ...]:
    """All that a day may be sized for."""
    return tuple(promise(ttft_s) for ttft_s in TTFTS_S)


def size(pace: Pace, load: float = LOAD, classes: Sequence[SloClass] = promises()) -> Sizes:
    """By the tightest of these classes that such workers can keep. FailedPrecondition if they can keep none."""
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
    """What one worker has of it."""
    return per_s / (pace.workers - 1)


def _source(prompt: float, answer: float) -> Synthetic:
    return Synthetic(Lengths(max(1.0, round(prompt)), SIGMA), Lengths(max(1.0, round(answer)), SIGMA), CV)
