"""How long the first token of an answer is held, to be sent together with the second.

Between the first two tokens lie more steps than between any others: the handover to the decode worker, or the steps
with other prompts that were already planned. An answer that is expected to have gaps to spare spends one there. Any
other has its first token held until the second arrives, at most until shortly before its own target.
"""

from router.slo import SloClass

_EARLY = 0.05
"""The part of the first token's target that is left for its delivery."""


def hold_s(slo: SloClass, waited_s: float, tokens: float) -> float:
    """Seconds that the first token may be held, 0 = not at all: of a request of this class that arrived `waited_s` ago
    and whose answer is expected to have so many tokens. Infinite for a class without a target for the first token.
    """
    if not slo.has_gap_target or slo.spare_gaps(tokens):
        return 0.0
    return max(0.0, (1 - _EARLY) * slo.ttft_s - waited_s)
