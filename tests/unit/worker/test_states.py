"""Models with state layers, through both workers: what is held, sent, cached and freed."""

import asyncio
from collections.abc import Sequence

import pytest

from tandem.protocol.kv_pages import STATE, KvPages
from tandem.protocol.messages import SamplingParams
from tests.fake_engine import PAGE_TOKENS, FakeEngine, answer_to
from tests.worker_pair import RequestOutput, Sender, WorkerPair, until

WINDOWS = (None, 3 * PAGE_TOKENS, STATE, STATE)
PROMPT = [3 + number % 50 for number in range(20 * PAGE_TOKENS + 2)]
TWO = SamplingParams(max_tokens=2)


@pytest.fixture(autouse=True, params=[False, True], ids=["", "asynchronous"])
def _engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "asynchronous", request.param)
    monkeypatch.setattr(FakeEngine, "windows", WINDOWS)


async def ask(
    pair: WorkerPair, name: str, prompt: Sequence[int], sampling: SamplingParams, salt: str = ""
) -> RequestOutput:
    output = pair.send(name, list(prompt), sampling, salt=salt)
    stays = pair.prefill is pair.decode
    await until(lambda: output.finish and (stays or output.pages))
    assert not output.error, output.message
    assert output.tokens == answer_to(list(prompt), sampling), name
    await pair.empty()
    return output


def one_step(pages: int) -> int:
    """Returns a step budget that neither divides a page nor is divided by one."""
    return pages * PAGE_TOKENS + 3


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("step", [3, PAGE_TOKENS, one_step(1), one_step(6), 1000])
async def test_answers_do_not_depend_on_the_chunks(both: bool, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "step_tokens", step)
    kv = KvPages(PAGE_TOKENS, WINDOWS, step)
    async with WorkerPair(pages=2 * kv.held(30 * PAGE_TOKENS), max_step_tokens=step, both=both) as pair:
        for tokens in (1, PAGE_TOKENS - 1, PAGE_TOKENS, PAGE_TOKENS + 1, 5 * PAGE_TOKENS, len(PROMPT)):
            output = await ask(pair, str(tokens), PROMPT[:tokens], SamplingParams(max_tokens=20), salt=str(tokens))
            assert both or output.pages == len(kv.sent(tokens, 0))


async def test_one_state_page_per_group_is_sent() -> None:
    kv = KvPages(PAGE_TOKENS, WINDOWS)
    sent = kv.sent(len(PROMPT), 0)
    assert [entry for entry in sent if entry % 4 > 1] == [20 * 4 + 2, 20 * 4 + 3]


@pytest.mark.parametrize("group", [2, 3])
@pytest.mark.parametrize("lost", [False, True])
async def test_a_damaged_or_missing_state_is_never_decoded(group: int, lost: bool) -> None:
    prompt = PROMPT[: 6 * PAGE_TOKENS + 1]
    kv = KvPages(PAGE_TOKENS, WINDOWS)
    sent = kv.sent(len(prompt), 0)
    place = sent.index(6 * kv.groups + group) - len(sent)
    async with WorkerPair(pages=200) as pair:

        def damage(pages: Sequence[int]) -> None:
            state = pair.decode.engine.memory[pages[place]]
            state[0, 1] = 0 if lost else state[0, 1] ^ 1 << 7

        pair.fabric.damage_next(damage)
        failed = pair.send("q", prompt, TWO)
        await until(lambda: failed.finish)
        assert failed.error == "TRANSFER_FAILED"
        assert not pair.decode.engine.batches
        await pair.empty()
        again = pair.send("q", prompt, TWO, attempt=2)
        await until(lambda: again.finish)
        assert again.tokens == answer_to(prompt, TWO)
        assert pair.decode.worker.report.inspect().checksum_failures == 1


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("tokens", [PAGE_TOKENS + 1, 6 * PAGE_TOKENS - 1, 6 * PAGE_TOKENS, 6 * PAGE_TOKENS + 5])
async def test_an_equal_prompt_is_found_up_to_the_page_of_its_last_token(both: bool, tokens: int) -> None:
    async with WorkerPair(pages=300, max_step_tokens=one_step(2), both=both) as pair:
        await ask(pair, "first", PROMPT[:tokens], TWO)
        second = await ask(pair, "second", PROMPT[:tokens], SamplingParams(max_tokens=30))
        assert second.cached_tokens == (tokens - 1) // PAGE_TOKENS * PAGE_TOKENS


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("answer", [2, PAGE_TOKENS, 3 * PAGE_TOKENS + 2])
async def test_the_next_turn_of_a_conversation_finds_prompt_and_answer(both: bool, answer: int) -> None:
    async with WorkerPair(pages=300, max_step_tokens=one_step(2), both=both) as pair:
        sampling = SamplingParams(max_tokens=answer)
        first = await ask(pair, "first", PROMPT[: 6 * PAGE_TOKENS + 5], sampling)
        turn = [*PROMPT[: 6 * PAGE_TOKENS + 5], *first.tokens, *[60] * 9]
        second = await ask(pair, "second", turn, SamplingParams(max_tokens=20))
        known = len(turn) - 10 if both else 6 * PAGE_TOKENS + 5
        assert second.cached_tokens == known // PAGE_TOKENS * PAGE_TOKENS


