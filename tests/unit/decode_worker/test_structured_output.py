"""Answers that follow a grammar: the same tokens on one worker and on two, preempted, and beside other requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from tandem.engine.steps.sampling_metadata import History
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.kv_pages import STATE
from tandem.protocol.messages import FinishReason, SamplingParams
from tandem.protocol.speculation_method import SpeculationMethod
from tandem.tokenizers.grammars import of_choices, of_json_schema, of_regex
from tests.fake_engine import EOS, FakeEngine, answer_to
from tests.worker_pair import RequestOutput, WorkerPair, until

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 3, "maxLength": 9}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
SAMPLINGS = [
    SamplingParams(60, grammar=of_json_schema(SCHEMA)),
    SamplingParams(60, grammar=of_regex("[a-f]{20,30}"), temperature=0.7, seed=3, logprobs=1),
    SamplingParams(40),
    SamplingParams(60, grammar=of_choices(["yes, I think so", "no, not at all"]), presence_penalty=0.5),
    SamplingParams(4, grammar=of_regex("[a-f]{20,30}")),
]
PROMPTS = [[number + 5, *range(20, 24 + number)] for number in range(len(SAMPLINGS) * 2)]


@pytest.fixture(autouse=True, params=[False, True], ids=["", "asynchronous"])
def _engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "asynchronous", request.param)


def sampling_of(number: int) -> SamplingParams:
    return SAMPLINGS[number % len(SAMPLINGS)]


def assert_whole(output: RequestOutput, prompt: Sequence[int], sampling: SamplingParams) -> None:
    wanted = answer_to(list(prompt), sampling)
    assert output.tokens == wanted
    assert output.finish is (FinishReason.STOP if wanted[-1] == EOS else FinishReason.LENGTH)
    assert len(output.logprobs) == (len(wanted) if sampling.logprobs is not None else 0)


@pytest.mark.parametrize("speculate", [SpeculationMethod.NGRAM, SpeculationMethod.OFF])
@pytest.mark.parametrize("both", [False, True], ids=["", "one worker"])
async def test_answers_follow_their_grammars(both: bool, speculate: SpeculationMethod) -> None:
    async with WorkerPair(pages=256, both=both, speculate=speculate) as pair:
        outputs = [pair.send(f"q{n}", prompt, sampling_of(n)) for n, prompt in enumerate(PROMPTS)]
        await until(lambda: all(output.finish for output in outputs))
        for number, prompt in enumerate(PROMPTS):
            assert_whole(outputs[number], prompt, sampling_of(number))
        assert sum(output.tokens[-1] == EOS for output in outputs) >= 4
        await pair.empty()


async def test_an_answer_goes_on_elsewhere() -> None:
    """A request comes back with the tokens that it has, as after a dead worker or a preemption."""
    prompt, sampling = PROMPTS[0], SAMPLINGS[1]
    wanted = answer_to(prompt, sampling)
    for known in (1, 7, len(wanted) - 1):
        async with WorkerPair(pages=64) as pair:
            output = pair.send("q", prompt, sampling, 2, wanted[:known])
            await until(lambda output=output: output.finish)
            assert output.tokens == wanted
            await pair.empty()


async def test_a_grammar_that_fails_ends_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its limits are reached in the fifth token: the request ends with the reason, all others go on."""
    fails = SAMPLINGS[1].grammar

    run_before = FakeEngine.run

    def run(self: FakeEngine, batch: Any) -> Any:
        for row in batch.rows:
            if row.draw is not None and row.draw.sampling.grammar == fails and row.draw.index == 5:
                history: History = row.draw.history
                history.failure = InvalidArgument("grammar", "is too complex")
        result = run_before(self, batch)
        tokens = [
            EOS if row.draw is not None and row.draw.history is not None and row.draw.history.failure else token
            for row, token in zip(batch.rows, result.token_ids, strict=True)
        ]
        self.drawn = tokens
        return type(result)(tokens, result.logprobs)

    monkeypatch.setattr(FakeEngine, "run", run)
    async with WorkerPair(pages=256) as pair:
        outputs = [pair.send(f"q{n}", PROMPTS[n], sampling_of(n)) for n in range(4)]
        await until(lambda: all(output.finish for output in outputs))
        assert (outputs[1].finish, outputs[1].error) == (FinishReason.ERROR, "INVALID_ARGUMENT")
        assert "too complex" in outputs[1].message
        for number in (0, 2, 3):
            assert_whole(outputs[number], PROMPTS[number], sampling_of(number))
        await pair.empty()


