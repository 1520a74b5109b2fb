"""Page states, promises and the messages of `check_integrity()`."""

import threading

import pytest

from tandem.engine.cache.page_census import PageCounts
from tandem.engine.cache.page_pool import PagePool
from tandem.protocol.errors import Internal, ResourceExhausted, StaleEpoch
from tandem.protocol.messages import Lease, RequestRef

ALICE, BOB = RequestRef("alice", 1), RequestRef("bob", 1)
LEASE = Lease("alice", 1, 7)


def counts(pool: PagePool, **held: int) -> PageCounts:
    free = pool.counts().total - sum(count for state, count in held.items() if state != "reserved")
    empty = dict.fromkeys(("owned", "shared", "cached", "advertised", "quarantined", "reserved"), 0)
    return PageCounts(total=pool.counts().total, free=free, **(empty | held))


def test_allocate_and_free() -> None:
    pool = PagePool(4)
    pages = pool.allocate(ALICE, 3)
    assert len(set(pages)) == 3
    assert list(pool._owned.get(ALICE, ())) == pages
    assert pool.counts() == counts(pool, owned=3)
    assert pool.free(ALICE, pages[:1]) == 1
    assert pool.free(ALICE) == 2
    assert pool.free(ALICE) == 0
    assert pool.counts() == counts(pool)
    pool.check_integrity()


def test_no_room_changes_nothing() -> None:
    pool = PagePool(4)
    pool.allocate(ALICE, 2)
    with pytest.raises(ResourceExhausted, match="3 KV pages are needed and 2 of 4 are free"):
        pool.allocate(BOB, 3)
    assert pool.counts() == counts(pool, owned=2)


def test_a_promise_keeps_pages_from_others() -> None:
    pool = PagePool(4)
    pool.reserve(3)
    with pytest.raises(ResourceExhausted):
        pool.allocate(BOB, 2)
    with pytest.raises(ResourceExhausted):
        pool.reserve(2)
    assert len(pool.advertise(LEASE, 2)) == 2
    assert len(pool.allocate(ALICE, 1, from_reserved=True)) == 1
    assert pool.counts() == counts(pool, advertised=2, owned=1)
    assert len(pool.allocate(BOB, 1)) == 1
    pool.check_integrity()


def test_a_reservation_is_not_spent_twice() -> None:
    pool = PagePool(4)
    pool.reserve(1)
    with pytest.raises(Internal):
        pool.advertise(LEASE, 2)
    pool.unreserve(1)
    with pytest.raises(Internal):
        pool.unreserve(1)
    assert pool.counts() == counts(pool)


def test_a_lease_is_adopted_in_order() -> None:
    pool = PagePool(8)
    pool.reserve(5)
    pages = pool.advertise(LEASE, 2) + pool.advertise(LEASE, 3)
    assert pool.adopt(LEASE, ALICE) == pages
    more = pool.allocate(ALICE, 1)
    assert list(pool._owned.get(ALICE, ())) == pages + more
    with pytest.raises(StaleEpoch):
        pool.adopt(LEASE, ALICE)
    pool.check_integrity()


def test_quarantined_pages_have_no_owner_until_freed() -> None:
    pool = PagePool(4)
    pool.reserve(2)
    pages = pool.advertise(LEASE, 2)
    assert pool.quarantine(LEASE) == pages
    for late in (lambda: pool.adopt(LEASE, ALICE), lambda: pool.free_lease(LEASE), lambda: pool.advertise(LEASE, 0)):
        with pytest.raises(StaleEpoch):
            late()
    assert set(pool.allocate(BOB, 2)).isdisjoint(pages)
    with pytest.raises(ResourceExhausted):
        pool.allocate(BOB, 1)
    assert pool.free_quarantined(LEASE) == 2
    assert set(pool.allocate(BOB, 2)) == set(pages)
    pool.check_integrity()


def test_another_epoch_is_another_lease() -> None:
    pool = PagePool(4)
    pool.reserve(1)
    pool.advertise(LEASE, 1)
    for wrong in (Lease("alice", 1, 8), Lease("alice", 2, 7), Lease("bob", 1, 7)):
        with pytest.raises(StaleEpoch, match="epoch"):
            pool.adopt(wrong, ALICE)
        with pytest.raises(StaleEpoch):
            pool.quarantine(wrong)
    assert pool.free_lease(LEASE) == 1


