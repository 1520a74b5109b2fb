"""Conversations whose KV does not fit into the page pool: tiers give pages back, and no answer changes."""

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kv_transfer.in_memory_fabric import InMemoryFabric
from tandem.cost_model.prefix_reload import reload_seconds
from tandem.engine.cache.prefix_cache import Prefix
from tandem.engine.cache.tiers.cache_tiers import CacheTiers, Reload
from tandem.engine.cache.tiers.host import HostTier
from tandem.engine.config import EngineConfig
from tandem.metrics import families as f
from tandem.protocol.errors import InvalidArgument, ResourceExhausted, RoleClosed, TandemError
from tandem.protocol.kv_pages import STATE, KvPages
from tandem.protocol.messages import (
    Assignment,
    PrefillTask,
    RequestRef,
    Reservation,
    Role,
    SamplingParams,
    TierLoad,
    WorkerLoad,
)
from tandem.protocol.page_digests import page_digests, root_digest
from tandem.protocol.prefixes import KvTier, PrefixRun
from tandem.worker.config import WorkerConfig
from tandem.worker.kv_tiers import make_tiers
from tandem.worker.reporting.metrics import tier_facts
from tests.fake_engine import PAGE_TOKENS, FakeEngine, answer_to
from tests.soak import SOAKING
from tests.worker_pair import End, RequestOutput, WorkerPair, tiny_engines, until

PAGE_BYTES = PAGE_TOKENS * 2 * 4
HYBRID = (None, 2 * PAGE_TOKENS, STATE)
CONVERSATIONS, TURNS = (500, 6) if SOAKING else (6, 4)
FLIP_EVERY = 10
"""Turns of all conversations between two flipped bytes in each tier."""


@pytest.fixture(autouse=True)
def _reload_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reload is chosen whenever it is possible, so that timing decides nothing."""
    monkeypatch.setattr(
        "tandem.cost_model.prefix_reload.saved_seconds", lambda _cost, _context, tokens, *_: float(tokens)
    )


def tiers_of(end: End) -> CacheTiers:
    tiers = end.worker.tiers
    assert tiers is not None
    return tiers


async def saved(end: End) -> None:
    """Wait until no page is in use and all cached pages have been saved."""
    await end.empty()
    tiers = tiers_of(end)
    await until(lambda: not tiers._saves._waiting and not tiers._saves._copying)
    # A reload begins after the batch of saves that is being written.
    barrier = Reload(Prefix(b""), 0, {})
    tiers.begin(barrier, 0.0)
    await until(barrier.done.done)


async def ask(pair: WorkerPair, name: str, prompt: Sequence[int], max_tokens: int = 6, salt: str = "") -> RequestOutput:
    """Send a request as the router does, over gRPC's entry points, and wait for its answer."""
    sampling = SamplingParams(max_tokens=max_tokens)
    task = pair.task(name, list(prompt), replace(sampling, max_tokens=1), None)
    while True:
        try:
            await pair.decode.worker.reload(pair.reservation(name, list(prompt), sampling))
            if pair.prefill is not pair.decode:
                await pair.prefill.worker.reload(task)
            output = pair.send(name, list(prompt), sampling, salt=salt)
            break
        except ResourceExhausted:
            await asyncio.sleep(0.001)
    stays = pair.prefill is pair.decode
    await until(lambda: output.finish and (stays or output.pages))
    assert output.tokens == answer_to(list(prompt), sampling), name
    return output


def flip_a_byte(tiers: CacheTiers, rng: random.Random) -> None:
    """Flip a byte of a random page in each tier, unless the tier changes meanwhile."""
    for tier in tiers.tiers:
        try:
            location = rng.choice(list(tier._pages.values()))
        except (IndexError, RuntimeError):
            continue
        if isinstance(tier, HostTier):
            tier._memory[location[0], 0] ^= 1
            continue
        with contextlib.suppress(FileNotFoundError):
            damaged = bytearray(location.read_bytes())
            damaged[0] ^= 1
            location.write_bytes(damaged)