@pytest.mark.parametrize("speculate", [SpeculationMethod.NGRAM, SpeculationMethod.OFF])
async def test_an_answer_whose_mask_is_not_ready_repeats_its_row_and_no_other_waits(
    speculate: SpeculationMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is drawn without the mask is in no answer; the steps of others go on meanwhile."""
    run_before, tries = FakeEngine.run, Counter[tuple[History, int]]()

    def run(self: FakeEngine, batch: Any) -> Any:
        result = run_before(self, batch)
        tokens = list(result.token_ids)
        for number, row in enumerate(batch.rows):
            history = None if row.draw is None else row.draw.history
            if history is None or not history.may_wait or not row.draw.sampling.grammar:
                continue
            length = len(history.answer)
            if row.start == len(history.prompt) + length - 1:  # no draft
                tries[history, length] += 1
                history.waiting = tries[history, length] <= length % 4
            tokens[number] = EOS if history.waiting else tokens[number]
        return type(result)(tokens, result.logprobs)

    monkeypatch.setattr(FakeEngine, "run", run)
    async with WorkerPair(pages=256, speculate=speculate, max_batch_requests=16) as pair:
        outputs = [pair.send(f"q{n}", prompt, sampling_of(n)) for n, prompt in enumerate(PROMPTS)]
        await until(lambda: all(output.finish for output in outputs))
        for number, prompt in enumerate(PROMPTS):
            assert_whole(outputs[number], prompt, sampling_of(number))
        assert max(tries.values()) == 4
        await pair.empty()


async def test_the_device_does_not_wait_for_a_grammar() -> None:
    """A step of an asynchronous engine is launched before the tokens of the previous one are read."""
    async with WorkerPair(pages=256, both=True, speculate=SpeculationMethod.OFF) as pair:
        output = pair.send("q", PROMPTS[0], SAMPLINGS[0])
        await until(lambda: output.finish)
        assert_whole(output, PROMPTS[0], SAMPLINGS[0])
        rows = [row for step in pair.decode.engine.batches for row in step.rows if len(row.token_ids) == 1]
    in_flight = sum(row.source is not None for row in rows)
    assert len(rows) > 10
    assert in_flight >= len(rows) - 2 if FakeEngine.asynchronous else not in_flight


async def test_a_row_that_would_advance_a_state_twice_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler of a model with state layers waits for the mask."""
    monkeypatch.setattr(FakeEngine, "windows", (None, STATE))
    run_before, seen = FakeEngine.run, []

    def run(self: FakeEngine, batch: Any) -> Any:
        seen.extend(row.draw.history.may_wait for row in batch.tokens if row.draw is not None and row.draw.history)
        return run_before(self, batch)

    monkeypatch.setattr(FakeEngine, "run", run)
    async with WorkerPair(pages=256) as pair:
        output = pair.send("q", PROMPTS[1], sampling_of(1))
        await until(lambda: output.finish)
        assert_whole(output, PROMPTS[1], sampling_of(1))
    assert seen
    assert not any(seen)


@pytest.mark.parametrize("both", [False, True], ids=["", "one worker"])
async def test_a_grammar_that_fails_at_the_first_token_ends_with_its_error(
    both: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the answer ended with `stop` and without an error."""
    run_before = FakeEngine.run

    def run(self: FakeEngine, batch: Any) -> Any:
        result = run_before(self, batch)
        tokens = list(result.token_ids)
        for number, row in enumerate(batch.rows):
            if row.draw is not None and row.draw.sampling.grammar == SAMPLINGS[1].grammar:
                row.draw.history.failure = InvalidArgument("grammar", "is too complex")
                tokens[number] = EOS
        return type(result)(tokens, result.logprobs)

    monkeypatch.setattr(FakeEngine, "run", run)
    async with WorkerPair(pages=256, both=both) as pair:
        outputs = [pair.send(f"q{n}", PROMPTS[n], sampling_of(n)) for n in range(4)]
        await until(lambda: all(output.finish for output in outputs))
        assert (outputs[1].finish, outputs[1].error) == (FinishReason.ERROR, "INVALID_ARGUMENT")
        assert (outputs[1].message, outputs[1].tokens) == ("grammar: is too complex", [])
        for number in (0, 2, 3):
            assert_whole(outputs[number], PROMPTS[number], sampling_of(number))
        await pair.empty()


async def test_a_worker_refuses_a_grammar_that_does_not_compile_or_that_the_answer_does_not_follow() -> None:
    async with WorkerPair() as pair:
        worker = pair.decode.worker
        assert await worker.begin_answer(pair.reservation("q", [5], SamplingParams(4))) is None
        with pytest.raises(InvalidArgument, match="grammar"):
            await worker.begin_answer(pair.reservation("q", [5], SamplingParams(4, grammar=of_regex("(("))))
        with pytest.raises(InvalidArgument, match="grammar"):
            await worker.begin_answer(pair.reservation("q", [5, EOS], SAMPLINGS[1], prior_output_tokens=1))
        history = await worker.begin_answer(pair.reservation("q", [5], SAMPLINGS[1]))
        assert history is not None
        assert (list(history.prompt), list(history.answer)) == ([5], [])
