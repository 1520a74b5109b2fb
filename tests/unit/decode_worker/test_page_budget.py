"""Pages for several requests at once are had where they are had one after the other, and are the same pages."""

import random

import pytest

from decode_worker.page_budget import PageReservations
from decode_worker.request import DecodeRequest
from tandem.engine.cache.page_pool import PagePool
from tandem.engine.cache.prefix_cache import Prefix, PrefixCache
from tandem.protocol.errors import ResourceExhausted
from tandem.protocol.kv_pages import KvPages
from tandem.protocol.messages import Lease, PeerRef, RequestRef, Reservation, SamplingParams


def crowded(seed: int) -> tuple[PageReservations, list[DecodeRequest]]:
    """Return page claims that are not all backed, and the running requests.

    Some claims are for prompts in flight; the limit may have been lowered.
    """
    dice = random.Random(seed)
    pool = PagePool(dice.randrange(6, 14))
    claims = PageReservations(PrefixCache(pool, KvPages(4)))
    claims.limit(dice.choice((None, pool.total - dice.randrange(3))))
    running = []
    for number in range(dice.randrange(2, 5)):
        ref, prompt_pages, pages = RequestRef(f"q{number}", 1), dice.randrange(1, 3), dice.randrange(2, 5)
        prefix = Prefix(b"")
        reservation = Reservation("r", ref, tuple(range(4 * prompt_pages)), SamplingParams(9), PeerRef("p", 1))
        try:
            reserved = claims.reserve(prefix, pages, 4 * prompt_pages, 0)
        except ResourceExhausted:
            break
        request = DecodeRequest(
            reservation,
            Lease(ref.request_id, 1, number),
            prompt_pages,
            pages,
            reserved,
            b"",
            prefix,
            0,
            lease_pages=prompt_pages,
            held=prompt_pages,
        )
        claims.add_lease(request.lease_pages, request.held)
        if dice.random() < 0.7:
            claims.spend_on_lease(request, prompt_pages)
            request.pages += pool.allocate(ref, prompt_pages, from_reserved=True)
            claims.extend(request, request.committed + dice.randrange(6))
            running.append(request)
    if dice.random() < 0.3:
        claims.limit(pool.counts().total - dice.randrange(6))
    return claims, running


def state(claims: PageReservations, requests: list[DecodeRequest]) -> object:
    facts = {name: value for name, value in vars(claims).items() if isinstance(value, int)}
    return facts, claims._pool.counts(), [(request.pages, request.reserved_pages) for request in requests]


def test_together_is_one_by_one() -> None:
    refused = 0
    for seed in range(400):
        together, some = crowded(seed)
        single, others = crowded(seed)
        gave = True
        while gave and (growing := [request for request in some if request.reserved_pages]):
            before = [list(request.pages) for request in growing]
            gave = together.grow_all(growing)
            outcomes = [single.grow(request) for request in others if request.reserved_pages]
            assert gave == all(outcomes)
            if gave:
                assert state(together, some) == state(single, others)
                together._pool.check_integrity()
            else:
                assert [request.pages for request in growing] == before
                refused += len(growing) > 1
    assert refused > 20


def entered(claims: PageReservations, name: str, pages: int, lease_pages: int, taken: int = 0) -> DecodeRequest:
    """Return a request that claims `pages`, of which so many were for its prompt, and some of those are taken."""
    ref, prefix = RequestRef(name, 1), Prefix(b"")
    reservation = Reservation("r", ref, (7,) * 4 * lease_pages, SamplingParams(9), PeerRef("p", 1))
    reserved = claims.reserve(prefix, pages, 4 * lease_pages, 0)
    request = DecodeRequest(reservation, Lease(name, 1, 1), lease_pages, pages, reserved, b"", prefix, 0)
    request.lease_pages = request.held = lease_pages
    claims.add_lease(lease_pages, lease_pages)
    spent = claims.spend_on_lease(request, taken)
    request.pages += claims._pool.allocate(ref, spent, from_reserved=True)
    return request


