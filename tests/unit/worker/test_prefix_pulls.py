"""Prefixes that one worker pulls from another: the answers stay right, whatever happens to the pages on the way."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.protocol.errors import NotFound, StaleEpoch
from tandem.protocol.kv_pages import STATE
from tandem.protocol.messages import (
    Assignment,
    Destination,
    Lease,
    PrefillTask,
    PrefixPull,
    PrefixSource,
    RequestRef,
    Role,
    SamplingParams,
    TierLoad,
)
from tests.fake_engine import PAGE_TOKENS, FakeEngine, answer_to
from tests.worker_pair import End, RequestOutput, WorkerPair, tiny_engines, until

HYBRID = (None, 2 * PAGE_TOKENS, STATE)
PROMPT = list(range(11, 11 + 8 * PAGE_TOKENS + 2))
ONE = SamplingParams(max_tokens=1)


@pytest.fixture(autouse=True)
def _pull_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pull is chosen whenever it is possible, and may take as long as it needs."""
    monkeypatch.setattr(
        "tandem.cost_model.prefix_reload.saved_seconds", lambda _cost, _context, tokens, *_: float(tokens)
    )


async def ask(pair: WorkerPair, name: str, prompt: Sequence[int], max_tokens: int = 6) -> RequestOutput:
    sampling = SamplingParams(max_tokens=max_tokens)
    output = pair.send(name, list(prompt), sampling)
    await until(lambda: output.finish)
    assert output.tokens == answer_to(list(prompt), sampling)
    return output


def source_of(end: End, tokens: int) -> PrefixSource:
    return PrefixSource(end.me, end.address, tokens)


def pulling(pair: WorkerPair, prompt: Sequence[int], source: End, name: str = "pulls") -> PrefillTask:
    """Return the task of a prompt whose prefix the worker `source` has, but for the last token."""
    task = pair.task(name, list(prompt), ONE, None)
    return replace(task, source=source_of(source, len(prompt)))


async def forget(end: End) -> None:
    """Remove all pages from the prefix cache of a worker."""
    await end.empty()
    pool, owner = end.engine.pool, RequestRef("evicts", 1)
    pool.free(owner, pool.allocate(owner, pool.total))
    memory = end.engine.memory if isinstance(end.engine, FakeEngine) else end.engine.cache.storage
    memory[:] = 0


def reported(end: End) -> TierLoad:
    pulls = end.worker.report.load().pulls
    assert pulls is not None
    return pulls


def counts(end: End) -> tuple[int, int, int]:
    """Return the numbers of pages that arrived and that were corrupt, and of pulls that failed."""
    pulled = end.worker.admission.pull_counts
    return pulled.loaded_pages, pulled.corrupt_pages, pulled.failures


