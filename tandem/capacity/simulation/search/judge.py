"""The verdict on a simulated request, like `router/observability/verdict.py` on a real one."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from router.observability.verdict import MET, Verdict
from router.observability.verdict import Outcome as Kind
from tandem.capacity.simulation.request import Outcome
from tandem.protocol.lifecycle.spans import Phase
from tandem.settings.slo import SloClass


def judge(
    outcome: Outcome, slo: SloClass, idle_step_s: float, moments: Sequence[float] | NDArray[np.float64]
) -> Verdict:
    """Returns whether the request met `slo`, or why not.

    Gap targets in steps are multiples of `idle_step_s`; `moments` are the tokens' times at the client.
    """
    if outcome.error:
        return outcome.rejected or Verdict(Kind.FAILED, Phase.QUEUE)
    if moments[0] - outcome.asked.due_s > slo.ttft_s:
        queued_s = outcome.placed_s - outcome.asked.due_s
        waited = 2 * queued_s >= moments[0] - outcome.asked.due_s
        return Verdict(Kind.MISSED_TTFT, Phase.QUEUE if waited else Phase.PREFILL)
    gaps = np.diff(moments)
    over = int((gaps > slo.itl_target(idle_step_s)).sum())
    allowed = len(gaps) - math.ceil(round(slo.itl_percent / 100 * len(gaps), 6))
    if over > allowed or (len(gaps) and gaps.max() > slo.worst_gap_s):
        return Verdict(Kind.MISSED_ITL, Phase.DECODE)
    return MET
