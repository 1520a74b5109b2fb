"""Shares the slots of decode batches among tenants: preempts running answers for a tenant that finds no free slot.

The queue is fair among waiting tenants, but an answer keeps its slot and its KV pages until it ends, and one tenant may
hold all slots before another tenant's request arrives. Then the newest answers of the first tenant return to the queue
and continue later: their tokens are kept, and are prefilled with the prompt.
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
"""The time that a request waits before answers are preempted for it, in seconds; most slots become free by then."""
_SHARE = 2
"""A tenant loses slots only if it holds at least this many times the slots that the waiting tenant would have then.

With a factor of 1, answers would be preempted whenever two busy tenants differ by one slot, and each preemption costs a
prefill.
"""
_PROGRESS_TOKENS = 16
"""Number of tokens that an attempt must have generated before it may be preempted, so that every answer progresses."""


class SlotShares:
    """Preempts at most one answer on each call. The dispatcher owns it and calls it on the event loop."""

    def __init__(self, policy: PlacementPolicy, fleet: Fleet, ends: RequestEnds) -> None:
        self._policy, self._fleet, self._ends = policy, fleet, ends

    def make_room(self, waiting: RoutedRequest, live: Iterable[RoutedRequest]) -> None:
        """Preempt one of the `live` requests for `waiting`, the head of the queue, if a tenant holds too many slots."""
        if time.monotonic() - waiting.waiting_since < WAIT_S:
            return
        if not self._policy.waits_for_decode(waiting.queued, self._fleet):
            return
        preempted = answer_to_preempt(waiting, live)
        if preempted is not None:
            self._ends.preempt(preempted)


def answer_to_preempt(waiting: RoutedRequest, live: Iterable[RoutedRequest]) -> RoutedRequest | None:
    """Return the answer to preempt for `waiting`: the newest of the lowest priority of the tenant with most slots.

    None if the tenant of `waiting` already has its share, or no answer has generated enough tokens.
    """
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
