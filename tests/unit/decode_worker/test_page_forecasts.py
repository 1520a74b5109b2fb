"""The pages that a request is promised, prompt and answer, and those that it gives up behind its windows."""

from typing import Any

import pytest

from decode_worker.page_budget import RETURN_S, PageBudget
from decode_worker.request import DecodeRequest
from kv_transfer.fence import Fence
from kv_transfer.lease import LeaseTable
from tandem.cost_model.answer_length import SEEN_MIN
from tandem.engine.cache.page_pool import PagePool
from tandem.engine.cache.prefix_cache import PrefixCache
from tandem.protocol.errors import InvalidArgument, ResourceExhausted
from tandem.protocol.kv_pages import FREED, KvPages, held_pages
from tandem.protocol.messages import Lease, PeerRef, RequestRef, Reservation, SamplingParams
from tandem.settings.worker import WorkerSettings
from tests.fake_engine import FACTS

PAGE = 4
PEER = PeerRef("p", 1)
FULL = KvPages(PAGE)
WINDOWED = KvPages(PAGE, (None, 2 * PAGE), step_tokens=2 * PAGE)


class Desk:
    """A budget over a pool, with a clock that stands still until it is moved."""

    def __init__(self, pages: int, kv: KvPages = FULL) -> None:
        self.now = 0.0
        self.pool = PagePool(pages)
        self.cache = PrefixCache(self.pool, kv)
        leases = LeaseTable(lambda: self.now, 5.0, Fence(1.0, lambda _peer: 1.0, lambda: self.now))
        self.budget = PageBudget(WorkerSettings(), "decode-0", self.cache, leases, model=FACTS, clock=lambda: self.now)

    def reserve(self, reservation: Reservation, *, local: bool = False) -> DecodeRequest:
        """Return a request with its promise, whose lease has taken no page so far."""
        tokens = len(reservation.prompt_token_ids)
        prefix = self.cache.prefix(reservation.prompt_token_ids, "")
        pages, reserved = self.budget.reserve(reservation, prefix, local=local)
        kv = self.cache.kv
        lease_pages = kv.held(tokens) - prefix.held if local else len(kv.sent(tokens, prefix.known))
        lease = Lease(reservation.ref.request_id, 1, 1)
        request = DecodeRequest(reservation, lease, kv.numbers(tokens), pages, reserved, b"", prefix, prefix.known)
        request.lease_pages, request.held = lease_pages, lease_pages + prefix.held
        self.budget.add_lease(request)
        return request

    def end(self, request: DecodeRequest) -> None:
        self.cache.release(request.prefix)
        self.budget.release(request)


def ask(name: str, tokens: int, max_tokens: int, **sampling: Any) -> Reservation:
    """Return a reservation whose answer runs to its limit, unless `sampling` says otherwise."""
    params = SamplingParams(max_tokens, **({"ignore_eos": True} | sampling))
    return Reservation("r", RequestRef(name, 1), tuple(range(3, 3 + tokens)), params, PEER)


def test_a_prompt_that_is_computed_here_reserves_the_pages_of_two_chunks_too() -> None:
    """12 pages of 47 positions, and as many of the window as two steps in flight may need."""
    sent, local = (Desk(64, WINDOWED).reserve(ask("q", 40, 8), local=local) for local in (False, True))
    assert (sent.committed, local.committed) == (12 + 4, 12 + 7)
    small = Desk(18, WINDOWED)
    with pytest.raises(InvalidArgument, match="need 19 KV pages"):
        small.reserve(ask("q", 40, 8), local=True)
    assert small.reserve(ask("q", 40, 8)).committed == 16


def test_the_longest_answer_ends_where_the_context_does() -> None:
    desk = Desk(128)
    assert desk.reserve(ask("q", 40, 10_000)).committed == FULL.numbers(FACTS.max_context - 1)


def test_a_forecast_is_learned_from_the_answers_that_end() -> None:
    desk = Desk(64)
    reservation = ask("q", 4, 40, ignore_eos=False)
    assert desk.budget.expected_pages(reservation, 0) == 11
    ended = desk.reserve(reservation)
    ended.answer = [100, 101]
    for _ in range(SEEN_MIN):
        desk.budget.learn(ended)
    assert desk.budget.expected_pages(reservation, 0) == 2


class InFlight:
    """A batch whose steps in flight each have a row of the request."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def flush_tokens(self, request: DecodeRequest) -> None:
        """Its tokens are all in the answer."""

    def in_flight(self, request: DecodeRequest) -> int:
        return self._steps


@pytest.mark.parametrize(("steps", "pages"), [(0, 4), (3, 5)])
def test_the_next_forecast_counts_the_tokens_in_flight(steps: int, pages: int) -> None:
    """An answer that no other was as long as is expected to become twice as long: 10 tokens, or 16."""
    desk = Desk(64)
    request = desk.reserve(ask("q", 4, 40, ignore_eos=False))
    for _ in range(SEEN_MIN):
        desk.budget._lengths.learn(40, 1)
    request.answer, request.batch = [100] * 5, InFlight(steps)
    desk.end(request)
    request.committed = request.reserved_pages = request.lease_pages = 0
    request.held = 2
    assert desk.budget.grow(request)
    assert request.committed == pages


def cached(desk: Desk, tokens: int) -> None:
    """Leave the pages of a prompt of so many tokens in the cache, those of all groups."""
    ref, prefix = RequestRef("earlier", 1), desk.cache.prefix(range(3, 3 + tokens), "")
    pages, promised = desk.cache.allocate(ref, prefix, desk.cache.kv.numbers(tokens), tokens)
    missing = [entry for entry, page in enumerate(pages) if page == FREED]
    for entry, page in zip(missing, desk.pool.allocate(ref, len(missing), from_reserved=True), strict=True):
        pages[entry] = page
    desk.pool.unreserve(promised - len(missing))
    desk.cache.publish(ref, prefix, pages)
    desk.cache.leave(ref, prefix, pages)
    desk.cache.release(prefix)


@pytest.mark.parametrize(("local", "read"), [(False, 5), (True, 7)])
def test_of_a_cached_prefix_a_prompt_reads_what_its_first_step_here_sees(local: bool, read: int) -> None:
    """That is the answer's first token, or the first token of the prompt that is not cached."""
    desk = Desk(64, WINDOWED)
    cached(desk, 20)
    request = desk.reserve(ask("q", 40, 8), local=local)
    assert (request.prefix.known, request.prefix.held, desk.pool.counts().shared) == (5, read, read)
    assert request.committed == request.reserved_pages + read
    desk.end(request)
    assert (desk.pool.counts().shared, desk.pool.counts().reserved, desk.budget.committed) == (0, 0, 0)


