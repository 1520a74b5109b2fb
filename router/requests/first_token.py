"""Decides how long the first token of an answer is held, to be sent together with the second token.

The gap between the first two tokens is the longest: it contains the KV transfer to the decode worker, or mixed steps
that were already planned. Therefore the token is held until the second token arrives, but no longer than until shortly
before the TTFT target. It is not held if the SLO class limits no gaps. It is also not held if the class limits only a
percentile of the gaps and the answer is long enough that some gaps may exceed the ITL target, because the first gap may
be one of these.
"""

import math

from router.requests.request import RoutedRequest
from tandem.settings.slo import SloClass

_EARLY = 0.05
"""The share of the TTFT target that is reserved for delivering the token."""


def first_token_hold_s(request: RoutedRequest, now: float) -> float:
    """Return the maximum time for which to hold the request's first token, which arrives at `now`, see `hold_s`.

    It is 0 without a decode worker, because then all tokens come from the prefill worker.
    """
    if request.decode is None:
        return 0.0
    queued = request.queued
    return hold_s(queued.slo, now - queued.arrived_s, queued.mean_tokens)


def hold_s(slo: SloClass, waited_s: float, tokens: float) -> float:
    """Return the maximum time for which to hold the first token, in seconds.

    0 = do not hold the token; infinite = no maximum, because there is no TTFT target. `waited_s` is the time since the
    request arrived, in seconds, and `tokens` the expected number of answer tokens.
    """
    spare_gaps = int((1 - slo.itl_percent / 100) * max(0.0, tokens - 1) + 1e-6)
    if not slo.has_gap_target or (spare_gaps and slo.worst_gap_s == math.inf):
        return 0.0
    return max(0.0, (1 - _EARLY) * slo.ttft_s - waited_s)
