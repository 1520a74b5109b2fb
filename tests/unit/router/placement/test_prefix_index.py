"""The router's prefix index: what it answers, how it stays in step with workers, and that it forgets."""

import random

import pytest

from router.placement.prefix_index import PrefixIndex
from router.workers.prefix_feed import PrefixFeed
from tandem.protocol.page_digests import page_digests, root_digest
from tandem.protocol.prefixes import KvTier, PrefixChanges, PrefixList, PrefixRun, TierPages

PAGE = 4
ROOT = root_digest("")


def pages(*tokens: int) -> list[bytes]:
    return page_digests(tokens, PAGE, ROOT)


def chain(length: int, branch: int = 0) -> list[bytes]:
    return pages(*(branch * 1000 + position for position in range(PAGE * length)))


def index_of(**held: list[bytes]) -> PrefixIndex:
    """Workers w0, w1, …, each with the pages it holds."""
    index = PrefixIndex()
    for name, digests in held.items():
        slot = int(name.removeprefix("w"))
        index.open(slot, 1000)
        index.store(slot, digests)
    return index


def run(digests: list[bytes], parent: bytes = ROOT) -> PrefixRun:
    return PrefixRun(parent, tuple(digests))


def test_each_worker_counts_as_far_as_it_holds() -> None:
    prompt = chain(9)
    match = index_of(w0=prompt[:2], w3=prompt[:7], w5=prompt[:7], w64=prompt).match(prompt)
    assert [match.pages(slot) for slot in (0, 1, 3, 5, 64)] == [2, 0, 7, 7, 9]
    assert match.longest(3) == [(64, 9), (3, 7), (5, 7)]
    assert match.longest(9) == [(64, 9), (3, 7), (5, 7), (0, 2)]
    assert match.longest(9, beyond=2) == [(64, 9), (3, 7), (5, 7)]


def test_a_worker_with_state_layers_counts_up_to_its_last_state() -> None:
    prompt = chain(9)
    index = index_of(w0=prompt[:4])
    index.open(1, 1000, states=True)
    index.store(1, [prompt[1], prompt[6], *chain(3, branch=1)])
    index.open(2, 1000, states=True)
    assert [index.match(prompt).pages(slot) for slot in range(3)] == [4, 7, 0]
    assert [index.match(prompt[:6]).pages(slot) for slot in range(3)] == [4, 2, 0]
    assert index.match(prompt[:1]).levels == ((1, 1),)
    assert index.match(prompt).longest(3) == [(1, 7), (0, 4)]
    index.remove(1, [prompt[6]])
    assert index.match(prompt).pages(1) == 2
    index.drop(1)
    index.open(1, 1000)
    index.store(1, prompt[1:3])
    assert index.match(prompt).pages(1) == 0, "another worker in this slot, without state layers"


def test_a_shared_beginning_counts_up_to_where_prompts_part() -> None:
    index = index_of(w1=pages(*range(8), 90, 91, 92, 93))
    assert index.match(pages(*range(8), 80, 81, 82, 83)).pages(1) == 2
    assert index.match(pages(90, 91, 92, 93)).pages(1) == 0, "a page is named with everything before it"


def test_another_salt_finds_nothing() -> None:
    tokens = list(range(16))
    index = index_of(w0=page_digests(tokens, PAGE, root_digest("a")))
    assert index.match(page_digests(tokens, PAGE, root_digest("a"))).pages(0) == 4
    assert index.match(page_digests(tokens, PAGE, root_digest("b"))).levels == ()


def test_short_prompts() -> None:
    index = index_of(w0=chain(1))
    assert index.match([]).pages(0) == 0
    assert index.match(chain(1)).pages(0) == 1


def test_against_a_plain_walk() -> None:
    dice = random.Random(5)
    prompts = [chain(dice.randrange(1, 40), branch) for branch in range(6)]
    prompts += [pages(*range(4 * dice.randrange(1, 9)), *(7000 + n for n in range(4 * 12))) for _ in range(6)]
    index = PrefixIndex()
    held: dict[int, set[bytes]] = {slot: set() for slot in range(12)}
    for slot in held:
        index.open(slot, 10_000)
    for _ in range(400):
        slot, prompt = dice.randrange(12), dice.choice(prompts)
        cut = dice.randrange(len(prompt) + 1)
        if dice.random() < 0.6:
            index.store(slot, prompt[:cut])
            held[slot].update(prompt[:cut])
        else:  # leaves first: whatever lies behind the cut goes in every prompt that runs through it
            gone = {d for other in prompts for at, d in enumerate(other) if set(other[: at + 1]) & set(prompt[cut:])}
            index.remove(slot, gone)
            held[slot] -= gone
        asked = dice.choice(prompts)
        match = index.match(asked)
        for worker, has in held.items():
            assert match.pages(worker) == next((n for n, d in enumerate(asked) if d not in has), len(asked))
    assert {slot: len(index._pages.get(slot, ())) for slot in held} == {slot: len(has) for slot, has in held.items()}
    assert len(index) == len(set().union(*held.values()))