def test_shared_pages_are_cached_after_their_last_reader() -> None:
    pool = PagePool(4)
    pages = pool.allocate(ALICE, 3)
    pool.share(ALICE, pages[:2])
    assert pool.retain(pages[:1]) == 1
    assert pool.counts() == counts(pool, owned=1, shared=2)
    assert pool.release(pages[:2]) == 1
    assert pool.release(pages[:1]) == 1
    assert pool.counts() == counts(pool, owned=1, cached=2)
    with pytest.raises(Internal):
        pool.release(pages[:1])
    assert pool.retain(pages[:2]) == 2
    assert pool.counts() == counts(pool, owned=1, shared=2)
    pool.check_integrity()


def cached(pool: PagePool, count: int) -> list[int]:
    """Returns so many cached pages, in the order of eviction."""
    pages = pool.allocate(BOB, count)
    pool.share(BOB, pages)
    pool.release(pages)
    return pages


def test_cached_pages_are_room_and_are_taken_in_the_order_they_were_left() -> None:
    pool = PagePool(4)
    taken: list[int] = []
    pool.on_eviction(taken.append)
    first, second, third = cached(pool, 3)
    pool.retain([first])
    pool.release([first])
    pool.reserve(3)
    pool.allocate(ALICE, 1)
    assert taken == []
    assert set(pool.advertise(LEASE, 2)) == {second, third}
    assert taken == [second, third]
    assert pool.counts() == counts(pool, owned=1, advertised=2, cached=1, reserved=1)
    with pytest.raises(ResourceExhausted, match="0 of 4 are free"):
        pool.allocate(ALICE, 1)
    pool.check_integrity()


def test_a_reserved_cached_page_is_not_retained() -> None:
    pool = PagePool(4)
    pages = cached(pool, 3)
    pool.reserve(2)
    assert pool.retain(pages) == 2
    assert pool.counts() == counts(pool, shared=2, cached=1, reserved=2)
    assert pool.retain(pages[:1]) == 1, "it is read already"
    assert len(pool.allocate(ALICE, 2, from_reserved=True)) == 2
    pool.check_integrity()


def test_a_call_with_pages_of_another_owner_changes_nothing() -> None:
    pool = PagePool(4)
    mine, theirs = pool.allocate(ALICE, 2), pool.allocate(BOB, 1)
    for pages in ([mine[0], theirs[0]], [mine[0], mine[0]], [99]):
        with pytest.raises(Internal):
            pool.free(ALICE, pages)
        with pytest.raises(Internal):
            pool.share(ALICE, pages)
        with pytest.raises(Internal):
            pool.retain(pages)
    assert pool.counts() == counts(pool, owned=3)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda pool: pool._free.take(1), "lost"),
        (lambda pool: pool._free.give([next(iter(pool._free))]), "2 states: free, free"),
        (lambda pool: pool._free.give([next(iter(pool._owned.get(ALICE, ())))]), "owned by alice#1"),
        (lambda pool: pool._free.give([99]), "page 99"),
        (lambda pool: setattr(pool, "_reserved", 9), "9 pages are reserved"),
        (lambda pool: pool._shared.update({pool._free.take(1)[0]: 0}), "0 readers"),
    ],
)
def test_integrity_names_the_fault(damage, words: str) -> None:
    pool = PagePool(4)
    pool.allocate(ALICE, 1)
    pool.check_integrity()
    damage(pool)
    with pytest.raises(Internal, match=words):
        pool.check_integrity()


def test_threads_never_get_the_same_page() -> None:
    pool = PagePool(64)
    faults: list[str] = []

    def work(name: int) -> None:
        for attempt in range(300):
            owner = RequestRef(f"r{name}", attempt)
            try:
                pages = pool.allocate(owner, 1 + (attempt + name) % 9)
            except ResourceExhausted:
                continue
            if list(pool._owned.get(owner, ())) != pages or pool.free(owner, pages) != len(pages):
                faults.append(f"{owner}: {pages}")

    threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert pool.counts() == counts(pool)
    pool.check_integrity()
