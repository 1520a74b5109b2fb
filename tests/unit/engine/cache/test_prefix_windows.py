"""The prefix cache of models whose layers have windows: which pages a hit needs, and what becomes of those behind."""

from collections.abc import Sequence

import pytest

from tandem.engine.cache.page_pool import PagePool
from tandem.engine.cache.prefix_cache import Prefix, PrefixCache
from tandem.protocol.errors import ResourceExhausted
from tandem.protocol.kv_pages import FREED, STATE, KvPages, held_pages
from tandem.protocol.messages import RequestRef

PAGE = 2
WINDOWS = (None, 5, 3)
"""A hit needs the last two pages of the second group, and the last one of the third."""
PROMPT = list(range(1, 18))
"""Eight full pages and a token."""


def ref(name: str) -> RequestRef:
    return RequestRef(name, 1)


class Desk:
    """Prompts that are computed page by page, as a prefill worker computes them."""

    def __init__(self, pages: int = 60, windows: tuple[int | None, ...] = WINDOWS) -> None:
        self.pool = PagePool(pages)
        self.kv = KvPages(PAGE, windows, step_tokens=PAGE)
        self.cache = PrefixCache(self.pool, self.kv)
        self.open: dict[str, tuple[Prefix, list[int]]] = {}

    def begin(self, name: str, prompt: Sequence[int] = PROMPT) -> int:
        """Computes a prompt and publishes it; returns the number of its pages that were known."""
        prefix = self.cache.prefix(prompt, "")
        numbers = self.kv.numbers(len(prompt))
        pages, reserved = self.cache.allocate(ref(name), prefix, numbers, len(prompt))
        known, reserved_pages = prefix.known, reserved
        for number in range(known, numbers):
            self.cache.publish(ref(name), prefix, pages, number, all_groups=False)
            reserved_pages += self.cache.retire(ref(name), prefix, pages, number * PAGE)
            reserved += self.pool.reserve_up_to(reserved_pages - reserved)
            for entry in self.kv.seen(number * PAGE, number, number + 1):
                if pages[entry] == FREED:
                    (pages[entry],) = self.pool.allocate(ref(name), 1, from_reserved=True)
                    reserved_pages, reserved = reserved_pages - 1, reserved - 1
            assert len(held_pages(pages)) <= self.kv.held(len(prompt))
            self.cache.check_integrity()
        self.pool.unreserve(reserved)
        self.cache.publish(ref(name), prefix, pages)
        self.cache.check_integrity()
        self.open[name] = prefix, pages
        return known

    def end(self, name: str) -> None:
        self.cache.leave(ref(name), *self.open.pop(name))
        self.cache.check_integrity()

    def run(self, name: str, prompt: Sequence[int] = PROMPT) -> int:
        known = self.begin(name, prompt)
        self.end(name)
        return known

    def evict(self, pages: int) -> None:
        """Takes all free pages and so many cached ones for a moment."""
        free = self.pool.counts().free
        self.pool.allocate(ref("evictor"), free + pages)
        self.cache.check_integrity()
        self.pool.free(ref("evictor"))


@pytest.mark.parametrize("shared", range(9))
def test_any_prefix_is_found_whatever_follows_it(shared: int) -> None:
    desk = Desk()
    assert desk.run("a") == 0
    assert desk.run("b", [*PROMPT[: shared * PAGE], *[99] * 9]) == shared


def test_pages_before_a_window_are_evicted_first_and_only_prefixes_that_end_there_miss() -> None:
    desk = Desk()
    desk.run("a")
    desk.evict(2)  # the first pages that were given up
    assert desk.run("b", [*PROMPT[:PAGE], 99, 99, 99]) == 0
    assert desk.run("c") == 8


def test_a_missing_page_is_cached_again_once_computed() -> None:
    desk = Desk()
    desk.run("a")
    desk.evict(2)
    short = [*PROMPT[:PAGE], 99, 99, 99]
    assert desk.run("b", short) == 0
    assert desk.run("c", short) == 2


def test_a_digest_without_its_page_of_a_full_group_loses_all_others() -> None:
    desk = Desk()
    desk.run("a")
    desk.evict(desk.pool.counts().cached)
    assert len(desk.cache) == 0
    assert desk.run("b") == 0


def test_a_decoding_request_reads_what_its_next_token_sees() -> None:
    desk = Desk()
    desk.run("a")
    prefix = desk.cache.prefix(PROMPT, "")
    reserved = desk.cache.reserve(prefix, 20, len(PROMPT), position=len(PROMPT))
    # 17 tokens: the second group sees 13 .., pages 6 and 7; the third 15 .., page 7.
    assert (prefix.known, prefix.held, reserved) == (8, 8 + 2 + 1, 9)
    assert desk.cache.retire_read(prefix, len(PROMPT) + 2) == 2
    desk.cache.release(prefix)
    desk.pool.unreserve(reserved)
    desk.cache.check_integrity()


def test_nothing_changes_where_there_is_no_room() -> None:
    desk = Desk(pages=30)
    desk.begin("a")
    before = desk.pool.counts()
    with pytest.raises(ResourceExhausted):
        desk.begin("b", [7] * 60)
    assert desk.pool.counts() == before
    desk.end("a")


@pytest.mark.parametrize("windows", [(5,), (5, 3), (None, None, 3), (3, None)])
def test_groups_of_any_kind(windows: tuple[int | None, ...]) -> None:
    desk = Desk(windows=windows)
    for name, prompt, known in (("a", PROMPT, 0), ("b", PROMPT, 8), ("c", [*PROMPT[:8], *[50] * 9], 4)):
        assert desk.run(name, prompt) == known
    desk.evict(desk.pool.counts().cached)
    assert len(desk.cache) == 0
    assert desk.run("d") == 0


def test_many_readers_release_at_their_own_pace() -> None:
    desk = Desk(pages=200)
    for number in range(4):
        assert (
            desk.begin(f"q{number}", [*PROMPT, *range(100 * number, 100 * number + 6 * number)]) == min(number, 1) * 8
        )
    for number in range(4):
        desk.end(f"q{number}")
    counts = desk.pool.counts()
    assert counts.free + counts.cached == counts.total


def test_routers_are_told_only_where_a_state_is() -> None:
    """A request can continue the states after pages 3 and 6 of a prompt of eight pages, and after no other."""
    pool, kv = PagePool(40), KvPages(PAGE, (None, STATE, STATE), step_tokens=3 * PAGE)
    cache, owner = PrefixCache(pool, kv), ref("a")
    prefix = cache.prefix(PROMPT, "")
    pages = pool.allocate(owner, 9 * kv.groups)
    prefix.states = {2, 5}
    cache.publish(owner, prefix, pages)
    reported = {prefix.digests[2], prefix.digests[5]}
    for report in (cache.changes(), cache.known()):
        assert report is not None
        assert {digest for run in report.stored for digest in run.digests} == reported
    assert cache.events == (2, 0)
    for length, known in ((6, 6), (5, 3), (2, 0)):
        request = cache.prefix([*PROMPT[: PAGE * length], 99], "")
        cache.reserve(request, kv.held(PAGE * length + 1), PAGE * length + 1)
        assert request.known == known
        pool.unreserve(kv.held(PAGE * length + 1) - request.held)
        cache.release(request)
    cache.leave(owner, prefix, pages)
    pool.allocate(ref("evictor"), 40)
    changes = cache.changes()
    assert changes is not None
    assert (set(changes.removed), changes.stored) == (reported, ())
    assert cache.events == (2, 2)
    assert cache.known().stored == ()
