"""Pages that a request left in both caches are neither computed nor sent for the next one.

Nothing else changes.
"""

import asyncio
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tandem.protocol.messages import FinishReason, SamplingParams, TransferNotice
from tandem.protocol.page_digests import page_digests, root_digest
from tandem.protocol.prefixes import PrefixChanges
from tests.fake_engine import PAGE_TOKENS, FakeEngine, answer_to, logprobs_of
from tests.worker_pair import End, RequestOutput, WorkerPair, until

PROMPT = list(range(11, 11 + 4 * PAGE_TOKENS + 2))
"""Four full pages and two tokens."""
FULL = 4
TEN = SamplingParams(max_tokens=10)


@pytest.fixture(autouse=True, params=[False, True], ids=["", "asynchronous"])
def _engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "asynchronous", request.param)


async def ask(
    pair: WorkerPair,
    name: str,
    prompt: Sequence[int] = PROMPT,
    sampling: SamplingParams = TEN,
    salt: str = "",
    **work: Any,
) -> RequestOutput:
    """Runs a request to its end, and waits until every page is free."""
    output = pair.send(name, list(prompt), sampling, salt=salt, **work)
    stays = sampling.max_tokens == 1 or pair.prefill is pair.decode
    await until(lambda: output.finish and (stays or output.pages))
    assert output.tokens == answer_to(list(prompt), sampling), name
    await pair.empty()
    return output


def computed(end: End, since: int = 0) -> int:
    """Tokens of the rows of all steps but decode steps of one token."""
    rows = [row for batch in end.engine.batches[since:] for row in batch.rows]
    return sum(len(row.token_ids) for row in rows if len(row.token_ids) > 1 or row.draw is None)


async def test_the_second_time_one_page_is_computed_and_sent() -> None:
    async with WorkerPair() as pair:
        first = await ask(pair, "first")
        assert (first.cached_tokens, first.pages) == (0, FULL + 1)
        steps = len(pair.prefill.engine.batches)
        second = await ask(pair, "second")
        assert (second.cached_tokens, second.pages) == (FULL * PAGE_TOKENS, 1)
        assert computed(pair.prefill, steps) == 2
        for end in pair.ends:
            state = end.worker.report.inspect()
            assert (state.prefix_query_tokens, state.prefix_hit_tokens) == (2 * len(PROMPT), FULL * PAGE_TOKENS)
            load = end.worker.report.load()
            assert (load.prefix_query_tokens, load.prefix_hit_tokens) == (2 * len(PROMPT), FULL * PAGE_TOKENS)
            assert load.pages_used == 0, "what nobody reads is as good as free"
            assert state.pages_cached >= FULL


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("length", [1, PAGE_TOKENS - 1, PAGE_TOKENS, PAGE_TOKENS + 1, 2 * PAGE_TOKENS, 17, 100])
async def test_every_length_twice(length: int, both: bool) -> None:
    async with WorkerPair(both=both) as pair:
        prompt = list(range(10, 10 + length))
        await ask(pair, "first", prompt)
        second = await ask(pair, "second", prompt)
        assert second.cached_tokens == (length - 1) // PAGE_TOKENS * PAGE_TOKENS