@pytest.mark.parametrize("both", [False, True])
async def test_a_block_that_is_seen_twice_is_found_the_third_time(both: bool) -> None:
    """The first prompt has no state at the end of the block, because it does not end there; the second leaves one."""
    block = PROMPT[: 7 * PAGE_TOKENS]
    async with WorkerPair(pages=400, max_step_tokens=one_step(2), both=both) as pair:
        found = [
            (await ask(pair, str(tail), [*block, *[tail] * (3 * PAGE_TOKENS + 1)], TWO)).cached_tokens
            for tail in (60, 61, 62)
        ]
        assert found == [0, 0, len(block)]


@pytest.mark.parametrize("both", [False, True])
async def test_many_requests_in_a_small_pool(both: bool) -> None:
    async with WorkerPair(pages=110, max_step_tokens=one_step(1), both=both) as pair:
        prompts = [PROMPT[: (5 + 3 * number) * PAGE_TOKENS // 2] for number in range(12)]
        sampling = SamplingParams(max_tokens=3 * PAGE_TOKENS)
        outputs = await pair.send_all(prompts, sampling)
        for prompt, output in zip(prompts, outputs, strict=True):
            if output.preempted_at < 0:
                assert output.tokens == answer_to(prompt, sampling)
        await pair.empty()


@pytest.mark.parametrize("both", [False, True])
async def test_a_pool_as_large_as_the_forecast_is_enough(both: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    step = one_step(1)
    monkeypatch.setattr(FakeEngine, "step_tokens", step)
    needed = KvPages(PAGE_TOKENS, WINDOWS, step).held(len(PROMPT) + 3 * PAGE_TOKENS)
    async with WorkerPair(pages=2 * needed if both else needed, max_step_tokens=step, both=both) as pair:
        await ask(pair, "q", PROMPT, SamplingParams(max_tokens=3 * PAGE_TOKENS))


@pytest.mark.parametrize("both", [False, True])
async def test_an_abort_at_any_moment_frees_everything(both: bool) -> None:
    async with WorkerPair(pages=200, max_step_tokens=one_step(1), both=both) as pair:
        for number, after in enumerate((0, 1, 3, 7, 12, 20)):
            steps = len(pair.prefill.engine.batches) + len(pair.decode.engine.batches)
            pair.send(f"q{number}", PROMPT, SamplingParams(max_tokens=60), salt=str(number))
            await until(
                lambda steps=steps, after=after: (
                    len(pair.prefill.engine.batches) + len(pair.decode.engine.batches) >= steps + after
                )
            )
            pair.abort(f"q{number}")
            await pair.empty()


@pytest.mark.parametrize("prefix_cache", [True, False])
async def test_a_preempted_request_continues_from_a_kept_state(prefix_cache: bool) -> None:
    """What is computed again are the tokens after the last full page, unless its pages were needed meanwhile."""
    sampling = SamplingParams(max_tokens=12 * PAGE_TOKENS)
    prompts = [[number + 3, *PROMPT[: 2 * PAGE_TOKENS]] for number in range(2)]
    async with WorkerPair(pages=80, max_step_tokens=one_step(1), both=True, prefix_cache=prefix_cache) as pair:
        sender = Sender(pair, sampling.max_tokens)
        outputs = await asyncio.gather(*(sender.run(f"q{n}", prompt, sampling) for n, prompt in enumerate(prompts)))
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.tokens == answer_to(prompt, sampling)
        (recomputed,) = sender.recomputed
        assert recomputed < PAGE_TOKENS if prefix_cache else recomputed > 2 * PAGE_TOKENS
        await pair.empty()
