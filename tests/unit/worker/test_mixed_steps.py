"""Whatever the policy of steps, answers are the same; it only decides who waits."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tandem.cost_model.step_fit import LEARN_EVERY
from tandem.protocol.cost_parameters import UNMEASURED
from tandem.protocol.messages import SamplingParams
from tandem.protocol.policy_name import PolicyName
from tandem.worker.step_policy import FORCED_CHUNK_INTERVAL
from tests.fake_engine import ComputedStep, FakeEngine, answer_to
from tests.worker_pair import RequestOutput, WorkerPair, until

LONG = SamplingParams(max_tokens=150, speculate=False)
LONGER = SamplingParams(max_tokens=150 + 2 * FORCED_CHUNK_INTERVAL, speculate=False)
TEN = SamplingParams(max_tokens=10, speculate=False)
STEP_TOKENS = 16
STEPS_BEFORE = 60
"""Enough for seven to decode under any policy, and not for one of them to end."""
PROMPT_TOKENS = 3
ATTEMPTS = 5
OUT_OF_REACH_S = 1e-9
POLICIES: dict[str, dict[str, Any]] = {
    "unchunked": {"step_policy": PolicyName.UNCHUNKED},
    "chunked": {"step_policy": PolicyName.CHUNKED, "step_budget": 12},
    "priority": {"step_policy": PolicyName.DECODE_PRIORITY},
    "priority that never has spare time": {
        "step_policy": PolicyName.DECODE_PRIORITY,
        "itl_target_s": OUT_OF_REACH_S,
    },
    "priority with all the time": {"step_policy": PolicyName.DECODE_PRIORITY, "itl_target_s": 100.0},
}


@pytest.fixture(autouse=True, params=[False, True], ids=["", "asynchronous"])
def _engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "asynchronous", request.param)


async def decoding(
    pair: WorkerPair, count: int, sampling: SamplingParams = LONG
) -> tuple[dict[str, list[int]], dict[str, RequestOutput]]:
    """`count` requests that decode, and will for a while; the engine is held.

    Who comes after the first steps waits for long where no time is to spare; then they are all asked once more.
    """
    for attempt in range(ATTEMPTS):
        asked = {f"d{attempt}.{n}": [n + 3, n + 4, n + 5] for n in range(count)}
        pair.decode.engine.hold()
        outputs = {name: pair.send(name, prompt, sampling) for name, prompt in asked.items()}
        if await together(pair.decode.engine, count):
            return asked, outputs
        pair.abort(*outputs)
        pair.decode.engine.resume()
        await pair.empty()
    raise AssertionError(f"{count} requests do not decode together")


async def together(engine: FakeEngine, count: int) -> bool:
    """Returns True if `count` requests decode in one step before one of them may end; the engine is held then."""
    await until(engine.waiting.is_set)
    before = len(engine.batches)
    # Step by step, as what a step brings reaches the next one by way of the event loop.
    for steps in range(before + 1, before + STEPS_BEFORE):
        engine.hold(after=1)
        await until(partial(has_run, engine, steps))
        rows = engine.batches[-1].rows
        if len(rows) == count and all(row.start >= PROMPT_TOKENS for row in rows):
            return True
    return False


def has_run(engine: FakeEngine, steps: int) -> bool:
    return len(engine.batches) == steps


def is_mixed(batch: ComputedStep) -> bool:
    prompts = [row for row in batch.rows if len(row.token_ids) > 1 or row.draw is None]
    return 0 < len(prompts) < len(batch.rows)


@pytest.mark.parametrize("policy", POLICIES)
async def test_answers_are_the_same(policy: str) -> None:
    async with WorkerPair(both=True, pages=600, max_step_tokens=STEP_TOKENS, **POLICIES[policy]) as pair:
        asked, outputs = await decoding(pair, 3)
        prompts = {f"p{n}": [n + 40] * (5 + 9 * (n % 4)) for n in range(9)}
        outputs |= {name: pair.send(name, prompt, TEN) for name, prompt in prompts.items()}
        pair.decode.engine.resume()
        await until(lambda: all(output.finish for output in outputs.values()))
        assert {name: outputs[name].tokens for name in asked} == {n: answer_to(p, LONG) for n, p in asked.items()}
        assert {name: outputs[name].tokens for name in prompts} == {n: answer_to(p, TEN) for n, p in prompts.items()}
        batches = pair.decode.engine.batches
        assert any(is_mixed(batch) for batch in batches)
        most = POLICIES[policy].get("step_budget", STEP_TOKENS)
        assert max(sum(len(row.token_ids) for row in batch.rows) for batch in batches) <= most
        await pair.empty()


@pytest.mark.parametrize("changes", [{"step_budget": 7}, POLICIES["priority that never has spare time"]])
async def test_a_prompt_is_begun_within_a_bounded_number_of_steps(changes: dict[str, Any]) -> None:
    """Seven decode: a budget of seven tokens leaves nothing, nor does the target."""
    settings = POLICIES["chunked"] | changes
    async with WorkerPair(both=True, pages=600, max_step_tokens=STEP_TOKENS, **settings) as pair:
        _, outputs = await decoding(pair, 7, LONGER)
        before = len(pair.decode.engine.batches)
        prompt = [99] * 12
        waits = pair.send("p", prompt, TEN)
        await until(lambda: pair.decode.worker.report.load().prefill_requests)
        pair.decode.engine.resume()
        await until(lambda: waits.finish)
        assert waits.tokens == answer_to(prompt, TEN)
        begun = [number for number, batch in enumerate(pair.decode.engine.batches) if is_mixed(batch)]
        first = next(number for number in begun if number >= before) - before
        # The engine may be held with two steps launched that know of no prompt.
        assert first <= FORCED_CHUNK_INTERVAL + 2
        # It did not just wait for the others to end: all seven have a row beside its first.
        assert len(pair.decode.engine.batches[before + first].rows) == 7 + 1
        pair.abort(*outputs)
        await pair.empty()


async def test_a_batch_at_its_target_latency_takes_no_other_request() -> None:
    async with WorkerPair(both=True, pages=600, max_step_tokens=STEP_TOKENS, itl_target_s=1.0) as pair:
        worker = pair.decode.worker
        _, outputs = await decoding(pair, 3)
        growth = worker._loop._scheduler._growth
        growth.rows = lambda running, most, targets: running.decode_rows or most  # type: ignore[method-assign]
        late = pair.send("late", [9, 9, 9], TEN)
        pair.decode.engine.resume()
        await until(lambda: late.tokens)
        await until(lambda: all(output.finish for output in outputs.values()) and late.finish)
        assert late.tokens == answer_to([9, 9, 9], TEN)
        assert max(batch.newest_rows for batch in pair.decode.engine.batches if not is_mixed(batch)) <= 3
        await pair.empty()


async def test_a_worker_reports_the_load_of_its_steps() -> None:
    async with WorkerPair(both=True, pages=600) as pair:
        _, answers = await decoding(pair, 1)
        assert 3 < pair.decode.worker.report.load().decode_context_tokens <= 3 + LONG.max_tokens
        pair.decode.engine.resume()
        (output,) = answers.values()
        await until(lambda: output.finish)
        await pair.empty()
        # A step is learned from behind its news.
        await until(lambda: pair.decode.worker._loop._busy_since is None)
        load, inspection = pair.decode.worker.report.load(), pair.decode.worker.report.inspect()
        assert load.cost.observed > LONG.max_tokens - 2 - LEARN_EVERY  # told of with the next ones
        assert replace(load.cost, error=0.0, observed=0) != UNMEASURED
        assert inspection.step_cost_error == load.cost.error > 0
