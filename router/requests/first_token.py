"""Decides how long the first token of an answer is held, to be sent together with the second.

The gap between the first two tokens is the longest one: it contains the KV transfer to the decode worker, or the
mixed steps that were already planned. An answer that is long enough to have one gap above its ITL target allowed
spends it there, unless its class limits every gap. Else the first token is held until the second arrives, at most until
shortly before its TTFT target.
"""

import math

from tandem.settings.slo import SloClass

_EARLY = 0.05
"""The share of the TTFT target that is reserved for delivery."""


def hold_s(slo: SloClass, waited_s: float, tokens: float) -> float:
    """Return the seconds for which the first token may be held; 0 = not at all, infinite without a TTFT target.

    The request is of class `slo`, arrived `waited_s` seconds ago, and its answer is expected to have `tokens` tokens.
    """
    spare_gaps = int((1 - slo.itl_percent / 100) * max(0.0, tokens - 1) + 1e-6)
    if not slo.has_gap_target or (spare_gaps and slo.worst_gap_s == math.inf):
        return 0.0
    return max(0.0, (1 - _EARLY) * slo.ttft_s - waited_s)