@pytest.fixture
def claims() -> PageReservations:
    return PageReservations(PrefixCache(PagePool(16), KvPages(4)))


@pytest.mark.parametrize(("committed", "left"), [(0, 3), (2, 3), (3, 3), (4, 4), (7, 7), (8, 8), (9, 8)], ids=str)
def test_a_request_whose_kv_is_here_is_committed_to_no_less_than_it_holds(
    claims: PageReservations, committed: int, left: int
) -> None:
    """Of 8 pages it has taken 3, and 2 more were for its prompt."""
    request, pool = entered(claims, "q", 8, 5, taken=3), claims._pool
    claims.complete_transfer(request, committed)
    assert (request.committed, request.reserved_pages, request.held, request.lease_pages) == (left, left - 3, 3, 0)
    assert (claims.committed, claims.left, pool.counts().reserved) == (left, 16 - 3, left - 3)
    claims.remove(request)
    assert (claims.committed, claims.left, pool.counts().reserved) == (0, 16, 0)


def test_what_is_left_is_never_below_nothing(claims: PageReservations) -> None:
    entered(claims, "q", 8, 5)
    claims.limit(4)
    assert claims.left == 0


def test_pages_that_are_kept_for_others_count_against_the_limit(claims: PageReservations) -> None:
    claims.limit(8)
    with pytest.raises(ResourceExhausted):
        claims.reserve(Prefix(b""), 6, 4, 3)
    assert claims.reserve(Prefix(b""), 5, 4, 3) == 5


def test_no_request_enters_while_answers_that_outgrew_their_forecasts_lack_pages(claims: PageReservations) -> None:
    """Not even one that needs no page of its own, as all it reads is cached."""
    request = entered(claims, "q", 16, 2, taken=2)
    claims.extend(request, 17)
    with pytest.raises(ResourceExhausted, match="outgrown"):
        claims.reserve(Prefix(b""), 0, 4, 0)


def test_a_chunk_of_a_local_prompt_gets_at_most_the_pages_of_its_lease(claims: PageReservations) -> None:
    request = entered(claims, "q", 8, 3)
    assert (claims.for_chunk(request, 2), claims.for_chunk(request, 9)) == (2, 3)


def test_a_chunk_waits_where_the_pages_that_were_given_up_for_it_have_gone_to_others(claims: PageReservations) -> None:
    request = entered(claims, "local", 3, 3, taken=3)
    claims.reserve_again(request, 2, for_prompt=True)
    assert (request.lease_pages, request.held, claims.left) == (2, 3, 13)
    others = entered(claims, "others", 11, 11)
    assert claims.for_chunk(request, 9) == 2
    claims.reserve_again(request, 1, for_prompt=True)
    assert claims.for_chunk(request, 9) == 2, "there is no third page, and the other prompt's are not its own"
    claims.remove(others)
    assert claims.for_chunk(request, 9) == 3


def test_pages_that_are_given_up_may_be_held_by_others(claims: PageReservations) -> None:
    request = entered(claims, "q", 5, 5, taken=5)
    claims.reserve_again(request, 2)
    assert (request.held, request.reserved_pages, claims.left) == (3, 2, 16 - 3)


def test_within_a_limit_only_as_much_is_promised_as_may_be_held(claims: PageReservations) -> None:
    """Prompts in transfer count as held already, and have their promise."""
    claims.limit(8)
    running = entered(claims, "running", 4, 4, taken=4)
    entered(claims, "coming", 2, 2)
    claims.complete_transfer(running, 4)
    claims.extend(running, 9)
    grown = [claims.grow(running) for _ in range(3)]
    assert grown == [True, True, False]
    assert (claims.left, claims._pool.counts().reserved) == (0, 2), "the two of the prompt that is coming"
