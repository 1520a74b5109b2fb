"""Shares the slots and KV pages of decode workers fairly among tenants, by preempting answers.

The queue is fair among waiting tenants. But an answer keeps its slot and its KV pages to its end, and one tenant's
answers may hold all slots or pages when another tenant's request arrives. Then the newest answers of the first tenant
are preempted: they return to the queue and continue later, when their tokens are prefilled with the prompt.

A tenant's share is the larger of its share of all slots and its share of all KV pages (dominant resource fairness:
Ghodsi et al., NSDI 2011).
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
"""Minimum time that a request waits before an answer is preempted for it, in seconds; most slots are freed sooner."""
_SHARE = 2
"""A tenant's answers are preempted only if its share is at least this multiple of the waiting tenant's share.

With 1 instead of 2, an answer would be preempted whenever two busy tenants differ by one answer, and each preemption
costs a prefill.
"""
_PROGRESS_TOKENS = 16
"""Minimum number of tokens that an attempt generates before it may be preempted, so that every answer progresses."""


class SlotShares:
    """Preempts answers of tenants whose share of the slots or KV pages is too large, at most one per call.

    The dispatcher owns it and calls it on the event loop.
    """

    def __init__(self, policy: PlacementPolicy, fleet: Fleet, ends: RequestEnds) -> None:
        self._policy, self._fleet, self._ends = policy, fleet, ends

    def make_room(self, waiting: RoutedRequest, live: Iterable[RoutedRequest]) -> None:
        """Preempt one of the `live` requests for `waiting`, the head of the queue, if a tenant's share is too large.

        `answer_to_preempt` chooses the request. Does nothing if `waiting` has waited for less than `WAIT_S` seconds, or
        if it does not wait for the capacity of a decode worker.
        """
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
    """Return the answer to preempt for `waiting`: the newest of the least urgent answers of one tenant.

    The tenant is the one with the largest share of slots or KV pages. `slots` and `kv_tokens` are the totals of all
    decode workers. None if the largest share is below `_SHARE` times that of the waiting tenant, counting `waiting` as
    running, or if no answer may be preempted.
    """
    running = [request for request in live if request.decode is not None and not request.generated]
    shares: defaultdict[str, list[RoutedRequest]] = defaultdict(list)
    for request in running:
        shares[request.admitted.tenant].append(request)

    def share(requests: Sequence[RoutedRequest]) -> float:
        held = sum(request.queued.reserved_tokens for request in requests)
        return max(len(requests) / slots, held / kv_tokens)

    largest = max(shares.values(), key=share, default=())
    if not largest or share(largest) < _SHARE * share([*shares[waiting.admitted.tenant], waiting]):
        return None
    able = (request for request in largest if request.assembler.count - request.prior_output_tokens >= _PROGRESS_TOKENS)
    return max(able, key=lambda request: (request.admitted.priority, request.placed_s), default=None)
