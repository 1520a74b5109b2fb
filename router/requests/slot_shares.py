"""Shares the slots and KV pages of decode workers among tenants, by preempting answers of those that hold most.

The queue is fair among waiting tenants, but an answer holds its slot and its KV pages to its end, and a tenant may hold
all of them before another one comes. Then its youngest answers return to the queue and continue later: their tokens are
kept, and are prefilled with the prompt.

A tenant's share is the larger one of its shares of all slots and of all KV pages (dominant resource fairness: Ghodsi et
al., NSDI 2011).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence

from router.placement.fleet import Fleet
from router.placement.policy import PlacementPolicy
from router.requests.ends import RequestEnds
from router.requests.request import RoutedRequest

WAIT_S = 1.0
"""The time that a request waits before answers are preempted for it, in seconds; most slots become free by then."""
_SHARE = 2
"""A tenant keeps its answers unless its share is this many times that of the tenant that waits.

Equal shares would preempt an answer whenever two busy tenants differ by one, and each preemption costs a prefill.
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
        workers = [worker for worker in self._fleet.live if worker.decodes]
        slots = sum(worker.max_batch_requests for worker in workers)
        preempted = answer_to_preempt(waiting, live, slots, sum(worker.answer_tokens_total for worker in workers))
        if preempted is not None:
            self._ends.preempt(preempted)


def answer_to_preempt(
    waiting: RoutedRequest, live: Iterable[RoutedRequest], slots: int, kv_tokens: int
) -> RoutedRequest | None:
    """Return the newest answer of the tenant with the largest share of `slots` slots and KV of `kv_tokens` tokens.

    None if the tenant of `waiting`, which counts as running, has its share, or if no answer may be preempted.
    """
    running = [each for each in live if each.decode is not None and not each.generated]
    shares: defaultdict[str, list[RoutedRequest]] = defaultdict(list)
    for each in running:
        shares[each.admitted.tenant].append(each)

    def share(requests: Sequence[RoutedRequest]) -> float:
        held = sum(each.queued.reserved_tokens for each in requests)
        return max(len(requests) / slots, held / kv_tokens)

    largest = max(shares.values(), key=share, default=())
    if not largest or share(largest) < _SHARE * share([*shares[waiting.admitted.tenant], waiting]):
        return None
    able = (each for each in largest if each.assembler.count - each.prior_output_tokens >= _PROGRESS_TOKENS)
    return max(able, key=lambda each: (each.admitted.priority, each.placed_s), default=None)
