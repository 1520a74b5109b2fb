"""Chooses the request to preempt when a running request finds no free page: the youngest, never the oldest.

Age is the order in which leases were granted. The oldest request whose KV is here is never preempted and may preempt
every other request, so it runs to its end. Then the next one is the oldest, so every request ends eventually.

A request that was preempted and recomputed must make progress before it may be preempted again; otherwise two requests
could preempt each other forever. Only the oldest request may override this rule, whether it is running or ready.
"""

from collections.abc import Iterable

from decode_worker.request import DecodeRequest, Stage

PROGRESS_TOKENS = 16
"""Minimum number of new tokens of a recomputed attempt before it may be preempted again."""


def choose(needs_page: DecodeRequest, candidates: Iterable[DecodeRequest]) -> DecodeRequest | None:
    """Return the candidate to preempt so that `needs_page` gets a page, or None if that request has to wait.

    `candidates` are the ready and running requests, including `needs_page`, which may itself be chosen.
    """
    by_age = sorted(candidates, key=age)
    if needs_page is by_age[0]:
        others = by_age[1:]
        return next((request for request in reversed(others) if _may_preempt(request)), others[-1] if others else None)
    rank = by_age.index(needs_page)
    older, younger = by_age[:rank], by_age[rank:]
    # No request joins the batch before this one has its page. If no older request runs, waiting could last forever:
    # then the youngest is preempted even if it made no progress.
    last = None if any(request.stage is Stage.RUNNING for request in older) else younger[-1]
    return next((request for request in reversed(younger) if _may_preempt(request)), last)


def age(request: DecodeRequest) -> int:
    """Return the sort key of a request's age; the oldest request has the smallest key."""
    return request.lease.epoch


def _may_preempt(request: DecodeRequest) -> bool:
    prior_output_tokens = request.reservation.prior_output_tokens
    return not prior_output_tokens or len(request.token_ids) - prior_output_tokens >= PROGRESS_TOKENS
