"""Further answers to a prompt that both workers have: full pages are shared, read-only, and the last one is private."""

import pytest

from tandem.protocol.lifecycle.events import LifecycleEvent
from tandem.protocol.messages import SamplingParams
from tests.fake_engine import PAGE_TOKENS, FakeEngine, answer_to
from tests.worker_pair import WorkerPair, until

TWENTY = SamplingParams(20)


@pytest.fixture(autouse=True, params=[False, True], ids=["", "asynchronous"])
def _engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "asynchronous", request.param)


@pytest.mark.parametrize("tail", [0, 1, PAGE_TOKENS - 1])
async def test_full_pages_are_shared_and_the_last_is_private(tail: int) -> None:
    """The choices of one request share the full pages of the prompt and never the last page.

    Each choice is drawn from all that its pages hold, and the engine refuses to write to a page that others read.
    Each choice writes other tokens after the prompt, so a shared last page would show in the others.
    """
    full = 5
    prompt = list(range(30, 30 + full * PAGE_TOKENS + tail))
    async with WorkerPair(pages=128, max_step_tokens=64) as pair:
        first = pair.send("c0", prompt, TWENTY)
        await until(lambda: LifecycleEvent.DECODE_ADMITTED in first.event_times)
        computed = sum(len(row.token_ids) for batch in pair.prefill.engine.batches for row in batch.rows)
        samplings = [SamplingParams(20, presence_penalty=0.1 * n) for n in (1, 2)]
        others = [pair.send(f"c{n}", prompt, sampling) for n, sampling in enumerate(samplings, 1)]
        await until(lambda: all(choice.finish and choice.pages for choice in (first, *others)))
        assert first.tokens == answer_to(prompt, TWENTY)
        for output, sampling in zip(others, samplings, strict=True):
            assert output.tokens == answer_to(prompt, sampling) != first.tokens
            assert output.pages == 1
        again = sum(len(row.token_ids) for batch in pair.prefill.engine.batches for row in batch.rows) - computed
        assert again == 2 * (tail or PAGE_TOKENS)
        await pair.empty()
