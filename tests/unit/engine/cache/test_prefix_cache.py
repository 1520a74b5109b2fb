"""The prefix cache: readers of pages, the order of eviction, and the cost of look-ups."""

from collections.abc import Sequence

import pytest

from tandem.engine.cache.page_pool import PagePool
from tandem.engine.cache.prefix_cache import Prefix, PrefixCache
from tandem.protocol.errors import Internal, ResourceExhausted, StaleEpoch
from tandem.protocol.kv_pages import KvPages
from tandem.protocol.messages import Lease, RequestRef
from tandem.protocol.page_digests import page_digests, root_digest
from tandem.protocol.prefixes import PrefixChanges, PrefixRun

PAGE = 2
PROMPT = [1, 2, 3, 4, 5, 6, 7]
"""Three full pages and a token."""


def ref(name: str) -> RequestRef:
    return RequestRef(name, 1)


class Desk:
    """Requests over a cache, by name."""

    def __init__(self, pages: int = 16, *, enabled: bool = True) -> None:
        self.pool = PagePool(pages)
        self.cache = PrefixCache(self.pool, KvPages(PAGE), enabled=enabled)
        self.open: dict[str, tuple[Prefix, list[int]]] = {}

    def begin(self, name: str, prompt: Sequence[int] = PROMPT, salt: str = "") -> int:
        """Returns the number of tokens that need not be computed."""
        prefix = self.cache.prefix(prompt, salt)
        pages, _ = self.cache.allocate(ref(name), prefix, -(-len(prompt) // PAGE), len(prompt))
        self.open[name] = prefix, pages
        self.cache.check_integrity()
        return len(prefix.pages) * PAGE

    def publish(self, name: str) -> None:
        self.cache.publish(ref(name), *self.open[name])
        self.cache.check_integrity()

    @property
    def last_cached(self) -> int:
        """The cached page that is evicted last."""
        return [page for page, readers in self.pool.readers().items() if not readers][-1]

    def end(self, name: str) -> None:
        self.cache.leave(ref(name), *self.open.pop(name))
        self.cache.check_integrity()

    def run(self, name: str, prompt: Sequence[int] = PROMPT, salt: str = "") -> int:
        hit = self.begin(name, prompt, salt)
        self.publish(name)
        self.end(name)
        return hit

    def pages(self, name: str) -> list[int]:
        return self.open[name][1]


def test_the_next_request_reads_what_the_last_one_has_computed() -> None:
    desk = Desk()
    assert desk.begin("a") == 0
    assert desk.begin("b") == 0, "nothing is known before it is computed"
    desk.publish("a")
    assert desk.begin("c") == 6
    assert desk.pages("c")[:3] == desk.pages("a")[:3]
    assert desk.pages("c")[3] != desk.pages("a")[3], "what is not full is its own"
    counts = desk.pool.counts()
    assert (counts.owned, counts.shared, counts.cached) == (6, 3, 0)
    for name in "abc":
        desk.end(name)
    counts = desk.pool.counts()
    assert (counts.free, counts.shared, counts.cached) == (13, 0, 3)
    assert (desk.cache.query_tokens, desk.cache.hit_tokens) == (21, 6)


def test_at_least_one_token_is_computed() -> None:
    desk = Desk()
    desk.run("a", [1, 2, 3, 4])
    assert desk.run("b", [1, 2, 3, 4]) == 2
    assert desk.run("c", [1, 2, 3, 4, 5]) == 4
    assert desk.run("d", [1, 2]) == 0
    assert desk.run("e", [1]) == 0


def test_a_page_is_reused_only_after_the_same_prefix() -> None:
    desk = Desk()
    desk.run("a", PROMPT)
    assert desk.run("b", [9, 2, 3, 4, 5, 6, 7]) == 0
    assert desk.run("c", [1, 2, 9, 9, 5, 6, 7]) == 2
    assert desk.run("d", [3, 4, 5, 6, 7]) == 0


def test_a_salt_hides_all_pages() -> None:
    desk = Desk(32)
    desk.run("a", PROMPT, "alice")
    assert desk.run("b", PROMPT, "bob") == 0
    assert desk.run("c", PROMPT, "") == 0
    assert desk.run("d", PROMPT, "alice") == 6
    assert root_digest("a") != root_digest("b") != page_digests([1, 2], PAGE, root_digest("b"))[0]


def test_the_second_writer_keeps_its_page_and_reads_the_first_one_s() -> None:
    desk = Desk()
    desk.begin("a")
    desk.begin("b")
    desk.publish("a")
    desk.publish("b")
    assert desk.pool.counts().shared == 3
    assert set(desk.pages("a")).isdisjoint(desk.pages("b"))
    desk.end("a")
    assert desk.pool.counts().shared == 3, "b still keeps the path whole"
    desk.end("b")
    assert (desk.pool.counts().cached, desk.pool.counts().owned) == (3, 0)


def test_pages_of_an_answer_are_cached_after_those_of_its_prompt() -> None:
    desk = Desk()
    desk.begin("a")
    desk.publish("a")
    prefix, pages = desk.open["a"]
    pages += desk.pool.allocate(ref("a"), 1)
    desk.cache.extend(prefix, [7, 8, 9, 10])
    desk.publish("a")
    desk.end("a")
    assert desk.run("b", [*PROMPT, 8, 9, 10, 11]) == 10


def test_eviction_takes_the_ends_of_unread_prefixes() -> None:
    desk = Desk(8)
    desk.run("a", [1, 2, 3, 4, 5])
    desk.run("b", [1, 2, 6, 7, 8])
    assert desk.pool.counts().cached == 3
    desk.pool.allocate(ref("x"), 6)
    desk.pool.free(ref("x"))
    assert desk.begin("c", [1, 2, 3, 4, 5]) == 2, "the longest unread end is gone, what both began with is not"
    assert desk.begin("d", [1, 2, 6, 7, 8]) == 4
    desk.cache.check_integrity()


def test_what_is_read_is_never_taken() -> None:
    desk = Desk(8)
    desk.run("a")
    desk.begin("b")
    assert desk.pool.counts().shared == 3
    with pytest.raises(ResourceExhausted):
        desk.pool.allocate(ref("x"), 5)
    assert len(desk.pool.allocate(ref("x"), 4)) == 4
    desk.cache.check_integrity()


def test_what_was_reserved_is_not_read_away() -> None:
    desk = Desk(8)
    desk.run("a")
    desk.pool.reserve(7)
    assert desk.cache.prefix(PROMPT, "").digests
    with pytest.raises(ResourceExhausted):
        desk.begin("b")
    assert desk.begin("c", [1, 2]) == 0
    desk.cache.check_integrity()


def test_a_reservation_is_for_what_is_missing() -> None:
    desk = Desk(8)
    desk.run("a")
    prefix = desk.cache.prefix(PROMPT, "")
    assert desk.cache.reserve(prefix, 5, len(PROMPT)) == 2
    assert (desk.pool.counts().shared, desk.pool.counts().reserved) == (3, 2)
    own = desk.pool.advertise(Lease("q", 1, 1), 2)
    desk.pool.adopt(Lease("q", 1, 1), ref("q"))
    desk.cache.leave(ref("q"), prefix, [*prefix.pages, *own])
    assert (desk.pool.counts().owned, desk.pool.counts().shared) == (0, 0)
    full = desk.cache.prefix(PROMPT, "")
    with pytest.raises(ResourceExhausted):
        desk.cache.reserve(full, 9, len(PROMPT))
    assert full.pages == []
    assert desk.pool.counts().shared == 0
    assert desk.cache.query_tokens == 2 * len(PROMPT), "what was refused counts when it comes back"


def test_joining_needs_pages_that_are_there() -> None:
    desk = Desk()
    desk.begin("a")
    desk.publish("a")
    other = desk.cache.prefix(PROMPT, "")
    desk.cache.join(other, 2)
    assert other.pages == desk.pages("a")[:2]
    with pytest.raises(StaleEpoch):
        desk.cache.join(desk.cache.prefix(PROMPT, "bob"), 1)
    with pytest.raises(StaleEpoch):
        desk.cache.join(desk.cache.prefix([1], ""), 1)
    desk.cache.release(other)
    desk.end("a")
    desk.cache.check_integrity()


def test_a_cache_that_is_off_knows_nothing() -> None:
    desk = Desk(enabled=False)
    assert desk.run("a") == desk.run("b") == 0
    assert desk.pool.counts().free == 16
    assert desk.cache.query_tokens == 14


def names(*runs: PrefixRun) -> set[bytes]:
    return {digest for run in runs for digest in run.digests}


def test_stored_and_removed_pages_are_reported_in_batches() -> None:
    desk = Desk(8)
    assert desk.cache.changes() is None
    desk.run("a")
    first = desk.cache.changes()
    digests = tuple(page_digests(PROMPT, PAGE, root_digest("")))
    assert first == PrefixChanges(1, (PrefixRun(root_digest(""), digests),))
    desk.run("b", [1, 2, 9, 9, 9])
    desk.pool.allocate(ref("x"), 6)
    second = desk.cache.changes()
    assert second is not None
    assert second.sequence == 2
    assert second.removed == digests[:0:-1]
    assert [run.parent for run in second.stored] == [digests[0]]
    assert desk.cache.changes() is None
    known = desk.cache.known()
    assert known.sequence == 2
    assert names(*known.stored) == names(*first.stored, *second.stored) - set(second.removed)


def test_a_page_stored_and_evicted_between_reports_is_reported_as_removed() -> None:
    desk = Desk(3)
    desk.run("a", [1, 2, 3])
    desk.run("b", [4, 5, 6, 7, 8])
    changes = desk.cache.changes()
    assert changes is not None
    assert names(*changes.stored).isdisjoint(changes.removed)
    assert names(*changes.stored) == set(desk.cache._nodes)
    assert len(changes.removed) == 1


def test_tokens_and_salts_are_reported_with_their_pages() -> None:
    cache = PrefixCache(PagePool(8), KvPages(PAGE), reports_tokens=True)
    owner = ref("a")
    prompt, answer = list(range(10, 10 + 2 * PAGE + 1)), list(range(30, 30 + PAGE - 1))
    prefix = cache.prefix(prompt, "alice")
    pages, _ = cache.allocate(owner, prefix, 3, len(prompt))
    cache.publish(owner, prefix, pages)
    cache.extend(prefix, [prompt[-1], *answer])
    cache.publish(owner, prefix, pages)
    cache.leave(owner, prefix, pages)
    cache.pool.allocate(ref("evicts the last page"), 6)
    changes = cache.changes()
    assert changes is not None
    digests = tuple(page_digests([*prompt, *answer], PAGE, root_digest("alice")))
    run = PrefixRun(root_digest("alice"), digests[:2], tuple(prompt[: 2 * PAGE]), "alice")
    assert (changes.stored, changes.removed) == ((run,), digests[2:])
    assert cache.known().stored == (run,)
    cache.check_integrity()


def test_pages_that_were_read_ahead_are_reported_with_their_tokens_once_a_prompt_reads_them() -> None:
    cache = PrefixCache(PagePool(8), KvPages(PAGE), reports_tokens=True)
    prompt, root = list(range(10, 10 + 3 * PAGE + 1)), root_digest("alice")
    first, second, third = page_digests(prompt, PAGE, root)
    ahead = Prefix(root, [first, second], 2)
    cache.complete_reload(ref("ahead"), ahead, cache.begin_reload(ref("ahead"), ahead, 2), ())
    changes = cache.changes()
    assert changes is not None
    assert changes.stored == (PrefixRun(root, (first, second)),), "nobody knows their tokens yet"
    prefix = cache.prefix(prompt, "alice")
    pages, _ = cache.allocate(ref("a"), prefix, 4, len(prompt))
    changes = cache.changes()
    assert changes is not None
    assert changes.stored == (PrefixRun(root, (first, second), tuple(prompt[: 2 * PAGE]), "alice"),)
    cache.publish(ref("a"), prefix, pages)
    cache.leave(ref("a"), prefix, pages)
    changes = cache.changes()
    assert changes is not None
    assert changes.stored == (PrefixRun(second, (third,), tuple(prompt[2 * PAGE : 3 * PAGE]), "alice"),)
    cache.check_integrity()


def test_known_tokens_are_reported_beside_pages_without() -> None:
    cache = PrefixCache(PagePool(8), KvPages(PAGE), reports_tokens=True)
    prompt, root = list(range(10, 10 + 2 * PAGE)), root_digest("")
    first, second = page_digests(prompt, PAGE, root)
    prefix = cache.prefix(prompt[:PAGE], "")
    cache.publish(ref("a"), prefix, cache.allocate(ref("a"), prefix, 1, PAGE)[0])
    ahead = Prefix(root, [first, second], 2)
    cache.complete_reload(ref("ahead"), ahead, cache.begin_reload(ref("ahead"), ahead, 2), ())
    assert cache.known().stored == (PrefixRun(root, (first,), tuple(prompt[:PAGE])), PrefixRun(first, (second,)))


def test_a_lookup_touches_each_page_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost does not depend on the number of cached pages; it is counted, not timed."""
    desk = Desk(1024)
    for first in range(60):
        desk.run(f"q{first}", [first, *range(20)])
    asked: list[object] = []

    class Counted(dict):  # type: ignore[type-arg]
        def __contains__(self, key: object) -> bool:
            asked.append(key)
            return super().__contains__(key)

    desk.cache._nodes = Counted(desk.cache._nodes)
    assert desk.begin("again", [7, *range(20)]) == 20
    assert len(asked) == 10


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda desk: desk.cache._digests.popitem(), "are shared or cached and"),
        (lambda desk: desk.pool.retain(desk.pages("b")[1:2]), "more readers than page"),
        (lambda desk: desk.cache._nodes.pop(desk.open["b"][0].digests[0]), "are shared or cached and"),
        (lambda desk: desk.pool._cached._ordinary.move_to_end(desk.last_cached, last=False), "would be evicted"),
        (lambda desk: desk.pool._free.take(1), "lost"),
    ],
)
def test_integrity_names_the_fault(damage, words: str) -> None:
    desk = Desk()
    desk.run("a")
    desk.run("other", [9, 9, 8, 8, 7, 7, 6])
    desk.begin("b")
    desk.cache.check_integrity()
    damage(desk)
    with pytest.raises(Internal, match=words):
        desk.cache.check_integrity()