def test_pages_in_tiers_follow_those_on_the_device() -> None:
    prompt = chain(9)
    index = index_of(w0=prompt[:2], w1=prompt[:4], w2=[])
    assert index.match(prompt).tiers == ()
    index.store(0, prompt[2:5], KvTier.HOST)
    index.store(0, prompt[5:8], KvTier.DISK)
    index.store(2, prompt[:1], KvTier.DISK)
    match = index.match(prompt)
    assert [match.pages(slot) for slot in range(3)] == [2, 4, 0]
    assert match.longest_with_tiers(9) == [0, 1, 2]
    assert index.reloads(0, prompt, 2) == [(8, {KvTier.HOST: 3, KvTier.DISK: 3}), (5, {KvTier.HOST: 3})]
    assert index.reloads(1, prompt, 4) == []
    assert index.reloads(2, prompt, 0) == [(1, {KvTier.DISK: 1})]
    index.remove(0, prompt[3:4])
    assert index.reloads(0, prompt, 2) == [(3, {KvTier.HOST: 1})], "a page before the others is missing"


def test_a_page_is_where_it_was_reported_last() -> None:
    prompt = chain(3)
    index = index_of(w0=prompt, w1=prompt[:1])
    index.store(0, prompt[1:], KvTier.HOST)
    assert (index.match(prompt).pages(0), index.reloads(0, prompt, 1)) == (1, [(3, {KvTier.HOST: 2})])
    index.store(0, prompt[2:], KvTier.DISK)
    assert index.reloads(0, prompt, 1)[0] == (3, {KvTier.HOST: 1, KvTier.DISK: 1})
    index.store(0, prompt)
    assert (index.match(prompt).pages(0), index.match(prompt).tiers) == (3, ())
    index.store(0, prompt, KvTier.HOST)
    index.drop(0)
    index.drop(1)
    assert len(index) == 0


def test_a_worker_with_state_layers_loads_its_last_state() -> None:
    prompt = chain(9)
    index = index_of()
    index.open(1, 1000, states=True)
    index.store(1, prompt[1:2])
    index.store(1, [prompt[4], prompt[6]], KvTier.HOST)
    assert index.match(prompt).longest_with_tiers(1) == [1]
    assert index.reloads(1, prompt, 2) == [(7, {KvTier.HOST: 5})]
    assert index.reloads(1, prompt[:6], 2) == [(5, {KvTier.HOST: 3})]


def test_tiers_against_a_plain_walk() -> None:
    dice = random.Random(7)
    prompts = [chain(dice.randrange(1, 30), branch) for branch in range(4)]
    index = index_of(**{f"w{slot}": [] for slot in range(5)})
    held: dict[int, dict[bytes, KvTier | None]] = {slot: {} for slot in range(5)}
    for _ in range(600):
        slot, prompt = dice.randrange(5), dice.choice(prompts)
        cut, tier = dice.randrange(len(prompt) + 1), dice.choice((None, KvTier.HOST, KvTier.DISK))
        if dice.random() < 0.7:
            part = prompt[:cut] if tier is None else prompt[cut:]
            index.store(slot, part, tier)
            held[slot].update(dict.fromkeys(part, tier))
        else:
            index.remove(slot, prompt[cut:])
            held[slot] = {digest: place for digest, place in held[slot].items() if digest not in prompt[cut:]}
        asked = dice.choice(prompts)
        for worker, has in held.items():
            resident = next((n for n, d in enumerate(asked) if has.get(d, 1) is not None), len(asked))
            options = dict(index.reloads(worker, asked, resident))
            end = next((n for n, d in enumerate(asked) if d not in has), len(asked))
            loaded = [place for place in (has[d] for d in asked[resident:end]) if place is not None]
            expected = {tier: loaded.count(tier) for tier in set(loaded)}
            assert options.get(end, {}) == expected if loaded else not options
            fast = next((n for n, d in enumerate(asked) if has.get(d, KvTier.DISK) is KvTier.DISK), len(asked))
            if any(has[d] is KvTier.HOST for d in asked[resident:fast]):
                assert options[fast] == {KvTier.HOST: sum(has[d] is KvTier.HOST for d in asked[resident:fast])}