async def converse(pair: WorkerPair, rng: random.Random, conversations: int, turns: int) -> int:
    """Run all turns of all conversations, a few at a time in random order; return the number of cached tokens.

    After every `FLIP_EVERY`th turn, a byte is flipped in each tier.
    """
    chats = [[3 + number % 900, *rng.choices(range(3, 900), k=10)] for number in range(conversations)]
    order = [number for number in range(conversations) for _ in range(turns)]
    rng.shuffle(order)
    cached, busy = 0, [asyncio.Lock() for _ in chats]

    async def turn(place: int, number: int) -> None:
        nonlocal cached
        async with busy[number]:
            output = await ask(pair, f"{number}/{place}", chats[number])
            cached += output.cached_tokens
            if place % FLIP_EVERY == 0:
                flip_a_byte(tiers_of(pair.prefill), rng)
            chats[number] += [*output.tokens, *rng.choices(range(3, 900), k=3)]

    running = asyncio.Semaphore(2)

    async def limited(place: int, number: int) -> None:
        async with running:
            await turn(place, number)

    await asyncio.gather(*(limited(place, number) for place, number in enumerate(order)))
    await pair.empty()
    return cached


def working_set(windows: tuple[int | None, ...], conversations: int, turns: int) -> int:
    """Return the pages of all conversations at their ends, in all groups."""
    tokens = 11 + turns * 9
    return conversations * KvPages(PAGE_TOKENS, windows, 16).held(tokens)


