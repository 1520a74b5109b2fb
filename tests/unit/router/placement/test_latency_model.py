"""Tests of the predicted cost of a prompt and an answer at a worker."""

from dataclasses import replace

import pytest

from router.placement.latency_model import AnswerPrediction, PromptPrediction, exposed_transfer_s, prefill_time
from tandem.cost_model.prefix_reload import ReloadOption
from tandem.cost_model.step_work import StepWork, chunk_pairs
from tandem.protocol.lifecycle.events import TransferStats
from tandem.protocol.lifecycle.placement import PromptCost
from tandem.protocol.messages import Assignment, Role, TierLoad
from tandem.protocol.policy_name import PolicyName
from tandem.protocol.prefixes import KvTier
from tandem.settings.slo import SloClass
from tests.unit.router.fleets import H200, TestFleet, load, need

STRICT = SloClass("strict", ttft_s=2.0, itl_s=0.010)
LOOSE = SloClass("loose", itl_s=0.040)
BIG = {"pages_total": 10_000, "max_step_tokens": 2048, "max_batch_requests": 256}
PRIORITY = Assignment(Role.BOTH, PolicyName.DECODE_PRIORITY)


@pytest.fixture
def at() -> TestFleet:
    return TestFleet()


def step_s(at: TestFleet, tokens: int = 200_000) -> float:
    """Seconds between the chunks of a prompt at "w"."""
    seconds, steps = prefill_time(at.workers["w"], tokens, tokens * 1000.0)
    return seconds / steps


def test_without_answers_prompts_have_whole_steps(at: TestFleet) -> None:
    worker = at.add("w", Role.PREFILL, **BIG)
    for tokens, steps in ((1, 1), (2048, 1), (2049, 2), (10_000, 5)):
        assert prefill_time(worker, tokens, 0.0)[1] == steps
    whole_s = H200.base_s + (2048 - 200) * H200.token_s
    assert prefill_time(worker, 4096, 0.0)[0] == pytest.approx(2 * whole_s)
    assert prefill_time(worker, 4096, 1e9)[0] == pytest.approx(2 * whole_s + 1e9 * H200.pair_s)


def test_steps_are_as_long_as_the_answers_there_tolerate(at: TestFleet) -> None:
    """The tightest class decides; an answer without a target has the token budget."""
    worker = at.add("w", Role.BOTH, assignment=PRIORITY, **BIG)
    at.answers("w", 4, slo=LOOSE)
    assert step_s(at) == pytest.approx(0.040 / worker.cost.margin, rel=0.02)
    at.answers("w", 1, slo=STRICT)
    assert step_s(at) == pytest.approx(0.010 / worker.cost.margin, rel=0.02)
    worker.remove_answer("answer-4")
    assert step_s(at) == pytest.approx(0.040 / worker.cost.margin, rel=0.02)
    at.answers("w", 1)
    budget = 512 - 5
    expected_s = worker.cost.seconds(StepWork(budget, budget * 1000.0, 5, worker.decode_context))
    assert step_s(at) == pytest.approx(expected_s, rel=0.02)


def test_a_worst_gap_bounds_steps_as_well(at: TestFleet) -> None:
    worker = at.add("w", Role.BOTH, assignment=PRIORITY, **BIG)
    at.answers("w", 4, slo=replace(LOOSE, worst_gap_s=0.020))
    assert step_s(at) == pytest.approx(0.020 / worker.cost.margin, rel=0.02)


def test_where_answers_tolerate_no_prompts_these_have_rare_steps(at: TestFleet) -> None:
    worker = at.add("w", Role.BOTH, assignment=PRIORITY, **BIG)
    at.answers("w", 60, slo=replace(STRICT, itl_s=1.02 * worker.cost.decode_step_seconds(60, 60 * 64)))
    seconds, steps = prefill_time(worker, 1000, 0.0)
    assert steps == 1
    assert seconds > 127 * worker.step_s, "behind the steps without prompts"


def test_a_prompt_waits_for_those_before_it(at: TestFleet) -> None:
    worker = at.add("w", Role.PREFILL, **BIG)
    alone = PromptPrediction(worker, 1000, 0)
    at.prompt("w", 3000)
    queued = PromptPrediction(worker, 1000, 0)
    assert queued.ttft_s == pytest.approx(prefill_time(worker, 4000, chunk_pairs(3000, 0) + chunk_pairs(1000, 0))[0])
    assert queued.ttft_s > alone.ttft_s + 2000 * H200.token_s
    assert queued.cost_s == queued.ttft_s
    assert queued.compute_s == pytest.approx(1000 * H200.token_s, rel=0.01), "no step more: it shares the last one"


def test_cached_tokens_are_not_computed_but_the_last(at: TestFleet) -> None:
    worker = at.add("w", Role.PREFILL, **BIG)
    prompt = PromptPrediction(worker, 1000, 1000)
    assert (prompt.cached, prompt.computed) == (999, 1)
    assert prompt.ttft_s < PromptPrediction(worker, 1000, 0).ttft_s


