"""Decides how long the first token of an answer is held, to be sent together with the second token.

The gap between the first two tokens is the longest: it contains the KV transfer to the decode worker, or mixed steps
that were already planned. The ITL target is a percentile, so that a long answer may have a gap above the target: it
spends that gap here, unless its class limits every gap. Otherwise the first token is held until the second arrives, at
most until shortly before the TTFT target.
"""

import math

from tandem.settings.slo import SloClass

_EARLY = 0.05
"""The share of the TTFT target that is reserved for delivery."""


def hold_s(slo: SloClass, waited_s: float, tokens: float) -> float:
    """Return the longest time for which the first token is held, in seconds; 0 = not held, infinite = no TTFT target.

    `waited_s` is the time since the request arrived, in seconds, `tokens` the expected number of answer tokens.
    """
    spare_gaps = int((1 - slo.itl_percent / 100) * max(0.0, tokens - 1) + 1e-6)
    if not slo.has_gap_target or (spare_gaps and slo.worst_gap_s == math.inf):
        return 0.0
    return max(0.0, (1 - _EARLY) * slo.ttft_s - waited_s)
