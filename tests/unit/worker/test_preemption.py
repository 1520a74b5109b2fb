"""Answers that outgrow a tiny pool: token for token as without preemption, on both kinds of engine and of workers."""

import asyncio
from typing import Any

import pytest

from tandem.protocol.messages import SamplingParams
from tests.fake_engine import FakeEngine, answer_to, logprobs_of
from tests.worker_pair import Sender, WorkerPair, until

SAMPLINGS = [
    SamplingParams(60),
    SamplingParams(60, temperature=1.0, seed=7, logprobs=2),
    SamplingParams(60, presence_penalty=0.5),
    SamplingParams(60, logit_bias=tuple((token, -100.0) for token in range(3, 500))),
]


@pytest.fixture(autouse=True, params=[False, True], ids=["", "asynchronous"])
def _engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "asynchronous", request.param)


@pytest.mark.parametrize("changes", [{}, {"both": True}, {"prefix_cache": False}], ids=str)
async def test_answers_are_the_same(changes: dict[str, Any]) -> None:
    async with WorkerPair(pages=64 if changes.get("both") else 26, prefill_pages=64, **changes) as pair:
        if changes.get("both"):
            pair.decode.worker.admission._budget._reservations._limit = 26
        sender = Sender(pair)
        asked = {f"q{n}": ([n + 3, *range(20, 25)], SAMPLINGS[n % 3]) for n in range(7)}
        answers = await asyncio.gather(*(sender.run(name, *arguments) for name, arguments in asked.items()))
        for (prompt, sampling), output in zip(asked.values(), answers, strict=True):
            assert output.tokens == answer_to(prompt, sampling)
            scores = [logprobs_of(token, 2) for token in output.tokens] if sampling.logprobs else []
            assert output.logprobs == scores
        preemptions = pair.decode.worker.report.load().preemptions
        assert preemptions == sum(sender.attempts.values()) - len(asked) > 0
        await pair.empty()


async def test_a_router_that_leaves_takes_those_that_gave_way_with_it() -> None:
    async with WorkerPair(pages=26, prefill_pages=64) as pair:
        sender = Sender(pair)
        running = [asyncio.create_task(sender.run(f"q{n}", [n + 3] * 5, SAMPLINGS[0])) for n in range(6)]
        await until(lambda: pair.decode.worker.report.load().preemptions)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        pair.abort(*pair.outputs, attempt=99)
        await pair.empty()
