"""Who gives way when there is no page for a running answer: the youngest, and never the oldest.

Age is the order in which leases were granted. The oldest of those whose KV is here is never asked, and may ask
everybody, so it runs to its end whatever the others do; then the next one is the oldest: all of them end.

What was computed again after it gave way has to get somewhere before it may be asked again, or two requests could push
each other out for ever. Only the oldest is worth more than that, whether it runs or waits for those that run to move.
"""

from collections.abc import Iterable

from decode_worker.request import DecodeRequest, Stage

PROGRESS_TOKENS = 16
"""Tokens that an attempt behind an earlier one's tokens brings before it may give way."""


def choose(needy: DecodeRequest, there: Iterable[DecodeRequest]) -> DecodeRequest | None:
    """Who of `there`, the ready and running requests, `needy` among them, gives way; perhaps itself, or nobody: then it
    waits.
    """
    by_age = sorted(there, key=age)
    if needy is by_age[0]:
        others = by_age[1:]
        return next((each for each in reversed(others) if _may_yield(each)), others[-1] if others else None)
    place = by_age.index(needy)
    older, younger = by_age[:place], by_age[place:]
    # Nobody joins before the needy one has moved: if no older one runs, all would wait for each other.
    last = None if any(each.stage is Stage.RUNNING for each in older) else younger[-1]
    return next((each for each in reversed(younger) if _may_yield(each)), last)


def age(request: DecodeRequest) -> int:
    """By which the oldest is the smallest."""
    return request.lease.epoch


def _may_yield(request: DecodeRequest) -> bool:
    answered = request.reservation.answered
    return not answered or len(request.token_ids) - answered >= PROGRESS_TOKENS
