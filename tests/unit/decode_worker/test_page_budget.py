"""Pages for several requests at once are had where they are had one after the other, and are the same pages."""

import random

import pytest

from decode_worker.page_budget import PageClaims
from decode_worker.request import DecodeRequest
from tandem.engine.cache.page_pool import PagePool
from tandem.engine.cache.prefix_cache import Prefix, PrefixCache
from tandem.protocol.errors import ResourceExhausted
from tandem.protocol.kv_pages import KvPages
from tandem.protocol.messages import Lease, PeerRef, RequestRef, Reservation, SamplingParams


def crowded(seed: int) -> tuple[PageClaims, list[DecodeRequest]]:
    """Return page claims that are not all backed, and the running requests.

    Some claims are for prompts in flight; the limit may have been lowered.
    """
    dice = random.Random(seed)
    pool = PagePool(dice.randrange(6, 14))
    claims = PageClaims(PrefixCache(pool, KvPages(4)))
    claims.limit(dice.choice((None, pool.total - dice.randrange(3))))
    running = []
    for number in range(dice.randrange(2, 5)):
        ref, prompt_pages, pages = RequestRef(f"q{number}", 1), dice.randrange(1, 3), dice.randrange(2, 5)
        prefix = Prefix(b"")
        reservation = Reservation("r", ref, tuple(range(4 * prompt_pages)), SamplingParams(9), PeerRef("p", 1))
        try:
            claimed = claims.enter(prefix, pages, 4 * prompt_pages, 0)
        except ResourceExhausted:
            break
        request = DecodeRequest(
            reservation,
            Lease(ref.request_id, 1, number),
            prompt_pages,
            pages,
            claimed,
            b"",
            prefix,
            0,
            lease_pages=prompt_pages,
            held=prompt_pages,
        )
        claims.await_prompt(request.lease_pages, request.held)
        if dice.random() < 0.7:
            claims.spend_on_prompt(request, prompt_pages)
            request.pages += pool.allocate(ref, prompt_pages, from_promise=True)
            claims.extend(request, request.committed + dice.randrange(6))
            running.append(request)
    if dice.random() < 0.3:
        claims.limit(pool.counts().total - dice.randrange(6))
    return claims, running


def state(claims: PageClaims, requests: list[DecodeRequest]) -> object:
    facts = {name: value for name, value in vars(claims).items() if isinstance(value, int)}
    return facts, claims._pool.counts(), [(request.pages, request.claimed) for request in requests]


def test_together_is_one_by_one() -> None:
    refused = 0
    for seed in range(400):
        together, some = crowded(seed)
        single, others = crowded(seed)
        gave = True
        while gave and (growing := [request for request in some if request.claimed]):
            before = [list(request.pages) for request in growing]
            gave = together.grow_all(growing)
            each = [single.grow(request) for request in others if request.claimed]
            assert gave == all(each)
            if gave:
                assert state(together, some) == state(single, others)
                together._pool.check_integrity()
            else:
                assert [request.pages for request in growing] == before
                refused += len(growing) > 1
    assert refused > 20


@pytest.mark.parametrize(("committed", "left"), [(0, 3), (2, 3), (3, 3), (4, 4), (7, 7), (8, 8), (9, 8)], ids=str)
def test_a_request_whose_kv_is_here_is_committed_to_no_less_than_it_holds(committed: int, left: int) -> None:
    """Of 8 pages it has taken 3, and 2 more were for its prompt."""
    pool = PagePool(16)
    claims = PageClaims(PrefixCache(pool, KvPages(4)))
    ref, prefix = RequestRef("q", 1), Prefix(b"")
    reservation = Reservation("r", ref, (7,) * 20, SamplingParams(9), PeerRef("p", 1))
    claimed = claims.enter(prefix, 8, 20, 0)
    request = DecodeRequest(
        reservation, Lease("q", 1, 1), 5, 8, claimed, b"", prefix, 0, lease_pages=5, held=5
    )  # fmt: skip
    claims.await_prompt(request.lease_pages, request.held)
    request.pages += pool.allocate(ref, claims.spend_on_prompt(request, 3), from_promise=True)
    claims.settle(request, committed)
    assert (request.committed, request.claimed, request.held, request.lease_pages) == (left, left - 3, 3, 0)
    assert (claims.committed, claims.left, pool.counts().promised) == (left, 16 - 3, left - 3)
    claims.leave(request)
    assert (claims.committed, claims.left, pool.counts().promised) == (0, 16, 0)
