"""How long a first token may wait for the second.

Between the two lie more steps than between others: two where the prompt was computed, three and the hand-over where
another worker decodes. Where a class bears less, that gap is one of few that an answer may have too long, and of a
short answer one too many. There the first token goes with the second, unless the first would come late. If it would,
the worker that computes the prompt keeps its steps short instead (`Forecast.first_gap_s`).
"""

from __future__ import annotations

from costs.chunks import FIRST_GAP_STEPS
from router.placement import Forecast
from router.slo import SloClass
from router.worker_books import WorkerBooks

REMOTE_GAP_STEPS = FIRST_GAP_STEPS + 1
"""Steps of a decode worker for which an answer waits whose KV came from elsewhere, at most: word of it comes in the
middle of one.
"""
_PATIENCE = 2.0
"""Times the gap that is expected: by so much before its own target comes a first token that is held."""
_LONGEST = 8.0
"""Times that gap, for which the second token is waited for where there is time: a prompt that came meanwhile may have
made a step long.
"""
_SPARE_PART, _SPARE_S = 0.2, 0.1
"""Of the target for the first token, and in seconds: whichever is less before it the token goes, whatever comes."""


def held_until_s(slo: SloClass, longest_s: float, waited_s: float) -> float:
    """A first token of this class that comes within so many seconds is held, if steps of up to `longest_s` compute its
    prompt where it goes on, and two of these are longer than it bears; the request has waited for `waited_s`.
    """
    return _left_s(slo, waited_s) - _PATIENCE * FIRST_GAP_STEPS * longest_s


def gap_s(forecast: Forecast, decode: WorkerBooks, *, local: bool) -> float:
    """What is to be expected between the first two tokens by the steps of `decode` as they are, in seconds."""
    if not local:
        return REMOTE_GAP_STEPS * max(forecast.itl_s, decode.queue[2])
    expected_s = FIRST_GAP_STEPS * max(forecast.itl_s, decode.queue[2])
    kept = decode.prompt_steps.keeps_first_gaps and FIRST_GAP_STEPS * forecast.itl_s <= forecast.first_gap_s
    return min(forecast.first_gap_s, expected_s) if kept else expected_s


def hold_s(slo: SloClass, target_s: float, expected_s: float, waited_s: float) -> float:
    """In seconds, 0 = not at all. `target_s` is what the class bears between tokens where the answer goes on,
    `expected_s` the gap behind the first; the request has waited for `waited_s`.
    """
    if expected_s <= min(target_s, slo.worst_gap_s) or not slo.has_gap_target:
        return 0.0
    left_s = _left_s(slo, waited_s)
    return min(_LONGEST * expected_s, left_s) if _PATIENCE * expected_s <= left_s else 0.0


def _left_s(slo: SloClass, waited_s: float) -> float:
    return slo.ttft_s - min(_SPARE_PART * slo.ttft_s, _SPARE_S) - waited_s
