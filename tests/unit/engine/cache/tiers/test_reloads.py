"""Pages that are saved and loaded while others compute, evict and read: the index names the right pages, always."""

import random

import pytest

from tandem.engine.cache.page_key import PageKey
from tandem.engine.cache.pending_saves import PendingSaves
from tandem.engine.cache.prefix_cache import Prefix
from tandem.protocol.errors import ResourceExhausted
from tandem.protocol.kv_pages import FREED, STATE
from tandem.protocol.prefixes import KvTier, TierPages
from tests.soak import seeds
from tests.unit.engine.cache.test_prefix_windows import PAGE, PROMPT, WINDOWS, Desk, ref


class Reloads(Desk):
    """Reloads in which every page is in a tier. With a single group, the contents of all indexed pages are checked."""

    def __init__(self, pages: int, windows: tuple[int | None, ...]) -> None:
        super().__init__(pages, windows)
        self.contents: dict[int, PageKey] = {}
        self.saves = PendingSaves(lambda: None)
        self.tiers: dict[PageKey, KvTier] = {}
        """The pages in tiers, for what routers are told."""
        self.cache.save_to(self.saves, self.tiers.get)
        self.loading: list[tuple[str, Prefix, list[int]]] = []
        self.told: dict[bytes, KvTier | None] = {}
        """The pages as a router knows them; None = on the device."""

    def begin(self, name: str, prompt: "list[int] | tuple[int, ...]" = tuple(PROMPT)) -> int:  # type: ignore[override]
        known = super().begin(name, prompt)
        prefix, pages = self.open[name]
        for page, digest in zip(pages, prefix.digests, strict=False):
            self.contents[page] = PageKey(digest, 0)
        return known

    def begin_reload(self, name: str, prompt: list[int]) -> None:
        prefix = self.cache.prefix(prompt, "")
        end, _ = self.cache.reusable(prefix, lambda _: True)
        assert end == prefix.readable
        whole = Prefix(prefix.root, prefix.digests[:end], end)
        try:
            pages = self.cache.begin_reload(ref(name), whole, end)
        except ResourceExhausted:
            return
        for entry, page in enumerate(pages):
            if page != FREED:
                self.contents[page] = PageKey(prefix.digests[entry // self.kv.groups], entry % self.kv.groups)
        self.loading.append((name, whole, pages))

    def complete_reload(self, failing: random.Random) -> None:
        name, prefix, pages = self.loading.pop(failing.randrange(len(self.loading)))
        entries = [entry for entry, page in enumerate(pages) if page != FREED]
        failed = failing.sample(entries, failing.choice((0, 0, min(2, len(entries)), len(entries))))
        self.cache.complete_reload(ref(name), prefix, pages, failed)

    def store(self, key: PageKey, tier: KvTier | None) -> None:
        """Put a page into a tier; None = take it out."""
        if tier is None:
            self.tiers.pop(key, None)
        else:
            self.tiers[key] = tier
        self.cache.tier_changed(key.digest)

    def listen(self) -> None:
        """Tell the router the newest changes."""
        if (changes := self.cache.changes()) is None:
            return
        for digest in changes.removed:
            self.told.pop(digest, None)
        self.told.update(dict.fromkeys((digest for run in changes.stored for digest in run.digests), None))
        self.told.update((digest, part.tier) for part in changes.tiers for digest in part.digests)

    def check_told(self) -> None:
        """A router knows the pages on the device, and of the others those that could be loaded, with their tiers."""
        truth: dict[bytes, KvTier | None] = dict.fromkeys(self.cache._nodes)
        for digest in {key.digest for key in self.tiers} - truth.keys():
            if (tier := self.tiers.get(PageKey(digest, 0))) is not None:
                truth[digest] = tier
        assert self.told == truth
        known = self.cache.known()
        assert self.told == {
            **dict.fromkeys((digest for run in known.stored for digest in run.digests), None),
            **{digest: part.tier for part in known.tiers for digest in part.digests},
        }

    def check(self) -> None:
        self.cache.check_integrity()
        if self.kv.groups == 1:
            for digest, node in self.cache._nodes.items():
                assert self.contents[node.pages[0]] == PageKey(digest, 0)


@pytest.mark.parametrize("windows", [(None,), WINDOWS], ids=["full", "windows"])
@seeds(50)
def test_reloads_between_prompts_and_evictions(windows: tuple[int | None, ...], seed: int) -> None:
    rng, desk = random.Random(seed), Reloads(40 * len(windows), windows)
    prompts = [
        [*range(1, 1 + shared), *[50 + number] * rng.randrange(1, 20)] for number in range(8) for shared in (0, 9)
    ]
    for step in range(300):
        prompt, action = rng.choice(prompts), rng.randrange(7)
        try:
            if action == 0:
                desk.begin(f"{step}", prompt)
            elif action == 1 and desk.open:
                desk.end(rng.choice(list(desk.open)))
            elif action == 2:
                desk.begin_reload(f"{step}", prompt)
            elif action == 3 and desk.loading:
                desk.complete_reload(rng)
            elif action == 4:
                desk.evict(rng.randrange(desk.pool.counts().cached + 1))
            elif action == 5:
                digests = desk.cache.prefix(prompt, "").digests
                key = PageKey(rng.choice(digests), rng.randrange(len(windows)))
                desk.store(key, rng.choice((None, *KvTier)))
            elif action == 6:
                desk.listen()
                desk.check_told()
        except ResourceExhausted:
            if desk.open:
                desk.end(rng.choice(list(desk.open)))
        desk.check()
    while desk.loading:
        desk.complete_reload(rng)
    for name in list(desk.open):
        desk.end(name)
    desk.check()
    counts = desk.pool.counts()
    assert counts.free + counts.cached == counts.total


@pytest.mark.parametrize("windows", [(None,), WINDOWS], ids=["full", "windows"])
@pytest.mark.parametrize("failing", [None, 3])
def test_what_was_loaded_is_found(windows: tuple[int | None, ...], failing: int | None) -> None:
    desk = Reloads(60, windows)
    prefix = desk.cache.prefix(PROMPT, "")
    end, missing = desk.cache.reusable(prefix, lambda _: True)
    assert end == 8
    assert len(missing) == (8 if windows == (None,) else 8 + 2 + 1)
    assert desk.cache.reusable(prefix, lambda key: prefix.digests.index(key.digest) < 5)[0] == 5
    pages = desk.cache.begin_reload(ref("r"), whole := Prefix(prefix.root, prefix.digests[:end], end), end)
    assert desk.pool.counts().owned == len(missing)
    assert desk.cache.hit(prefix) == 0, "nobody finds a page before it is loaded"
    failed = [] if failing is None else [failing * len(windows)]
    desk.cache.complete_reload(ref("r"), whole, pages, failed)
    desk.cache.check_integrity()
    # The pages in the windows of the fourth page were not loaded.
    assert desk.cache.hit(prefix) == (8 if failing is None else 3 if windows == (None,) else 0)
    assert desk.run("a", PROMPT) == (8 if failing is None else 3 if windows == (None,) else 0)


def test_a_copy_of_a_page_that_was_evicted_meanwhile_does_not_count() -> None:
    woken: list[None] = []
    saves = PendingSaves(lambda: woken.append(None))
    first, second = PageKey(b"a", 0), PageKey(b"b", 0)
    saves.add(7, first)
    saves.add(7, first)
    saves.add(8, second)
    assert len(woken) == 1
    taken = saves.take(9)
    assert [(save.page, save.key) for save in taken] == [(7, first), (8, second)]
    # Page 7 gets other contents, is released again, and its new copy begins before the old one ends.
    saves.evicted(7)
    saves.add(7, second)
    (again,) = saves.take(1)
    assert not saves.finish(taken[0])
    assert saves.finish(taken[1])
    assert not saves.finish(taken[1])
    assert saves.finish(again)
    saves.add(9, first)
    saves.evicted(9)
    assert not saves.take(1)


def test_each_released_page_is_saved_once_it_has_no_reader() -> None:
    desk = Reloads(40, (None,))
    desk.begin("a")
    desk.begin("b")
    desk.end("a")
    assert not desk.saves.take(9)
    desk.end("b")
    digests = desk.cache.prefix(PROMPT, "").digests
    assert {save.key.digest for save in desk.saves.take(9)} == set(digests)


def test_a_reload_takes_no_reserved_page() -> None:
    desk = Reloads(12, (None,))
    desk.pool.reserve(6)
    prefix = desk.cache.prefix(PROMPT, "")
    with pytest.raises(ResourceExhausted):
        desk.cache.begin_reload(ref("r"), Prefix(prefix.root, prefix.digests, 8), 8)
    desk.check()
    assert desk.pool.counts().owned == 0
    assert PAGE * len(prefix.digests) < len(PROMPT)


def test_a_model_with_states_reports_the_tiers_of_its_states() -> None:
    desk = Reloads(60, (None, STATE))
    digests = desk.cache.prefix(PROMPT, "").digests
    desk.store(PageKey(digests[2], 0), KvTier.HOST)
    assert desk.cache.changes() is None, "without its state, no request could reuse it"
    desk.store(PageKey(digests[2], 1), KvTier.DISK)
    changes = desk.cache.changes()
    assert changes is not None
    assert changes.tiers == (TierPages(KvTier.DISK, (digests[2],)),)
    desk.store(PageKey(digests[2], 1), None)
    changes = desk.cache.changes()
    assert changes is not None
    assert (changes.removed, changes.tiers) == ((digests[2],), ())


def test_a_prompt_that_reads_loaded_pages_says_so_once() -> None:
    desk = Reloads(60, (None,))
    prefix = desk.cache.prefix(PROMPT, "")
    desk.begin_reload("r", PROMPT)
    _, whole, pages = desk.loading.pop()
    desk.cache.complete_reload(ref("r"), whole, pages, [])
    loaded = desk.cache.hit(prefix)
    for expected in (loaded, 0):
        reader = desk.cache.prefix(PROMPT, "")
        desk.cache.reserve(reader, loaded, len(PROMPT))
        assert desk.cache.take_reloaded(reader) == expected
        desk.cache.release(reader)