def test_pages_are_loaded_while_earlier_prompts_are_computed(at: TestFleet) -> None:
    worker = at.add("w", Role.PREFILL, **BIG)
    worker.report(replace(load(), cost=H200, tiers=(TierLoad(KvTier.HOST, 0.001, 10),)))
    reloads = [ReloadOption(16_000, {KvTier.HOST: 90})]
    prompt = PromptPrediction(worker, 20_000, 1600, reloads=reloads)
    assert (prompt.cached, prompt.reloaded, prompt.computed) == (17_600, 16_000, 2400)
    assert prompt.reload_s == pytest.approx(0.1)
    rest_s = PromptPrediction(worker, 20_000, 17_600).ttft_s
    assert prompt.ttft_s == pytest.approx(0.1 + rest_s)
    assert prompt.prompt_cost == PromptCost(1600, 16_000, 2400, 0.0, prompt.reload_s, prompt.compute_s)
    assert prompt.prompt_cost.ttft_s == pytest.approx(prompt.ttft_s)
    at.prompt("w", 8000)
    behind = PromptPrediction(worker, 20_000, 1600, reloads=reloads)
    loaded = PromptPrediction(worker, 20_000, 17_600)
    assert behind.ttft_s == pytest.approx(loaded.ttft_s), "the prompts before take longer"
    assert behind.prompt_cost.ttft_s == pytest.approx(behind.ttft_s)


def test_what_is_faster_to_compute_is_not_loaded(at: TestFleet) -> None:
    worker = at.add("w", Role.PREFILL, **BIG)
    worker.report(replace(load(), cost=H200, tiers=(TierLoad(KvTier.DISK, 0.01),)))
    prompt = PromptPrediction(worker, 2000, 0, reloads=[ReloadOption(1600, {KvTier.DISK: 100})])
    assert (prompt.reloaded, prompt.reload_s, prompt.computed) == (0, 0.0, 2000)
    assert prompt.ttft_s == PromptPrediction(worker, 2000, 0).ttft_s


def test_a_missed_first_token_counts_and_so_does_what_answers_wait(at: TestFleet) -> None:
    worker = at.add("w", Role.BOTH, **BIG)
    prompt = PromptPrediction(worker, 2000, 0)
    assert PromptPrediction(worker, 2000, 0, left_s=prompt.ttft_s).cost_s == prompt.cost_s
    late = PromptPrediction(worker, 2000, 0, left_s=0.99 * prompt.ttft_s)
    assert (late.cost_s, late.misses, prompt.misses) == (prompt.cost_s, 1, 0)
    at.answers("w", 10)
    beside = PromptPrediction(worker, 2000, 0)
    assert beside.cost_s - beside.ttft_s == pytest.approx(10 * (beside.ttft_s - worker.step_s), rel=1e-6)


def test_an_answer_costs_its_own_steps_and_what_it_adds_to_those_of_others(at: TestFleet) -> None:
    worker = at.add("w", Role.DECODE, **BIG)
    at.answers("w", 10, slo=LOOSE)
    request = need(1000, answer=100, slo=LOOSE)
    answer = AnswerPrediction(worker, 0, request)
    added_s = H200.row_s + 1050 * H200.context_s
    assert answer.step_s == pytest.approx(worker.step_s + added_s)
    assert answer.cost_s == pytest.approx(100 * (answer.step_s + 10 * added_s))


def test_every_target_that_an_answer_breaks_counts(at: TestFleet) -> None:
    """The targets of the answers there count as they are, its own with the margin."""
    worker = at.add("w", Role.DECODE, **BIG)
    at.answers("w", 40, context=1000)
    request = need(20_000, answer=100)
    step_s = AnswerPrediction(worker, 0, request).step_s
    free_s = AnswerPrediction(worker, 0, request).cost_s
    own = SloClass("own", itl_s=1.01 * step_s)
    missed = AnswerPrediction(worker, 0, need(20_000, answer=100, slo=own))
    assert (missed.cost_s, missed.misses) == (pytest.approx(free_s), 1)
    kept = replace(own, itl_s=1.01 * worker.cost.margin * step_s)
    assert AnswerPrediction(worker, 0, need(20_000, answer=100, slo=kept)).misses == 0
    at.answers("w", 3, slo=replace(own, itl_s=step_s))
    at.answers("w", 2, slo=LOOSE)
    assert AnswerPrediction(worker, 0, request).misses == 3


def test_what_is_computed_later_hides_the_transfer_of_what_came_before(at: TestFleet) -> None:
    """The last chunk's KV cannot be hidden; of a slow wire all that computing does not outlast."""
    prefill, decode = at.add("p", Role.PREFILL, **BIG), at.add("d", Role.DECODE, **BIG)
    prompt, answer = PromptPrediction(prefill, 8000, 0), AnswerPrediction(decode, 0, need(8000))
    assert exposed_transfer_s(prompt, answer) == 0.0
    exposed = []
    for wire_us in (10**4, 10**7):
        for _ in range(300):
            decode.learn_transfer(TransferStats(2**24, 8, "UCX", wire_us))
        exposed.append((decode.kv.sent_pages(8000) * decode.page_transfer_s, exposed_transfer_s(prompt, answer)))
    (fast_s, last_s), (slow_s, rest_s) = exposed
    last = (8000 - 1) % 2048 + 1
    assert fast_s < prompt.compute_s
    assert last_s == pytest.approx(fast_s * last / 8000)
    assert rest_s == pytest.approx(max(slow_s - prompt.compute_s, slow_s * last / 8000))
