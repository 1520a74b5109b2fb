"""A request whose logits are not finite ends with that error; the others of its steps have all their tokens."""

from dataclasses import replace
from typing import Any

import pytest

import tandem.worker.worker
from benchmarks.speculation.oracle import OracleProposer
from tandem.engine.steps import prompt_scoring
from tandem.engine.steps.batch import ModelRunnerOutput, StepBatch
from tandem.engine.steps.sampling_metadata import NO_TOKEN
from tandem.protocol.errors import NonFiniteLogits
from tandem.protocol.messages import FinishReason, SamplingParams
from tests.fake_engine import FakeEngine, answer_to, whole_text
from tests.worker_pair import RequestOutput, WorkerPair, until

PROMPT = [11, 12, 13, 14, 15, 16, 17]
OTHER = [21, 22, 23, 24, 25, 26, 27]
TEN = SamplingParams(max_tokens=10)
BROKEN = replace(TEN, seed=77)


def break_at(monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    """Has the engine find no token for draw `index` of requests with the seed of `BROKEN`."""
    whole = FakeEngine.run

    def run(engine: FakeEngine, batch: StepBatch) -> ModelRunnerOutput:
        result = whole(engine, batch)
        draws = [row.draw for row in batch.rows]
        engine.drawn = [
            NO_TOKEN if draw is not None and draw.sampling.seed == BROKEN.seed and draw.index == index else token
            for draw, token in zip(draws, result.token_ids, strict=True)
        ]
        return replace(result, token_ids=engine.drawn)

    monkeypatch.setattr(FakeEngine, "run", run)


async def fails_alone(pair: WorkerPair, broken: SamplingParams = BROKEN) -> RequestOutput:
    """Sends a broken request between two others; returns what came of it."""
    sent = ((OTHER, TEN), (PROMPT, broken), (OTHER, TEN))
    outputs = [pair.send(f"q{number}", *arguments) for number, arguments in enumerate(sent)]
    await until(lambda: all(output.finish for output in outputs))
    assert outputs[0].tokens == outputs[2].tokens == answer_to(OTHER, TEN)
    assert (outputs[1].finish, outputs[1].error) == (FinishReason.ERROR, NonFiniteLogits.code)
    assert NO_TOKEN not in outputs[1].tokens
    assert not any(end.worker.died.done() for end in pair.ends)
    pair.abort("q1")  # as its router does
    await pair.empty()
    return outputs[1]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("index", [0, 1, 5, TEN.max_tokens - 1])
async def test_it_fails_at_any_token(
    index: int, both: bool, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEngine, "asynchronous", asynchronous)
    break_at(monkeypatch, index)
    async with WorkerPair(both=both) as pair:
        assert (await fails_alone(pair)).tokens == answer_to(PROMPT, BROKEN)[:index]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("index", [1, 4, TEN.max_tokens - 1])
async def test_it_fails_in_a_step_that_verifies_drafts(
    index: int, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEngine, "asynchronous", asynchronous)
    monkeypatch.setattr(tandem.worker.worker, "make_proposer", lambda *_, **__: OracleProposer(whole_text, 1.0))
    break_at(monkeypatch, index)
    async with WorkerPair(both=True) as pair:
        speculation = pair.decode.worker._schedulers.decode.speculation
        assert speculation is not None
        speculation.fixed_drafts = 3
        await fails_alone(pair)
        assert speculation.counts.drafted


async def test_its_answer_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sends the prompt and the answer again has the answer computed: its KV may not be finite."""
    break_at(monkeypatch, 9)
    async with WorkerPair(both=True) as pair:
        output = await fails_alone(pair)
        again = pair.send("again", [*PROMPT, *output.tokens], TEN)
        await until(lambda: again.finish)
        assert again.cached_tokens <= len(PROMPT)


@pytest.mark.parametrize("both", [False, True])
async def test_a_scored_prompt_with_such_logits_fails(both: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the token behind it could be drawn."""
    whole = prompt_scoring.PromptScores.take

    def take(scores: prompt_scoring.PromptScores, values: Any, ids: Any) -> None:
        if scores.token_ids == tuple(PROMPT):
            values[0, 0] = float("nan")
        whole(scores, values, ids)

    monkeypatch.setattr(prompt_scoring.PromptScores, "take", take)
    async with WorkerPair(both=both) as pair:
        output = await fails_alone(pair, replace(TEN, prompt_logprobs=1))
        assert output.prompt_logprobs is None