@pytest.mark.parametrize("windows", [(None,), HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("both", [True, False], ids=["both", "pair"])
@pytest.mark.timeout(7200 if SOAKING else 300)
@pytest.mark.parametrize("share", [1.1, 2.0, 10.0])
async def test_conversations_answer_as_without_tiers(
    windows: tuple[int | None, ...], both: bool, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEngine, "windows", windows)
    rng = random.Random(f"{windows}{both}{share}")
    needed = working_set(windows, CONVERSATIONS, TURNS)
    longest = KvPages(PAGE_TOKENS, windows, 16).held(11 + TURNS * 9 + 8)
    pages = max(int(needed / share), 2 * longest + 4)
    changes: dict[str, Any] = {
        "kv_host_bytes": needed // 3 * PAGE_BYTES,
        "kv_disk_bytes": 2 * needed * (PAGE_BYTES + 28),
        "kv_disk_path": tmp_path,
    }
    async with WorkerPair(both=both, pages=pages, **changes) as pair:
        cached = await converse(pair, rng, CONVERSATIONS, TURNS)
        tiers = tiers_of(pair.prefill)
        assert cached > 0
        assert sum(tier.counts.failures for tier in tiers.tiers) == 0
        # In a few conversations it is not certain that a damaged page is loaded before it is evicted.
        assert not SOAKING or sum(tier.counts.corrupt_pages for tier in tiers.tiers) > 0


async def evict(end: End) -> None:
    """Evict all pages from the pool, once they have been saved."""
    await saved(end)
    pool, owner = end.engine.pool, RequestRef("evicts", 1)
    pool.free(owner, pool.allocate(owner, pool.total))
    if isinstance(end.engine, FakeEngine):
        end.engine.memory[:] = 0
    else:
        end.engine.cache.storage.zero_()
    assert not len(end.worker._cache)


@pytest.mark.parametrize("windows", [(None,), HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("host_pages", [0, 8, 1000])
async def test_an_evicted_prefix_comes_back(
    host_pages: int, windows: tuple[int | None, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With too few pages in host memory, or none, it comes back from the disk."""
    monkeypatch.setattr(FakeEngine, "windows", windows)
    disk: dict[str, Any] = {"kv_disk_bytes": 1 << 20, "kv_disk_path": tmp_path} if host_pages < 1000 else {}
    async with WorkerPair(both=True, pages=60, kv_host_bytes=host_pages * PAGE_BYTES, **disk) as pair:
        prompt = list(range(11, 11 + 12 * PAGE_TOKENS + 2))
        last = tiers_of(pair.decode).tiers[-1]
        await ask(pair, "first", prompt)
        await evict(pair.decode)
        again = await ask(pair, "again", prompt)
        assert again.cached_tokens == 12 * PAGE_TOKENS
        # In a group with a window, the last pages suffice.
        needed = 12 if len(windows) == 1 else 12 + 2 + 1
        facts = tier_facts(tiers_of(pair.decode), pair.decode.worker.admission.pull_counts)
        loaded = facts[f.TIER_PAGES]
        assert isinstance(loaded, dict)
        assert sum(pages for (_, event), pages in loaded.items() if event == "loaded") == needed
        assert last.counts.loaded_pages
        await pair.empty()


@pytest.mark.parametrize("windows", [(None,), HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("tier", ["host", "disk"])
async def test_a_flipped_byte_is_found_and_computed_again(
    tier: str, windows: tuple[int | None, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEngine, "windows", windows)
    changes: dict[str, Any] = (
        {"kv_host_bytes": 1 << 16} if tier == "host" else {"kv_disk_bytes": 1 << 20, "kv_disk_path": tmp_path}
    )
    async with WorkerPair(both=True, pages=60, **changes) as pair:
        prompt = list(range(11, 11 + 8 * PAGE_TOKENS + 2))
        await ask(pair, "first", prompt)
        await saved(pair.decode)
        used = tiers_of(pair.decode).tiers[0]
        cache = pair.decode.worker._cache
        digest = cache.prefix(prompt, "").digests[7]
        group = len(windows) - 1
        location = next(place for key, place in used._pages.items() if key == (digest, group))
        if tier == "host":
            used._memory[location[0], 0] ^= 1  # type: ignore[attr-defined]
        else:
            damaged = bytearray(location.read_bytes())
            damaged[0] ^= 1
            location.write_bytes(damaged)
        await evict(pair.decode)
        again = await ask(pair, "again", prompt)
        assert used.counts.corrupt_pages == 1
        assert again.cached_tokens == (7 * PAGE_TOKENS if group == 0 else 0)
        await pair.empty()


@pytest.mark.parametrize("host_bytes", [0, 1 << 16])
async def test_a_restarted_worker_uses_its_files(host_bytes: int, tmp_path: Path) -> None:
    prompt = list(range(11, 11 + 8 * PAGE_TOKENS + 2))
    settings: dict[str, Any] = {"kv_host_bytes": host_bytes, "kv_disk_bytes": 1 << 20, "kv_disk_path": tmp_path}
    async with WorkerPair(both=True, **settings) as pair:
        await ask(pair, "first", prompt)
        await saved(pair.decode)
        await until(lambda: len(tiers_of(pair.decode).tiers[-1]) == 9)
    async with WorkerPair(both=True, **settings) as pair:
        await until(tiers_of(pair.decode).opened.is_set)
        assert (await ask(pair, "again", prompt)).cached_tokens == 8 * PAGE_TOKENS


async def test_two_clusters_with_one_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The second one has its host memory only, and passes no page on to the folder."""
    prompt = list(range(11, 11 + 8 * PAGE_TOKENS + 2))
    settings: dict[str, Any] = {"kv_host_bytes": 4 * PAGE_BYTES, "kv_disk_bytes": 1 << 20, "kv_disk_path": tmp_path}
    async with WorkerPair(both=True, **settings) as first, WorkerPair(both=True, **settings) as second:
        await until(tiers_of(first.decode).opened.is_set)
        await until(tiers_of(second.decode).opened.is_set)
        both = sorted((tiers_of(first.decode), tiers_of(second.decode)), key=lambda tiers: len(tiers.tiers))
        assert [[tier.name for tier in tiers.tiers] for tiers in both] == [["host"], ["host", "disk"]]
        assert "the disk tier of the prefix cache is not used: another process uses" in caplog.text
        for pair in (first, second):
            await ask(pair, "first", prompt)
            await saved(pair.decode)
        await until(lambda: len(both[1].tiers[1]) == 9)
        assert [tiers.tiers[0].counts.evicted_pages for tiers in both] == [5, 5]
        assert both[0].tiers[0].next_tier is None


async def test_tenants_and_other_models_share_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = list(range(11, 11 + 8 * PAGE_TOKENS + 2))
    settings: dict[str, Any] = {"kv_disk_bytes": 1 << 20, "kv_disk_path": tmp_path}
    async with WorkerPair(both=True, **settings) as pair:
        await ask(pair, "first", prompt, salt="a")
        await saved(pair.decode)
        assert (await ask(pair, "other tenant", prompt, salt="b")).cached_tokens == 0
    monkeypatch.setattr(FakeEngine, "compatibility_facts", lambda _: (("model", "another"),))
    async with WorkerPair(both=True, **settings) as pair:
        await until(tiers_of(pair.decode).opened.is_set)
        assert not len(tiers_of(pair.decode).tiers[0])
    monkeypatch.undo()
    monkeypatch.setattr("tandem.worker.kv_tiers.weight_file_facts", lambda _: (("model.safetensors", "tuned"),))
    async with WorkerPair(both=True, **settings) as pair:
        await until(tiers_of(pair.decode).opened.is_set)
        assert not len(tiers_of(pair.decode).tiers[0])


async def test_a_tier_that_hangs_delays_no_request_beyond_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = list(range(11, 11 + 8 * PAGE_TOKENS + 2))
    go = threading.Event()
    async with WorkerPair(both=True, pages=40, kv_host_bytes=1 << 16, rpc_timeout_s=0.05) as pair:
        await ask(pair, "first", prompt)
        await saved(pair.decode)
        await evict(pair.decode)
        tiers = tiers_of(pair.decode)
        read = tiers.tiers[0].read

        def hang(key: Any) -> Any:
            go.wait(60)
            return read(key)

        monkeypatch.setattr(tiers.tiers[0], "read", hang)
        assert (await ask(pair, "again", prompt)).cached_tokens < 8 * PAGE_TOKENS
        assert tiers.stalled
        await ask(pair, "and again", [7, *prompt])
        pair.decode.worker._cache.check_integrity()
        go.set()
        await until(lambda: tiers._current is None)
        await pair.empty()


async def test_a_prompt_that_waits_for_the_pages_of_a_reload_starts_when_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The request of the reload has been cancelled, so nothing else wakes the step loop."""
    prompt = list(range(11, 11 + 8 * PAGE_TOKENS + 2))
    go = threading.Event()
    async with WorkerPair(pages=200, prefill_pages=40, kv_host_bytes=1 << 16) as pair:
        await ask(pair, "first", prompt)
        await evict(pair.prefill)
        tier = tiers_of(pair.prefill).tiers[0]
        read = tier.read
        monkeypatch.setattr(tier, "read", lambda key: read(key) if go.wait(60) else None)
        task = pair.task("again", prompt, SamplingParams(max_tokens=1), None)
        reload = asyncio.create_task(pair.prefill.worker.reload(task))
        await until(lambda: pair.prefill.engine.pool.counts().owned == 8)
        reload.cancel()
        long = [500 + number for number in range(36 * PAGE_TOKENS)]
        output = pair.send("long", long, SamplingParams(max_tokens=2))
        await until(lambda: not pair.prefill.worker._loop._work.is_set())
        assert pair.prefill.worker._schedulers.prefill.queue.length == 1
        go.set()
        await until(lambda: output.finish and output.pages)
        assert output.tokens == answer_to(long, SamplingParams(max_tokens=2))
        await pair.empty()


async def test_a_prefix_that_is_being_loaded_is_paid_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = list(range(11, 11 + 8 * PAGE_TOKENS + 2))
    go = threading.Event()
    async with WorkerPair(both=True, pages=40, kv_host_bytes=1 << 16) as pair:
        await ask(pair, "first", prompt)
        await ask(pair, "longer", [*prompt, *range(500, 500 + 2 * PAGE_TOKENS)])
        await evict(pair.decode)
        tiers, cache = tiers_of(pair.decode), pair.decode.worker._cache
        tier = tiers.tiers[0]
        tiers._rates[tier.tier].add(tiers.clock(), tier.page_bytes, 1.0)
        read = tier.read
        monkeypatch.setattr(tier, "read", lambda key: read(key) if go.wait(60) else None)
        predicted = []
        for tokens in (prompt, prompt, [*prompt, *range(500, 500 + 2 * PAGE_TOKENS)]):
            reload = tiers.plan(cache.prefix(tokens, ""), 1)
            assert reload is not None
            predicted.append(reload_seconds(reload.pages, tiers.loads))
            tiers.begin(reload, 60.0)
        assert predicted == [8.0, 8.0, 10.0]
        go.set()
        await until(reload.done.done)
        assert tier.counts.loaded_pages == 10
        await pair.empty()


async def test_a_long_prompt_is_looked_up_beside_the_event_loop_and_without_the_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = list(range(11, 11 + 8 * PAGE_TOKENS + 2))
    go, looking = threading.Event(), threading.Event()
    async with WorkerPair(both=True, pages=40, kv_host_bytes=1 << 16) as pair:
        await ask(pair, "first", prompt)
        await evict(pair.decode)
        tier = type(tiers_of(pair.decode).tiers[0])
        contains = tier.__contains__

        def slow(tier: Any, key: Any) -> bool:
            looking.set()
            return go.wait(60) and contains(tier, key)

        monkeypatch.setattr(tier, "__contains__", slow)
        again = asyncio.create_task(ask(pair, "again", prompt))
        await until(looking.is_set)
        assert pair.decode.engine.pool.lock.acquire(timeout=60), "steps need the lock"
        pair.decode.engine.pool.lock.release()
        go.set()
        assert (await again).cached_tokens == 8 * PAGE_TOKENS
        await pair.empty()


async def test_pages_that_cannot_be_read_do_not_count_in_the_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = list(range(11, 11 + 8 * PAGE_TOKENS + 2))
    async with WorkerPair(both=True, pages=40, kv_disk_bytes=1 << 20, kv_disk_path=tmp_path) as pair:
        await ask(pair, "first", prompt)
        await evict(pair.decode)
        tiers = tiers_of(pair.decode)
        monkeypatch.setattr(tiers.tiers[0], "read", lambda _: None)
        await ask(pair, "again", prompt)
        assert tiers._rates[KvTier.DISK].seconds(1, tiers.clock()) == float("inf")


async def test_a_request_that_is_rejected_loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, sampling = list(range(11, 11 + 8 * PAGE_TOKENS + 2)), SamplingParams(max_tokens=6)
    async with WorkerPair(both=True, pages=40, kv_host_bytes=1 << 16, max_prefill_requests=1) as pair:
        await ask(pair, "first", prompt)
        await evict(pair.decode)
        worker = pair.decode.worker
        rejected: list[tuple[Reservation | PrefillTask, type[TandemError]]] = [
            (replace(pair.reservation("r", prompt, sampling), gap_target_s=0.0), InvalidArgument),
            (pair.reservation("r", prompt, SamplingParams(max_tokens=900)), InvalidArgument),
            (pair.task("r", prompt, sampling, None), InvalidArgument),
        ]
        pair.decode.engine.hold()
        running = pair.send("running", [5] * 20, SamplingParams(max_tokens=50))
        rejected.append((pair.reservation("r", prompt, sampling), ResourceExhausted))
        rejected.append((pair.task("r", prompt, replace(sampling, max_tokens=1), None), ResourceExhausted))
        for work, error in rejected:
            with pytest.raises(error):
                await worker.reload(work)
        worker._schedulers.close("drains")
        alone = pair.task("r", prompt, replace(sampling, max_tokens=1), None)
        for work in (pair.reservation("r", prompt, sampling), alone):
            with pytest.raises(RoleClosed):
                await worker.reload(work)
        assert tiers_of(pair.decode).tiers[0].counts.loaded_pages == 0
        pair.decode.engine.resume()
        await until(lambda: running.finish)


async def test_no_tier_is_used_if_computing_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.cost_model.prefix_reload.saved_seconds", lambda *_: -1.0)
    prompt = list(range(11, 11 + 8 * PAGE_TOKENS + 2))
    async with WorkerPair(both=True, pages=40, kv_host_bytes=1 << 16) as pair:
        await ask(pair, "first", prompt)
        await saved(pair.decode)
        await evict(pair.decode)
        await ask(pair, "again", prompt)
        assert tiers_of(pair.decode).tiers[0].counts.loaded_pages == 0


async def test_a_slow_tier_is_left_out_where_a_fast_one_pays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tandem.cost_model.prefix_reload.saved_seconds",
        lambda _cost, _context, tokens, _chunk, reload_s: tokens - reload_s,
    )
    prompt = list(range(11, 11 + 12 * PAGE_TOKENS + 2))
    disk: dict[str, Any] = {"kv_disk_bytes": 1 << 20, "kv_disk_path": tmp_path}
    async with WorkerPair(both=True, pages=60, kv_host_bytes=8 * PAGE_BYTES, **disk) as pair:
        await ask(pair, "first", prompt)
        await evict(pair.decode)
        tiers = tiers_of(pair.decode)
        tiers._rates[KvTier.DISK].add(tiers.clock(), 1, 1e6)
        # Host memory has the pages that were released last: the first ones.
        assert (await ask(pair, "again", prompt)).cached_tokens == 8 * PAGE_TOKENS
        assert [tier.counts.loaded_pages for tier in tiers.tiers] == [8, 0]


async def test_a_decode_worker_saves_nothing() -> None:
    prompt = list(range(11, 11 + 8 * PAGE_TOKENS + 2))
    async with WorkerPair(kv_host_bytes=1 << 16) as pair:
        await ask(pair, "first", prompt)
        await pair.empty()
        await saved(pair.prefill)
        assert len(tiers_of(pair.prefill).tiers[0]) == 8
        assert pair.decode.worker.tiers is None
        # As a worker of both roles, it computes prompts.
        pair.decode.worker.assume(pair.decode.me, Assignment(Role.BOTH), 1.0)
        assert tiers_of(pair.decode)._thread.is_alive()


async def test_a_decode_worker_needs_no_room_for_tiers(caplog: pytest.LogCaptureFixture) -> None:
    """If there is none when its role changes, it computes prompts without tiers."""
    settings = {"kv_host_bytes": 1 << 50}
    with pytest.raises(InvalidArgument, match="do not fit into"):
        End("both-0", Role.BOTH, InMemoryFabric(), 40, dict(settings))
    end = End("decode-0", Role.DECODE, InMemoryFabric(), 40, dict(settings))
    await end.start()
    end.worker.assume(end.me, Assignment(Role.BOTH), 1.0)
    assert end.worker.tiers is None
    assert "decode-0 has no tiers of the prefix cache: kv_host_bytes: " in caplog.text
    await end.stop()


def test_workers_whose_ranks_divide_tokens_refuse_tiers() -> None:
    engine = replace(EngineConfig.of(Path("fake")), context_parallel_size=2)
    config = WorkerConfig("w", Role.PREFILL, engine, kv_host_bytes=1 << 20)
    check: Callable[..., object] = make_tiers
    with pytest.raises(InvalidArgument, match="kv_host_bytes: is not for workers whose ranks divide tokens"):
        check(config, None, None)


@pytest.mark.parametrize("kind", ["llama3", "qwen3_next"])
async def test_a_real_model_answers_the_same_after_a_reload(kind: str, tmp_path: Path) -> None:
    """A model with 8-bit pages, and one with states: their pages move as they are."""
    codes = {"kv_cache_dtype": "int8"} if kind == "llama3" else {}
    prompt = [(7 * position + 3) % 157 for position in range(110)]
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    settings: dict[str, Any] = {"kv_host_bytes": 1 << 19, "kv_disk_bytes": 4 << 20, "kv_disk_path": tmp_path / "kv"}
    async with WorkerPair(make_engine=tiny_engines(tmp_path / "model", kind, **codes), both=True, **settings) as pair:
        end, outputs = pair.decode, []
        for name in ("first", "again"):
            await end.worker.reload(pair.reservation(name, prompt, greedy))
            output = pair.send(name, prompt, greedy)
            await until(lambda output=output: output.finish)
            assert not output.error, output.message
            outputs.append(output)
            await evict(end)
        first, again = outputs
        assert (first.cached_tokens, again.cached_tokens) == (0, 109 // end.engine.page_tokens * end.engine.page_tokens)
        assert again.tokens == first.tokens


# ---- what routers hear of it ----


async def test_a_router_knows_where_pages_are_and_what_loading_takes() -> None:
    prompt = list(range(11, 11 + 8 * PAGE_TOKENS + 2))
    digests = set(page_digests(prompt, PAGE_TOKENS, root_digest("")))
    async with WorkerPair(both=True, pages=40, kv_host_bytes=1 << 16) as pair:
        stream = pair.decode.worker.attach("indexer", prefixes=True)
        places: dict[bytes, KvTier | None] = {}
        loads: list[WorkerLoad] = []

        async def read() -> None:
            async for step in stream.messages():
                loads.append(step.load)
                for changes in step.prefixes:
                    for digest in changes.removed:
                        del places[digest]
                    places.update(dict.fromkeys((d for run in changes.stored for d in run.digests), None))
                    places.update((d, part.tier) for part in changes.tiers for d in part.digests)

        reader = asyncio.create_task(read())
        assert (await ask(pair, "first", prompt)).reloaded_tokens == 0
        await until(lambda: places.keys() >= digests)
        assert {places[digest] for digest in digests} == {None}
        await evict(pair.decode)
        pair.decode.worker._tiers_changed()
        await until(lambda: {places.get(digest) for digest in digests} == {KvTier.HOST})
        assert loads[-1].tiers == (TierLoad(KvTier.HOST),)
        again = await ask(pair, "again", prompt)
        assert (again.cached_tokens, again.reloaded_tokens) == (8 * PAGE_TOKENS, 8 * PAGE_TOKENS)
        await until(lambda: {places.get(digest) for digest in digests} == {None})
        await until(lambda: loads[-1].tiers and loads[-1].tiers[0].page_s > 0)
        third = await ask(pair, "third", prompt)
        assert (third.cached_tokens, third.reloaded_tokens) == (8 * PAGE_TOKENS, 0)
        await pair.empty()
        pair.decode.worker.detach(stream)
        await reader


async def test_pages_of_an_earlier_process_are_reported_without_a_step(tmp_path: Path) -> None:
    prompt = list(range(11, 11 + 8 * PAGE_TOKENS + 2))
    settings: dict[str, Any] = {"kv_disk_bytes": 1 << 20, "kv_disk_path": tmp_path}
    async with WorkerPair(both=True, pages=40, **settings) as pair:
        await ask(pair, "first", prompt)
        await saved(pair.decode)
    async with WorkerPair(both=True, pages=40, **settings) as pair:
        known: set[bytes] = set()
        stream = pair.decode.worker.attach("indexer", prefixes=True)
        tiers = tiers_of(pair.decode)

        async def read() -> None:
            async for step in stream.messages():
                known.update(d for changes in step.prefixes for part in changes.tiers for d in part.digests)

        reader = asyncio.create_task(read())
        await until(tiers.opened.is_set)
        known.update(d for part in pair.decode.worker.report.known_prefixes().tiers for d in part.digests)
        await until(lambda: known >= set(page_digests(prompt, PAGE_TOKENS, root_digest(""))[:8]))
        pair.decode.worker.detach(stream)
        await reader


async def test_pages_are_read_ahead_before_the_prompt_is_sent() -> None:
    prompt = list(range(11, 11 + 8 * PAGE_TOKENS + 2))
    root = root_digest("")
    async with WorkerPair(both=True, pages=40, kv_host_bytes=1 << 16) as pair:
        await ask(pair, "first", prompt)
        await evict(pair.decode)
        tier = tiers_of(pair.decode).tiers[0]
        await pair.decode.worker.read_ahead(PrefixRun(root, tuple(page_digests(prompt, PAGE_TOKENS, root)[:6])))
        await until(lambda: tier.counts.loaded_pages == 6)
        again = await ask(pair, "again", prompt)
        assert (again.cached_tokens, again.reloaded_tokens) == (8 * PAGE_TOKENS, 8 * PAGE_TOKENS)
        assert tier.counts.loaded_pages == 8
        await pair.decode.worker.read_ahead(PrefixRun(root, tuple(page_digests([5] * 40, PAGE_TOKENS, root))))
        await pair.empty()
    async with WorkerPair(both=True, pages=40) as pair:
        await pair.decode.worker.read_ahead(PrefixRun(root, (b"unknown",)))
