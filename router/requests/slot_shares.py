"""Shares the slots of decode batches among tenants: takes running answers back for a tenant that finds none free.

The queue is fair among waiting tenants, but an answer holds its slot and its KV pages to its end, and a tenant may hold
all of them before another one comes. Then its youngest answers return to the queue and continue later: their tokens are
kept, and are prefilled with the prompt.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

from router.placement.fleet import Fleet
from router.placement.policy import PlacementPolicy
from router.requests.ends import RequestEnds
from router.requests.request import RoutedRequest

WAIT_S = 1.0
"""The time for which a request waits for a free slot first, in seconds: most slots become free by themselves."""
_SHARE = 2
"""A tenant keeps its slots unless it holds this many for each one of the tenant that waits.

Equal shares would take answers back whenever two busy tenants differ by one, and each costs a prefill.
"""
_PROGRESS_TOKENS = 16
"""Tokens that an attempt must have brought before it is taken back, so that every answer comes to its end."""


class SlotShares:
    """Preempts at most one answer each time that it is asked. Belongs to the event loop."""

    def __init__(self, policy: PlacementPolicy, fleet: Fleet, ends: RequestEnds) -> None:
        self._policy, self._fleet, self._ends = policy, fleet, ends

    def make_room(self, waiting: RoutedRequest, live: Iterable[RoutedRequest]) -> None:
        """Preempt one of the `live` requests for the one at the head of the queue, if another tenant holds too much."""
        if time.monotonic() - waiting.waiting_since < WAIT_S:
            return
        if not self._policy.waits_for_decode(waiting.queued, self._fleet):
            return
        preempted = answer_to_preempt(waiting, live)
        if preempted is not None:
            self._ends.preempt(preempted)


def answer_to_preempt(waiting: RoutedRequest, live: Iterable[RoutedRequest]) -> RoutedRequest | None:
    """Return the newest answer of the tenant with most slots; None if `waiting` has its share or none may be taken."""
    running = [each for each in live if each.decode is not None and not each.generated]
    held = Counter(each.admitted.tenant for each in running)
    tenant, most = held.most_common(1)[0] if held else ("", 0)
    if most < _SHARE * (held[waiting.admitted.tenant] + 1):
        return None
    able = (
        each
        for each in running
        if each.admitted.tenant == tenant and each.assembler.count - each.answered >= _PROGRESS_TOKENS
    )
    return max(able, key=lambda each: (each.admitted.priority, each.placed_s), default=None)
