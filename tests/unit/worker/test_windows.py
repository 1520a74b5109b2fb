"""Models whose layers have different windows, through both workers: what is held, sent, cached and freed."""

from collections.abc import Sequence

import pytest

from tandem.protocol.kv_pages import KvPages, held_pages
from tandem.protocol.messages import SamplingParams
from tests.fake_engine import PAGE_TOKENS, FakeEngine, answer_to
from tests.worker_pair import End, RequestOutput, WorkerPair, until

WINDOWS = (None, 3 * PAGE_TOKENS, PAGE_TOKENS + 1)
STEP = 2 * PAGE_TOKENS
KV = KvPages(PAGE_TOKENS, WINDOWS, STEP)
PROMPT = [3 + number % 50 for number in range(20 * PAGE_TOKENS + 2)]
ANSWER = SamplingParams(max_tokens=8 * PAGE_TOKENS)


@pytest.fixture(autouse=True, params=[False, True], ids=["", "asynchronous"])
def _engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "asynchronous", request.param)
    monkeypatch.setattr(FakeEngine, "windows", WINDOWS)
    monkeypatch.setattr(FakeEngine, "step_tokens", STEP)


class Watch:
    """The most pages that the requests of an end hold, looked at before each of its steps."""

    def __init__(self, end: End) -> None:
        self.most = self.most_in_pool = 0
        self._end = end
        launch = end.engine.launch

        def watched(batch: object) -> object:
            self.look()
            return launch(batch)  # type: ignore[arg-type]

        end.engine.launch = watched  # type: ignore[assignment, method-assign]

    def look(self) -> None:
        worker, counts = self._end.worker, self._end.engine.pool.counts()
        self.most_in_pool = max(self.most_in_pool, counts.total - counts.free - counts.cached)
        for _, request in worker._schedulers.prefill.registry:
            self.most = max(self.most, len(held_pages(request.pages)))
        for request in worker._schedulers.decode._batch.requests:
            assert request.held == len(held_pages(request.pages))
            self.most = max(self.most, request.held)


async def ask(pair: WorkerPair, name: str, prompt: Sequence[int], sampling: SamplingParams = ANSWER) -> RequestOutput:
    output = pair.send(name, list(prompt), sampling)
    stays = pair.prefill is pair.decode
    await until(lambda: output.finish and (stays or output.pages))
    assert not output.error, output.message
    assert output.tokens == answer_to(list(prompt), sampling), name
    await pair.empty()
    return output


async def test_no_more_is_held_or_sent_than_the_windows_need() -> None:
    async with WorkerPair(pages=200, max_step_tokens=STEP) as pair:
        prefill, decode = Watch(pair.prefill), Watch(pair.decode)
        output = await ask(pair, "q", PROMPT)
        assert output.pages == len(KV.sent(len(PROMPT), 0)) == 21 + 4 + 2
        total = len(PROMPT) + ANSWER.max_tokens - 1
        assert 21 + 4 + 2 < prefill.most <= KV.held(len(PROMPT))
        assert 21 + 4 + 2 < decode.most <= KV.held(total, decoding=True) < 3 * KV.numbers(total)
        assert decode.most_in_pool == decode.most


async def test_a_prompt_that_is_computed_where_it_is_answered_holds_no_more_either() -> None:
    async with WorkerPair(pages=200, max_step_tokens=STEP, both=True) as pair:
        watch = Watch(pair.decode)
        await ask(pair, "q", PROMPT)
        assert watch.most_in_pool <= KV.held(len(PROMPT) + ANSWER.max_tokens - 1)


@pytest.mark.parametrize("both", [False, True])
async def test_a_pool_as_large_as_the_forecast_is_enough(both: bool) -> None:
    needed = KV.held(len(PROMPT) + ANSWER.max_tokens - 1)
    async with WorkerPair(pages=2 * needed if both else needed, max_step_tokens=STEP, both=both) as pair:
        await ask(pair, "q", PROMPT)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("tail", [0, 1, PAGE_TOKENS, 3 * PAGE_TOKENS])
async def test_a_changed_tail_finds_the_prefix_and_its_windows(both: bool, tail: int) -> None:
    async with WorkerPair(pages=300, max_step_tokens=STEP, both=both) as pair:
        await ask(pair, "first", PROMPT, SamplingParams(max_tokens=2))
        changed = [*PROMPT[: len(PROMPT) - tail], *[60] * (tail + 3)]
        second = await ask(pair, "second", changed)
        assert second.cached_tokens == (len(PROMPT) - tail) // PAGE_TOKENS * PAGE_TOKENS


async def test_a_system_prompt_is_reused_before_any_tail() -> None:
    """What was behind the windows is cached, not lost, while there is room."""
    async with WorkerPair(pages=300, max_step_tokens=STEP) as pair:
        await ask(pair, "first", PROMPT, SamplingParams(max_tokens=2))
        second = await ask(pair, "second", [*PROMPT[: 4 * PAGE_TOKENS], *[60] * 50])
        assert second.cached_tokens == 4 * PAGE_TOKENS


@pytest.mark.parametrize("both", [False, True])
async def test_many_requests_in_a_small_pool(both: bool) -> None:
    async with WorkerPair(pages=110, max_step_tokens=STEP, both=both) as pair:
        prompts = [PROMPT[: (5 + 3 * number) * PAGE_TOKENS // 2] for number in range(12)]
        sampling = SamplingParams(max_tokens=3 * PAGE_TOKENS)
        outputs = await pair.send_all(prompts, sampling)
        for prompt, output in zip(prompts, outputs, strict=True):
            if output.preempted_at < 0:
                assert output.tokens == answer_to(prompt, sampling)
        await pair.empty()


@pytest.mark.parametrize("both", [False, True])
async def test_an_abort_at_any_moment_frees_everything(both: bool) -> None:
    async with WorkerPair(pages=200, max_step_tokens=STEP, both=both) as pair:
        for number, after in enumerate((0, 1, 3, 7, 12, 20)):
            steps = len(pair.prefill.engine.batches) + len(pair.decode.engine.batches)
            pair.send(f"q{number}", PROMPT, ANSWER, salt=str(number))
            await until(
                lambda steps=steps, after=after: (
                    len(pair.prefill.engine.batches) + len(pair.decode.engine.batches) >= steps + after
                )
            )
            pair.abort(f"q{number}")
            await pair.empty()


class TestOneWindow:
    """A model whose layers all have the same window."""

    @pytest.fixture(autouse=True)
    def _windows(self, _engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(FakeEngine, "windows", (3 * PAGE_TOKENS,))

    @pytest.mark.parametrize("both", [False, True])
    async def test_the_pool_may_be_much_smaller_than_the_context(self, both: bool) -> None:
        kv = KvPages(PAGE_TOKENS, (3 * PAGE_TOKENS,), STEP)
        async with WorkerPair(pages=2 * kv.held(10_000), max_step_tokens=STEP, both=both) as pair:
            for name in ("first", "second"):
                output = pair.send(name, list(PROMPT), SamplingParams(max_tokens=30))
                await until(lambda output=output: output.finish and (both or output.pages))
                assert not output.error, output.message
                assert len(output.tokens) == 30
                await pair.empty()
            assert output.cached_tokens == 20 * PAGE_TOKENS