@pytest.mark.parametrize("windows", [(None,), HYBRID], ids=["full", "hybrid"])
async def test_a_prefill_worker_pulls_an_answer_from_the_decode_worker(
    windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefill worker has cached the first prompt, and the decode worker the answer to it as well."""
    monkeypatch.setattr(FakeEngine, "windows", windows)
    async with WorkerPair() as pair:
        first = await ask(pair, "first", PROMPT, 4 * PAGE_TOKENS)
        await pair.empty()
        prompt = [*PROMPT, *first.tokens, 5, 6, 7]
        await pair.prefill.worker.reload(pulling(pair, prompt, pair.decode))
        again = await ask(pair, "again", prompt)
        # The KV of the answer's last token is never computed.
        known = (len(PROMPT) + len(first.tokens) - 1) // PAGE_TOKENS
        assert again.cached_tokens == known * PAGE_TOKENS
        # In groups with a window, the last pages suffice.
        assert counts(pair.prefill) == (known - 8 + (3 if len(windows) > 1 else 0), 0, 0)
        assert reported(pair.prefill).page_s
        await pair.empty()
        pair.prefill.worker._cache.check_integrity()


async def test_pages_are_pulled_once_for_concurrent_requests() -> None:
    async with WorkerPair() as pair:
        await ask(pair, "first", PROMPT)
        await forget(pair.prefill)
        pair.fabric.hold()
        loads = [
            asyncio.create_task(pair.prefill.worker.reload(pulling(pair, PROMPT, pair.decode, name)))
            for name in ("a", "b", "c")
        ]
        await until(lambda: pair.fabric.writes)
        assert reported(pair.prefill).queued_pages == 8
        pair.fabric.release()
        await asyncio.gather(*loads)
        assert counts(pair.prefill) == (8, 0, 0)
        assert (await ask(pair, "again", PROMPT)).cached_tokens == 8 * PAGE_TOKENS
        await pair.empty()


async def test_only_what_the_source_still_has_is_pulled() -> None:
    """The source has four of the eight pages, then none."""
    async with WorkerPair() as pair:
        await ask(pair, "first", PROMPT[: 4 * PAGE_TOKENS + 1])
        await forget(pair.prefill)
        await pair.prefill.worker.reload(pulling(pair, PROMPT, pair.decode))
        assert counts(pair.prefill) == (4, 0, 0)
        assert (await ask(pair, "again", PROMPT)).cached_tokens == 4 * PAGE_TOKENS
        for end in (pair.decode, pair.prefill):
            await forget(end)
        await pair.prefill.worker.reload(pulling(pair, PROMPT, pair.decode))
        assert counts(pair.prefill) == (4, 0, 1)
        assert (await ask(pair, "once more", PROMPT)).cached_tokens == 0
        # Nothing was measured: the router's knowledge was out of date.
        assert math.isfinite(reported(pair.prefill).page_s)
        await pair.empty()


async def test_wrong_bytes_are_found_and_computed() -> None:
    async with WorkerPair() as pair:
        await ask(pair, "first", PROMPT)
        await forget(pair.prefill)
        memory = pair.prefill.engine.memory

        def flip(pages: Sequence[int]) -> None:
            memory.view("uint8")[pages[3]].reshape(-1)[0] ^= 1

        pair.fabric.damage_next(flip)
        await pair.prefill.worker.reload(pulling(pair, PROMPT, pair.decode))
        assert counts(pair.prefill) == (0, 8, 0)
        assert (await ask(pair, "again", PROMPT)).cached_tokens == 0
        await pair.empty()


async def test_pages_of_a_pull_that_is_stopped_are_quarantined() -> None:
    """The router has cancelled its call; the pages are free once the source has written them."""
    async with WorkerPair() as pair:
        await ask(pair, "first", PROMPT)
        await forget(pair.prefill)
        pair.fabric.hold()
        loading = asyncio.create_task(pair.prefill.worker.reload(pulling(pair, PROMPT, pair.decode)))
        await until(lambda: pair.fabric.writes)
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        assert pair.prefill.engine.pool.counts().quarantined == 8
        pair.fabric.release()
        await pair.empty()
        assert counts(pair.prefill) == (0, 0, 1)


async def test_a_slow_pull_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.cost_model.prefix_reload.saved_seconds", lambda *arguments: 0.05 - arguments[-1])
    async with WorkerPair() as pair:
        await ask(pair, "first", PROMPT)
        await forget(pair.prefill)
        pair.fabric.hold()
        await pair.prefill.worker.reload(pulling(pair, PROMPT, pair.decode))
        assert counts(pair.prefill) == (0, 0, 1)
        # The link is not used again for a while.
        assert reported(pair.prefill).page_s == math.inf
        await pair.prefill.worker.reload(pulling(pair, PROMPT, pair.decode))
        assert counts(pair.prefill) == (0, 0, 1)
        pair.fabric.release()
        assert (await ask(pair, "again", PROMPT)).cached_tokens == 0
        await pair.empty()


@pytest.mark.parametrize("after_pages", [0, 3])
async def test_a_write_that_fails_ends_the_pull(after_pages: int) -> None:
    async with WorkerPair() as pair:
        await ask(pair, "first", PROMPT)
        await forget(pair.prefill)
        pair.fabric.fail_next(after_pages=after_pages)
        await pair.prefill.worker.reload(pulling(pair, PROMPT, pair.decode))
        assert counts(pair.prefill) == (0, 0, 1)
        assert (await ask(pair, "again", PROMPT)).cached_tokens == 0
        await pair.empty()


async def test_a_notice_that_is_lost_ends_the_pull() -> None:
    async with WorkerPair() as pair:
        await ask(pair, "first", PROMPT)
        await forget(pair.prefill)
        pair.fabric.drop_notices()
        await pair.prefill.worker.reload(pulling(pair, PROMPT, pair.decode))
        assert counts(pair.prefill) == (0, 0, 1)
        await pair.empty()


@pytest.mark.parametrize("known", [False, True], ids=["the connection fails", "the controller reports it"])
async def test_the_death_of_the_source_ends_the_pull(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async with WorkerPair() as pair:
        await ask(pair, "first", PROMPT)
        await forget(pair.prefill)
        source, task = pair.decode, pulling(pair, PROMPT, pair.decode)
        pair.fabric.hold()
        loading = asyncio.create_task(pair.prefill.worker.reload(task))
        await until(lambda: pair.fabric.writes)
        if known:
            pair.prefill.worker.peer_gone(source.me)
            await loading
            assert pair.prefill.engine.pool.counts().quarantined == 8
        pair.fabric.kill(source.me)
        await loading
        assert counts(pair.prefill) == (0, 0, 1)
        await until(lambda: not pair.prefill.left())
        pair.fabric.release()
        # The next request finds that no worker is there.
        await pair.replace_decode()
        await pair.prefill.worker.reload(task)
        assert (await ask(pair, "again", PROMPT)).cached_tokens == 0
        await pair.empty()


async def test_a_pool_without_room_pulls_nothing() -> None:
    async with WorkerPair(pages=20) as pair:
        await ask(pair, "first", PROMPT)
        await forget(pair.prefill)
        pool = pair.prefill.engine.pool
        pool.reserve(pool.total - 4)
        await pair.prefill.worker.reload(pulling(pair, PROMPT, pair.decode))
        assert counts(pair.prefill) == (0, 0, 1)
        pool.unreserve(pool.total - 4)
        await pair.empty()


async def test_the_source_loads_its_host_tier_first() -> None:
    async with WorkerPair(kv_host_bytes=1 << 16) as pair:
        puller, source = pair.decode, pair.prefill
        await ask(pair, "first", PROMPT)
        await pair.empty()
        tiers = source.worker.tiers
        assert tiers is not None
        await until(lambda: len(tiers.tiers[0]) == 8)
        for end in (puller, source):
            await forget(end)
        puller.worker.assume(puller.me, Assignment(Role.BOTH), 1.0)
        await puller.worker.reload(pulling(pair, PROMPT, source))
        assert counts(puller) == (8, 0, 0)
        assert tiers.tiers[0].counts.loaded_pages == 8
        await pair.empty()


async def test_a_role_flip_ends_no_pull() -> None:
    """The worker that pulls becomes a decode worker meanwhile: the pages are cached, and the request is rejected."""
    async with WorkerPair() as pair:
        await ask(pair, "first", PROMPT)
        await forget(pair.prefill)
        pair.fabric.hold()
        loading = asyncio.create_task(pair.prefill.worker.reload(pulling(pair, PROMPT, pair.decode)))
        await until(lambda: pair.fabric.writes)
        for end, role in ((pair.prefill, Role.DECODE), (pair.decode, Role.PREFILL)):
            end.worker.assume(end.me, Assignment(role), 1.0)
        pair.fabric.release()
        await loading
        assert counts(pair.prefill) == (8, 0, 0)
        await pair.empty()


async def test_nothing_is_pulled_if_computing_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.cost_model.prefix_reload.saved_seconds", lambda *_: -1.0)
    async with WorkerPair() as pair:
        await ask(pair, "first", PROMPT)
        await forget(pair.prefill)
        await pair.prefill.worker.reload(pulling(pair, PROMPT, pair.decode))
        assert counts(pair.prefill) == (0, 0, 0)


async def test_a_tenant_gets_no_pages_of_another() -> None:
    async with WorkerPair() as pair:
        await ask(pair, "first", PROMPT)
        await forget(pair.prefill)
        await pair.prefill.worker.reload(replace(pulling(pair, PROMPT, pair.decode), cache_salt="b"))
        assert counts(pair.prefill) == (0, 0, 1)
        await pair.empty()


async def test_requests_that_cannot_be_served_change_nothing() -> None:
    """A lease that no one has granted, and one for another worker."""
    async with WorkerPair() as pair:
        await ask(pair, "first", PROMPT)
        prefix = pair.decode.worker._cache.prefix(PROMPT, "")
        nowhere = Destination(pair.prefill.me, pair.prefill.address, Lease("kv-pull-9", 1, 999))
        assert await pair.decode.worker.send_prefix(PrefixPull(nowhere, tuple(prefix.digests), 0, 1.0)) == 8
        with pytest.raises(NotFound, match="compute its tokens"):
            await pair.decode.worker.send_prefix(PrefixPull(nowhere, tuple(prefix.digests), 8, 1.0))
        pull = pair.prefill.worker.admission.pull(prefix, pair.decode.me)
        with pytest.raises(StaleEpoch):
            pair.prefill.worker.admission.allocate_pages(pull.lease, 8, pair.prefill.me)
        pair.prefill.worker.admission.stop_pull(pull)
        assert pull.done.result() == 0
        await pair.empty()


@pytest.mark.parametrize("kind", ["llama3", "qwen3_next"])
async def test_a_real_model_answers_the_same_after_a_pull(kind: str, tmp_path: Path) -> None:
    """A model with 8-bit pages, and one with states."""
    codes = {"kv_cache_dtype": "int8"} if kind == "llama3" else {}
    prompt = [(7 * position + 3) % 157 for position in range(110)]
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    async with WorkerPair(make_engine=tiny_engines(tmp_path / "model", kind, **codes)) as pair:
        outputs = []
        for end in pair.ends:
            end.worker.assume(end.me, Assignment(Role.BOTH), 1.0)
        for name in ("first", "again"):
            output = pair.send(name, prompt, greedy)
            await until(lambda output=output: output.finish)
            assert not output.error, output.message
            outputs.append(output)
            if name == "first":
                # The prefill worker has the states of the prompt's pages.
                await pair.empty()
                pair.prefill, pair.decode = pair.decode, pair.prefill
                await forget(pair.prefill)
                await pair.prefill.worker.reload(pulling(pair, prompt, pair.decode))
        assert outputs[1].cached_tokens == 109 // pair.prefill.engine.page_tokens * pair.prefill.engine.page_tokens
        assert outputs[1].tokens == outputs[0].tokens
        await pair.empty()