def test_a_worker_that_is_gone_leaves_nothing() -> None:
    prompt = chain(5)
    index = index_of(w0=prompt, w1=prompt[:2])
    index.drop(0)
    assert (index.match(prompt).pages(0), index.match(prompt).pages(1), len(index)) == (0, 2, 2)
    index.drop(1)
    assert len(index) == 0
    assert not index._pages
    assert not index._limits


def test_no_worker_takes_more_memory_than_its_pool_has_pages() -> None:
    index = PrefixIndex()
    index.open(0, 3)
    index.store(0, chain(8))
    assert (len(index), index.match(chain(8)).pages(0)) == (3, 3)
    index.remove(0, chain(8)[2:3])
    index.store(0, chain(1, branch=1))
    assert index.match(chain(1, branch=1)).pages(0) == 1


@pytest.fixture
def feed() -> PrefixFeed:
    index = PrefixIndex()
    index.open(2, 1000)
    return PrefixFeed(index, 2)


def held(feed: PrefixFeed, digests: list[bytes]) -> int:
    return feed._index.match(digests).pages(2)


def test_batches_follow_each_other(feed: PrefixFeed) -> None:
    prompt = chain(4)
    feed.load(PrefixList(7, (run(prompt[:2]),)))
    feed.take(PrefixChanges(8, stored=(run(prompt[2:], prompt[1]),)))
    assert held(feed, prompt) == 4
    feed.take(PrefixChanges(9, removed=(prompt[3],)))
    feed.take(PrefixChanges(8, stored=(run(prompt[2:], prompt[1]),)))
    assert held(feed, prompt) == 3, "an old batch changes nothing"
    assert feed.in_step


def test_a_new_feed_and_a_gap_need_a_list(feed: PrefixFeed) -> None:
    prompt, other = chain(3), chain(2, branch=1)
    assert not feed.in_step
    feed.load(PrefixList(1, (run(prompt),)))
    feed.take(PrefixChanges(3, removed=(prompt[2],)))
    assert not feed.in_step
    feed.take(PrefixChanges(4, stored=(run(other),)))
    feed.load(PrefixList(3, (run(prompt[:1]),)))
    assert feed.in_step
    assert (held(feed, prompt), held(feed, other)) == (1, 2), "what came after the list counts, what is in it does not"


def test_a_list_that_is_older_than_the_gap_does_not_help(feed: PrefixFeed) -> None:
    feed.take(PrefixChanges(9))
    feed.load(PrefixList(5))
    assert not feed.in_step
    feed.load(PrefixList(9))
    assert feed.in_step


def test_what_waits_for_a_list_is_bounded(feed: PrefixFeed) -> None:
    for sequence in range(1, 5000):
        feed.take(PrefixChanges(sequence))
    assert len(feed._kept) == 1024
    feed.load(PrefixList(10))
    assert not feed.in_step


def test_a_broken_stream_forgets(feed: PrefixFeed) -> None:
    feed.load(PrefixList(1, (run(chain(3)),)))
    feed.lose()
    assert (held(feed, chain(3)), feed.in_step) == (0, False)


def test_a_feed_names_the_tiers_of_pages(feed: PrefixFeed) -> None:
    prompt, index = chain(6), feed._index
    feed.load(PrefixList(1, (run(prompt[:2]),), (TierPages(KvTier.DISK, tuple(prompt[2:])),)))
    assert index.reloads(2, prompt, 2) == [(6, {KvTier.DISK: 4})]
    feed.take(PrefixChanges(2, (run(prompt[2:3], prompt[1]),), (prompt[5],), (TierPages(KvTier.HOST, (prompt[1],)),)))
    assert held(feed, prompt) == 1
    assert index.reloads(2, prompt, 1) == [(5, {KvTier.HOST: 1, KvTier.DISK: 2}), (3, {KvTier.HOST: 1})]
    feed.lose()
    assert len(index) == 0
