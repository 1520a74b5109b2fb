"""Kept pages: they are evicted after others until their time ends, within their tenant's share, and leaves first."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from tandem.capacity.simulation.clock import VirtualClock
from tandem.engine.cache.eviction_order import EvictionOrder
from tandem.engine.cache.page_pool import PagePool
from tandem.engine.cache.prefix_cache import PrefixCache
from tandem.protocol.kv_pages import KvPages
from tandem.protocol.messages import RequestRef

PAGE = 2


class Worker:
    """A cache of `pages` pages whose requests begin and end at once."""

    def __init__(self, pages: int) -> None:
        self.clock = VirtualClock()
        self.pool = PagePool(pages, self.clock)
        self.cache = PrefixCache(self.pool, KvPages(PAGE))
        self.requests = 0

    def run(self, first: int, pages: int, tenant: str = "", retention_s: float = 0.0, **hint: Any) -> None:
        """Compute and publish a prompt of `pages` full pages and a token, whose tokens begin with `first`."""
        self.requests += 1
        owner, prompt = RequestRef(f"q{self.requests}", 1), prompt_of(first, pages)
        prefix = self.cache.prefix(prompt, tenant, tenant=tenant, retention_s=retention_s, **hint)
        taken, _ = self.cache.allocate(owner, prefix, pages + 1, len(prompt))
        self.cache.publish(owner, prefix, taken)
        self.cache.leave(owner, prefix, taken)
        self.cache.check_integrity()

    def hit(self, first: int, pages: int, tenant: str = "") -> int:
        return self.cache.hit(self.cache.prefix(prompt_of(first, pages), tenant))


def prompt_of(first: int, pages: int) -> Sequence[int]:
    return [first, *range(1, PAGE * pages + 1)]


def test_kept_pages_outlast_others_until_their_time_ends() -> None:
    worker = Worker(12)
    worker.run(100, 4, retention_s=60.0)
    for first in range(200, 220):
        worker.run(first, 4)
    assert worker.hit(100, 4) == 4
    worker.clock.now = 61.0
    for first in range(300, 303):
        worker.run(first, 4)
    assert worker.hit(100, 4) == 0


def test_a_hint_for_the_beginning_of_a_prompt_keeps_no_page_after_it() -> None:
    worker = Worker(12)
    worker.run(100, 6, hinted_s=60.0, hinted_tokens=2 * PAGE + 1)
    for first in range(200, 220):
        worker.run(first, 4)
    assert worker.hit(100, 6) == 2
    worker.clock.now = 61.0
    for first in range(300, 303):
        worker.run(first, 4)
    assert worker.hit(100, 6) == 0


def test_without_a_hint_the_least_recently_used_goes_first() -> None:
    worker = Worker(12)
    for first in (100, 200, 100, 300):
        worker.run(first, 4)
    assert (worker.hit(100, 4), worker.hit(200, 4)) == (4, 3)


def test_each_use_begins_the_time_again() -> None:
    worker = Worker(12)
    worker.run(100, 4, retention_s=60.0)
    worker.clock.now = 50.0
    worker.run(100, 4, retention_s=60.0)
    worker.run(100, 4, retention_s=1.0)
    worker.clock.now = 100.0
    for first in range(200, 220):
        worker.run(first, 4)
    assert worker.hit(100, 4) == 4, "a shorter time does not shorten it"


def test_kept_pages_are_still_evicted_before_a_request_is_refused() -> None:
    worker = Worker(12)
    worker.run(100, 10, retention_s=3600.0)
    worker.run(200, 11)
    assert worker.hit(200, 11) == 11
    assert worker.hit(100, 10) == 0


def test_a_tenant_that_marks_everything_leaves_others_their_share() -> None:
    """With two tenants, each may keep half of the pool; the rest of the greedy one's pages are evicted like others."""
    worker = Worker(24)
    worker.run(1, 4, "modest")
    for turn in range(40):
        worker.run(1000 + turn, 4, "greedy", retention_s=86400.0)
        worker.run(1, 4, "modest")
        assert worker.hit(1, 4, "modest") == 4
        assert len(worker.pool._cached._kept) <= 12


def test_a_share_shrinks_when_a_tenant_joins() -> None:
    worker = Worker(24)
    for first in range(5):
        worker.run(first, 4, "first", retention_s=86400.0)
    assert len(worker.pool._cached._kept) == 20
    worker.run(100, 4, "second", retention_s=60.0)
    worker.run(200, 4, "second", retention_s=60.0)
    worker.run(300, 3, "second", retention_s=60.0)
    assert worker.hit(100, 4, "second") + worker.hit(200, 4, "second") + worker.hit(300, 3, "second") >= 8
    assert len(worker.pool._cached._of_tenant["first"]) <= 12


@pytest.mark.parametrize("seed", range(20))
def test_leaves_go_first_whatever_is_kept(seed: int) -> None:
    """`check_integrity`, which each run ends with, finds a page that would be evicted before those after it."""
    draw = random.Random(seed)
    worker = Worker(30)
    for _ in range(300):
        worker.clock.now += draw.choice((0.0, 0.0, 1.0, 20.0))
        retention_s = draw.choice((0.0, 0.0, 5.0, 40.0, 1000.0))
        worker.run(draw.randrange(6), draw.randrange(1, 9), draw.choice("abc"), retention_s)


def test_heaps_do_not_grow_with_use() -> None:
    clock = VirtualClock()
    order = EvictionOrder(clock)
    order.share = lambda: 10
    for _ in range(5000):
        clock.now += 1.0
        order.mark([1, 2], "a", 1e6)
        order.add([2, 1])
        order.remove(1)
        order.remove(2)
        assert len(order._by_time) < 100
    assert not order._queues
    assert not len(order)
    order.forget(1)
    order.add([1, 2])
    assert list(order) == [1, 2]