def test_pages_outside_the_window_of_a_local_prompt_serve_later_positions() -> None:
    desk = Desk(64, WINDOWED)
    cached(desk, 20)
    request = desk.reserve(ask("q", 40, 8), local=True)
    reserved_pages, lease_pages = request.reserved_pages, request.lease_pages
    desk.budget.retire_read(request, 28)
    assert (request.prefix.held, desk.pool.counts().shared) == (5, 5)
    assert (request.reserved_pages, request.lease_pages) == (reserved_pages + 2, lease_pages + 2)
    assert desk.budget.spend_on_chunk(request, 99) == lease_pages + 2


@pytest.mark.parametrize("window", range(1, 3 * PAGE))
def test_a_running_request_keeps_all_that_its_oldest_row_sees_and_nothing_else(window: int) -> None:
    kv = KvPages(PAGE, (None, window), step_tokens=2 * PAGE)
    for prior_output_tokens in range(1, 2 * PAGE + 1):
        desk = Desk(64, kv)
        request = desk.reserve(ask("q", 10, 40))
        ref, numbers = request.reservation.ref, kv.numbers(10 + prior_output_tokens - 1)
        request.answer, request.lease_pages, request.held = [100] * prior_output_tokens, 0, numbers * kv.groups
        request.pages = desk.pool.allocate(ref, numbers * kv.groups)
        desk.budget.grow_all([request])
        oldest_row = 10 + prior_output_tokens - 1
        assert request.next_unread == oldest_row
        kept = [entry for entry, page in enumerate(request.pages[: numbers * kv.groups]) if page != FREED]
        assert kept == kv.seen(oldest_row, 0, numbers), (window, prior_output_tokens)
        assert request.held == len(held_pages(request.pages))


def test_a_prompt_that_was_computed_here_needs_fewer_pages_from_then_on() -> None:
    desk = Desk(64, WINDOWED)
    request = desk.reserve(ask("q", 40, 8), local=True)
    taken = desk.budget.spend_on_lease(request, request.lease_pages)
    pages = iter(desk.pool.allocate(request.reservation.ref, taken, from_reserved=True))
    # Its last chunk saw nothing of the window's first three pages, which are given up already.
    for number in range(10):
        request.pages += [next(pages), next(pages) if number >= 3 else FREED]
    assert (next(pages, None), request.held, request.committed) == (None, 17, 12 + 7)
    desk.budget.complete_transfer(request)
    assert held_pages(request.pages) == [request.pages[entry] for entry in WINDOWED.seen(40, 0, 10)]
    assert request.held == len(held_pages(request.pages)) == 10 + 2
    assert request.committed == desk.budget.committed == 12 + 4
    assert desk.pool.counts().reserved == request.reserved_pages == request.committed - request.held


class TestPreempted:
    """Pages are left for a preempted request until it is back, or for `RETURN_S`."""

    @pytest.fixture
    def desk(self) -> Desk:
        """Of 12 pages, one request has 4 and the preempted one had 6."""
        desk = Desk(12)
        desk.reserve(ask("other", 12, 5))
        request = desk.reserve(ask("back", 20, 5))
        assert (request.committed, desk.budget.committed) == (6, 10)
        desk.budget.reserve_for_preempted(request)
        desk.end(request)
        return desk

    def test_others_get_what_it_leaves(self, desk: Desk) -> None:
        with pytest.raises(ResourceExhausted):
            desk.reserve(ask("new", 8, 5))
        desk.reserve(ask("new", 4, 5))

    def test_it_gets_its_own(self, desk: Desk) -> None:
        desk.reserve(ask("back", 20, 5))

    def test_nothing_is_kept_for_it_once_it_is_back(self, desk: Desk) -> None:
        desk.end(desk.reserve(ask("back", 20, 5)))
        desk.reserve(ask("new", 28, 5))

    def test_nothing_is_kept_for_it_after_a_while(self, desk: Desk) -> None:
        desk.now = RETURN_S
        desk.reserve(ask("new", 28, 5))

    def test_one_that_fits_the_empty_pool_is_accepted_however_much_is_kept(self) -> None:
        desk = Desk(12)
        for name in ("one", "two"):
            request = desk.reserve(ask(name, 28, 5))
            desk.budget.reserve_for_preempted(request)
            desk.end(request)
        assert desk.reserve(ask("new", 28, 5)).committed == 8
