"""How long a first token may wait for the second.

Between the two lies the hand-over from one worker to the other: some three steps of the one that decodes. Where a class
bears two, that gap is one of few that an answer may have too long, and of a short answer one too many. There the first
token goes with the second, unless the first would come late.
"""

from __future__ import annotations

from router.slo import SloClass
from router.step_forecast import REMOTE_GAP_STEPS

_PATIENCE = 2.0
"""Times the hand-over that is expected, for which the second token is waited for."""
_PART = 0.5
"""Of the target for the first token, by when it goes whatever comes."""


def hold_s(slo: SloClass, target_s: float, step_s: float, waited_s: float) -> float:
    """In seconds, 0 = not at all. `target_s` is what the class bears between tokens where the answer goes on, `step_s`
    a step there; the request has waited for `waited_s`.
    """
    handover_s = REMOTE_GAP_STEPS * step_s
    if handover_s <= min(target_s, slo.worst_gap_s) or not slo.has_gap_target:
        return 0.0
    longest_s = _PATIENCE * handover_s
    return longest_s if waited_s + longest_s <= _PART * slo.ttft_s else 0.0
