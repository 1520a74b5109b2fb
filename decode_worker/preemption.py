"""Chooses the request that is preempted when a running request finds no page: the youngest, and never the oldest.

Age is the order in which leases were granted. The oldest request whose KV is here is never preempted and may preempt
every other, so it runs to its end; then the next one is the oldest: all of them end.

A request that was preempted and recomputed must make progress before it may be preempted again, or two requests could
preempt each other forever. Only the oldest takes precedence over that, whether it runs or waits for those that run.
"""

from collections.abc import Iterable

from decode_worker.request import DecodeRequest, Stage

PROGRESS_TOKENS = 16
"""Tokens that a recomputed attempt must bring before it may be preempted again."""


def choose(needs_page: DecodeRequest, candidates: Iterable[DecodeRequest]) -> DecodeRequest | None:
    """Return the candidate that is preempted for `needs_page`, or None if that request has to wait.

    `candidates` are the ready and running requests, `needs_page` among them; it may be the choice itself.
    """
    by_age = sorted(candidates, key=age)
    if needs_page is by_age[0]:
        others = by_age[1:]
        return next((each for each in reversed(others) if _may_preempt(each)), others[-1] if others else None)
    rank = by_age.index(needs_page)
    older, younger = by_age[:rank], by_age[rank:]
    # No request joins before this one has its page: if no older one runs, all would wait for each other.
    last = None if any(each.stage is Stage.RUNNING for each in older) else younger[-1]
    return next((each for each in reversed(younger) if _may_preempt(each)), last)


def age(request: DecodeRequest) -> int:
    """Return the key by which the oldest request sorts first."""
    return request.lease.epoch


def _may_preempt(request: DecodeRequest) -> bool:
    answered = request.reservation.answered
    return not answered or len(request.token_ids) - answered >= PROGRESS_TOKENS