@pytest.mark.parametrize("both", [False, True])
async def test_a_conversation_finds_what_decode_has_generated(both: bool) -> None:
    async with WorkerPair(both=both, pages=128) as pair:
        history = list(PROMPT)
        sent = []
        for turn in range(4):
            output = await ask(pair, f"turn {turn}", history, SamplingParams(max_tokens=9))
            sent.append((output.cached_tokens, output.pages, len(history)))
            history += [*output.tokens, 700 + turn, 701, 702]
        for before, (cached, pages, length) in itertools.pairwise(sent):
            # All but the last token of the answer have their KV at the decode worker.
            stored = (before[2] + 8) // PAGE_TOKENS
            if both:
                assert cached == stored * PAGE_TOKENS
            else:
                assert cached == before[2] // PAGE_TOKENS * PAGE_TOKENS
                assert pages == -(-length // PAGE_TOKENS) - stored


async def test_conversations_hit_what_a_reference_says() -> None:
    """Nothing is ever taken away here, so each page is known that was ever full."""
    rng = random.Random(5)
    async with WorkerPair(pages=1500) as pair:
        known: tuple[set[tuple[int, ...]], ...] = (set(), set())
        systems = [[30 + n] * (6 + n) for n in range(3)]
        chats = [list(rng.choice(systems)) for _ in range(6)]
        for number in range(24):
            chat = rng.choice(chats)
            chat += [rng.randrange(3, 900) for _ in range(rng.randrange(1, 9))]
            before = [end.worker.report.inspect().prefix_hit_tokens for end in pair.ends]
            output = await ask(pair, f"q{number}", chat)
            for end, pages, hit in zip(pair.ends, known, before, strict=True):
                expected = 0
                while expected < len(chat) - PAGE_TOKENS and tuple(chat[: expected + PAGE_TOKENS]) in pages:
                    expected += PAGE_TOKENS
                assert end.worker.report.inspect().prefix_hit_tokens - hit == expected
            stored = [*chat, *output.tokens[:-1]]
            known[0].update(tuple(chat[:n]) for n in range(0, len(chat) + 1, PAGE_TOKENS))
            known[1].update(tuple(stored[:n]) for n in range(0, len(stored) + 1, PAGE_TOKENS))
            chat += output.tokens
        assert (
            pair.decode.worker.report.inspect().prefix_hit_tokens
            > pair.prefill.worker.report.inspect().prefix_hit_tokens
            > 300
        )


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize(
    "sampling",
    [
        replace(TEN, presence_penalty=1.0),
        replace(TEN, logprobs=2),
        replace(TEN, temperature=1.0, seed=7),
        replace(TEN, max_tokens=1),
    ],
    ids=["penalty", "logprobs", "seed", "one token"],
)
async def test_answers_are_the_same_with_and_without_the_cache(both: bool, sampling: SamplingParams) -> None:
    outputs = []
    for enabled in (False, True):
        async with WorkerPair(both=both, prefix_cache=enabled) as pair:
            for name in ("first", "second"):
                one = await ask(pair, name, PROMPT, sampling)
                outputs.append((one.tokens, one.logprobs, one.finish))
            assert bool(one.cached_tokens) == enabled or (both and sampling.max_tokens == 1)
            assert enabled or not pair.prefill.worker.report.inspect().pages_cached
    assert outputs.count(outputs[0]) == 4


async def test_many_at_once_that_begin_alike() -> None:
    async with WorkerPair(pages=120) as pair:
        asked = {f"q{n}": [*PROMPT[: 3 + 2 * (n % 9)], 800 + n % 4, *range(20, 20 + n % 5)] for n in range(60)}
        outputs = {}
        for n, (name, prompt) in enumerate(asked.items()):
            outputs[name] = pair.send(name, prompt, SamplingParams(1 + n % 7))
            if n % 9 == 0:
                await until(lambda: sum(not output.finish for output in outputs.values()) < 4)
        await until(lambda: all(output.finish for output in outputs.values()))
        for n, (name, prompt) in enumerate(asked.items()):
            assert outputs[name].tokens == answer_to(prompt, SamplingParams(1 + n % 7))
        assert pair.prefill.worker.report.inspect().prefix_hit_tokens > 0
        assert pair.decode.worker.report.inspect().prefix_hit_tokens > 0
        await pair.empty()


async def test_queued_prompts_reuse_pages_computed_for_earlier_ones() -> None:
    """While the first one's pages are still on their way."""
    async with WorkerPair(max_step_tokens=18, max_batch_requests=4) as pair:
        pair.fabric.hold()
        outputs = [pair.send(f"q{n}", PROMPT, TEN) for n in range(3)]
        await until(lambda: all(output.tokens for output in outputs))
        first, second, third = (output.cached_tokens for output in outputs)
        assert (first, third) == (0, FULL * PAGE_TOKENS)
        # An asynchronous engine's second step is planned before the first one is over, if its prompt is queued by then.
        assert second == third or (FakeEngine.asynchronous and second == 0)
        assert pair.prefill.engine.pool.counts().shared == FULL
        pair.fabric.release()
        await until(lambda: all(output.finish and output.pages for output in outputs))
        assert all(output.tokens == answer_to(PROMPT, TEN) for output in outputs)
        assert [output.pages for output in outputs] == [FULL + 1] * 3, "the decode worker promised before it had any"
        await pair.empty()


async def test_cached_pages_are_sent_while_the_rest_is_computed() -> None:
    async with WorkerPair() as pair:
        lease = None
        output = pair.outputs["alone"] = RequestOutput()
        one = SamplingParams(max_tokens=1)
        pair.prefill.worker.prefill(pair.task("alone", PROMPT, one, lease))
        await until(lambda: output.finish)  # now the prefill worker knows the prompt, the decode worker does not
        pair.prefill.engine.hold()
        second = pair.send("q", PROMPT, TEN)
        await until(pair.decode.engine.memory.any)
        assert not second.tokens
        pair.prefill.engine.resume()
        await until(lambda: second.finish and second.pages)
        assert second.tokens == answer_to(PROMPT, TEN)
        assert (second.cached_tokens, second.pages) == (FULL * PAGE_TOKENS, FULL + 1)
        await pair.empty()


async def test_the_decode_worker_alone_has_it() -> None:
    """The prefill worker computes the whole prompt and sends the last page."""
    async with WorkerPair() as pair:
        await ask(pair, "first")
        dead = pair.prefill
        pair.decode.worker.peer_gone(dead.me)
        fresh = End("prefill-1", dead.config.role, pair.fabric, 64, {})
        await fresh.start()
        pair.prefill = fresh
        pair.ends.append(fresh)
        pair.attach(fresh)
        output = await ask(pair, "second")
        assert (output.cached_tokens, output.pages) == (0, 1)


# ---- salts ----


@pytest.mark.parametrize("both", [False, True])
async def test_pages_computed_under_another_salt_are_not_reused(both: bool) -> None:
    async with WorkerPair(both=both) as pair:
        await ask(pair, "a", salt="alice")
        for name, salt, hit in (("b", "bob", 0), ("c", "", 0), ("d", "alice", FULL * PAGE_TOKENS)):
            output = await ask(pair, name, salt=salt)
            assert output.cached_tokens == hit
            assert both or output.pages == (1 if hit else FULL + 1)


async def test_a_prefill_task_of_another_salt_than_its_local_lease_fails() -> None:
    async with WorkerPair(both=True) as pair:
        await ask(pair, "first", salt="alice")
        output = pair.outputs["q"] = RequestOutput()
        reservation = replace(pair.reservation("q", PROMPT, TEN), cache_salt="alice")
        lease = pair.decode.worker.reserve(reservation).lease
        pair.prefill.worker.prefill(replace(pair.task("q", PROMPT, TEN, lease), cache_salt="bob"))
        await until(lambda: output.finish)
        assert output.error == "STALE_EPOCH"
        await pair.empty()


# ---- room ----


async def test_unread_cached_pages_never_refuse_a_request() -> None:
    async with WorkerPair(pages=12) as pair:
        for n in range(8):
            await ask(pair, f"q{n}", [n + 3] * 30, SamplingParams(max_tokens=17))
        assert pair.decode.worker.report.inspect().pages_cached > 8


async def test_a_full_pool_of_readers_makes_the_next_prompt_wait() -> None:
    async with WorkerPair(prefill_pages=10) as pair:
        await ask(pair, "first", [5] * 30, SamplingParams(max_tokens=1))
        pair.fabric.hold()
        second = pair.send("second", [5] * 30, TEN)
        await until(lambda: second.tokens)
        third = pair.send("third", [6] * 30, TEN)
        await asyncio.sleep(0.05)
        assert not third.tokens
        pair.fabric.release()
        await until(lambda: second.finish and third.finish)
        assert third.tokens == answer_to([6] * 30, TEN)
        await pair.empty()


# ---- aborts and failures ----


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("moment", ["reserved", "computing", "handing over", "decoding"])
async def test_an_abort_lets_everything_go(moment: str, both: bool) -> None:
    async with WorkerPair(both=both, max_step_tokens=8, max_batch_requests=4) as pair:
        await ask(pair, "first")
        if moment == "reserved":
            pair.reserve("q", PROMPT, TEN)
            assert pair.decode.engine.pool.counts().shared == FULL
        else:
            held = pair.decode if moment == "decoding" else pair.prefill
            if moment == "handing over":
                pair.fabric.hold()
            else:
                held.engine.hold(after=(1 if both else 0) if moment == "decoding" else 0)
            output = pair.send("q", PROMPT, SamplingParams(max_tokens=30))
            await until(held.engine.waiting.is_set if moment != "handing over" else lambda: output.tokens)
        pair.abort("q")
        pair.fabric.release()
        for end in pair.ends:
            end.engine.resume()
        await pair.empty()
        again = await ask(pair, "again")
        assert again.cached_tokens == FULL * PAGE_TOKENS


async def test_an_expired_lease_lets_its_pages_go_at_once() -> None:
    async with WorkerPair(kv_lease_s=30.0) as pair:
        await ask(pair, "first")
        pair.fabric.hold()
        output = pair.send("q", PROMPT, TEN)
        await until(lambda: pair.decode.engine.pool.counts().advertised)
        pair.decode.age(30.0)
        await until(lambda: output.finish)
        assert output.error == "TRANSFER_FAILED"
        counts = pair.decode.engine.pool.counts()
        assert (counts.shared, counts.quarantined) == (0, 1), "only the page that was to be sent"
        pair.fabric.release()
        await pair.empty()


async def test_the_next_attempt_goes_on_from_the_cache() -> None:
    async with WorkerPair() as pair:
        pair.decode.engine.hold(after=6)
        first = pair.send("q", PROMPT, SamplingParams(max_tokens=20))
        await until(lambda: len(first.tokens) > 5)
        out = list(first.tokens)
        del pair.outputs["q"]
        pair.abort("q")
        pair.decode.engine.resume()
        await pair.empty()
        second = pair.send("q", PROMPT, SamplingParams(max_tokens=20), attempt=2, answer=out)
        await until(lambda: second.finish and second.pages)
        assert second.tokens == answer_to(PROMPT, SamplingParams(max_tokens=20))
        assert second.cached_tokens >= FULL * PAGE_TOKENS
        assert second.pages <= 2
        await pair.empty()


async def test_a_failed_transfer_is_computed_once() -> None:
    async with WorkerPair() as pair:
        pair.fabric.fail_next()
        failed = pair.send("q", PROMPT, TEN)
        await until(lambda: failed.finish)
        assert failed.error == "TRANSFER_FAILED"
        await pair.empty()
        again = pair.send("q", PROMPT, TEN, attempt=2)
        await until(lambda: again.finish and again.pages)
        assert again.tokens == answer_to(PROMPT, TEN)
        assert (again.cached_tokens, again.pages) == (FULL * PAGE_TOKENS, FULL + 1)
        await pair.empty()


async def test_pages_that_were_damaged_are_not_cached() -> None:
    async with WorkerPair() as pair:
        memory = pair.decode.engine.memory

        def flip(pages: Sequence[int]) -> None:
            memory[pages[0], 0, 0] ^= 1

        pair.fabric.damage_next(flip)
        failed = pair.send("q", PROMPT, TEN)
        await until(lambda: failed.finish)
        assert failed.error == "TRANSFER_FAILED"
        assert pair.decode.worker.report.inspect().pages_cached == 0
        await ask(pair, "r")


@pytest.mark.parametrize(("skipped", "fits"), [(0, False), (FULL - 1, False), (FULL, True)])
async def test_a_notice_says_how_much_was_left_out(skipped: int, fits: bool) -> None:
    async with WorkerPair() as pair:
        await ask(pair, "first")
        notice = pair.decode.worker.admission.notice
        taken: list[TransferNotice] = []

        def change(received: TransferNotice) -> None:
            taken.append(received)
            notice(replace(received, skipped=skipped))

        pair.decode.worker.transport.on_notice = change  # type: ignore[attr-defined]
        output = pair.send("q", PROMPT, TEN)
        await until(lambda: output.finish)
        assert (taken[0].pages, taken[0].skipped) == (FULL + 1, FULL)
        assert [checksum.page for checksum in taken[0].checksums] == [FULL], "of the page that was sent alone"
        assert output.finish is (FinishReason.LENGTH if fits else FinishReason.ERROR)
        await pair.empty()


async def test_what_is_held_does_not_change_while_it_is_reserved() -> None:
    """Others publish and leave meanwhile; asked twice, the grant is the same."""
    async with WorkerPair() as pair:
        await ask(pair, "first", PROMPT[: 2 * PAGE_TOKENS + 1])
        reservation = pair.reservation("q", PROMPT, TEN)
        granted = pair.decode.worker.reserve(reservation)
        assert granted.held_tokens == 2 * PAGE_TOKENS
        await asyncio.gather(*(until_answered(pair, f"other {n}") for n in range(2)))
        assert pair.decode.worker.reserve(reservation) == granted
        output = pair.outputs["q"] = RequestOutput()
        pair.prefill.worker.prefill(pair.task("q", PROMPT, TEN, granted.lease))
        await until(lambda: output.finish and output.pages)
        assert output.tokens == answer_to(PROMPT, TEN)
        assert output.pages == FULL + 1 - 2
        await pair.empty()


async def until_answered(pair: WorkerPair, name: str) -> None:
    output = pair.send(name, PROMPT, TEN)
    await until(lambda: output.finish)


# ---- prompts that are scored ----

SCORED = replace(TEN, prompt_logprobs=2)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize(
    "sampling", [SCORED, replace(SCORED, max_tokens=1)], ids=["prior_output_tokens", "scored alone"]
)
async def test_a_scored_prompt_is_computed_whole_and_cached_for_others(both: bool, sampling: SamplingParams) -> None:
    async with WorkerPair(both=both, max_step_tokens=7) as pair:
        await ask(pair, "first")
        scored = await ask(pair, "scored", sampling=sampling)
        assert scored.cached_tokens == 0
        assert scored.prompt_logprobs is not None
        assert [*scored.prompt_logprobs.tokens()] == [logprobs_of(token, 2) for token in PROMPT[1:]]
        last = await ask(pair, "last")
        assert (last.cached_tokens, last.prompt_logprobs) == (FULL * PAGE_TOKENS, None)


@pytest.mark.parametrize("both", [False, True])
async def test_a_scored_prompt_leaves_its_pages(both: bool) -> None:
    async with WorkerPair(both=both) as pair:
        await ask(pair, "scored", sampling=SCORED)
        assert (await ask(pair, "next")).cached_tokens == FULL * PAGE_TOKENS


async def test_a_later_attempt_of_a_scored_request_reads_the_cache() -> None:
    async with WorkerPair() as pair:
        first = await ask(pair, "scored", sampling=SCORED)
        again = pair.send("scored", PROMPT, SCORED, 2, first.tokens[:3])
        await until(lambda: again.finish)
        assert again.tokens == first.tokens
        assert (again.cached_tokens, again.prompt_logprobs) == (FULL * PAGE_TOKENS, None)
        await pair.empty()


async def test_a_hinted_prompt_outlasts_others_on_both_workers() -> None:
    for retention_s, kept in ((0.0, 0), (3600.0, FULL * PAGE_TOKENS)):
        async with WorkerPair(pages=12) as pair:
            await ask(pair, "agent", tenant="a", retention_s=retention_s)
            for number in range(6):
                await ask(pair, f"q{number}", [500 + number] * len(PROMPT), tenant="a")
            again = await ask(pair, "again", tenant="a")
            assert again.cached_tokens == kept
            assert again.pages == (1 if kept else FULL + 1), "the decode worker has kept them as well"


# ---- what routers hear of it ----


async def test_routers_that_request_it_get_the_cached_prefixes() -> None:
    async with WorkerPair(pages=12, reports_tokens=True) as pair:
        received: list[PrefixChanges] = []
        stream = pair.decode.worker.attach("indexer", prefixes=True)

        async def read() -> None:
            async for step in stream.messages():
                received.extend(step.prefixes)

        reader = asyncio.create_task(read())
        index: set[bytes] = set()
        for n in range(6):
            await ask(pair, f"q{n}", [n + 3] * 20)
        await ask(pair, "last", PROMPT)
        known = pair.decode.worker.report.known_prefixes()
        everything = {digest for run in known.stored for digest in run.digests}
        await until(lambda: received and received[-1].sequence >= known.sequence)
        pair.decode.worker.detach(stream)
        await reader
        for changes in received:
            index -= set(changes.removed)
            index |= {digest for run in changes.stored for digest in run.digests}
        assert [changes.sequence for changes in received] == list(range(1, len(received) + 1))
        assert index == everything
        assert set(page_digests(PROMPT, PAGE_TOKENS, root_digest(""))) <= index
        for run in known.stored:
            assert tuple(page_digests(run.token_ids, PAGE_TOKENS, run.parent)) == run.digests
        assert any(changes.removed for changes in received)
        assert all(not step.prefixes for step in pair.steps)
