"""Where predicted cost sends requests, and that it looks at few workers to find that out."""

import math
import random
from dataclasses import replace

import pytest

from costs.chunks import GAP_NOISE
from router.cost_placement import CostPlacement
from router.placed_work import AnswerWork, PromptWork
from router.placement import Mode, Need, Pair
from router.slo import SloClass
from router.step_forecast import PromptForecast
from router.worker_books import WorkerBooks
from tests.unit.router.fleets import H200, TestFleet, names, need
from wire.messages import Duty, Role
from wire.policy_name import PolicyName
from wire.timeline import TransferStats

STRICT = SloClass("strict", ttft_s=2.0, itl_s=0.010)
RELAXED = SloClass("relaxed", ttft_s=2.0, itl_s=0.2)
BIG = {"pages_total": 10_000, "max_step_tokens": 2048, "max_batch_requests": 256}


def pages(count: int) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in range(count)]


@pytest.fixture
def at() -> TestFleet:
    return TestFleet()


def placed(at: TestFleet, asked: Need, mode: Mode = Mode.ADAPTIVE) -> Pair:
    pair = CostPlacement(mode).choose(asked, at.fleet)
    assert pair is not None
    return pair


def test_a_prompt_goes_where_its_beginning_is_unless_too_much_waits_there(at: TestFleet) -> None:
    for name in ("p0", "p1", "p2"):
        at.add(name, Role.PREFILL, **BIG)
    at.add("d", Role.DECODE, **BIG)
    digests = tuple(pages(125))
    at.fleet.prefixes.store(at.workers["p2"].slot, digests[:100])
    asked = need(2000, digests=digests)
    pair = placed(at, asked)
    assert names(pair) == ("p2", "d")
    assert pair.forecast is not None
    assert (pair.forecast.cached_tokens, pair.forecast.computed_tokens) == (1600, 400)
    at.prompt("p2", 500)
    assert names(placed(at, asked)) == ("p2", "d"), "900 tokens in all are less than 2000"
    at.prompt("p2", 1900)
    assert names(placed(at, asked)) == ("p0", "d")


def test_a_worker_is_looked_at_for_what_others_do_not_hold(at: TestFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Holding what those hold that are asked anyway is no reason: all hold the beginning of all prompts."""
    for number in range(6):
        worker = at.add(f"w{number}", Role.BOTH, **BIG)
        at.answers(f"w{number}", 6 - number)
        at.fleet.prefixes.store(worker.slot, pages(8))
    at.fleet.prefixes.store(at.workers["w1"].slot, pages(60))
    looked: list[str] = []
    made = PromptForecast.__init__

    def note(forecast: PromptForecast, worker: WorkerBooks, *rest: float) -> None:
        looked.append(worker.peer.worker_id)
        made(forecast, worker, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(PromptForecast, "__init__", note)
    placed(at, need(2000, digests=tuple(pages(8)) + (b"x" * 16,) * 100))
    assert sorted(looked) == ["w4", "w5"]
    looked.clear()
    placed(at, need(2000, digests=tuple(pages(125))))
    assert sorted(looked) == ["w1", "w4", "w5"], "one holds more"


def test_the_last_token_is_computed_whatever_is_cached(at: TestFleet) -> None:
    at.add("p", Role.PREFILL, **BIG)
    at.add("d", Role.DECODE, **BIG)
    digests = tuple(pages(10))
    at.fleet.prefixes.store(at.workers["p"].slot, digests)
    forecast = placed(at, need(160, digests=digests)).forecast
    assert forecast is not None
    assert (forecast.cached_tokens, forecast.computed_tokens) == (159, 1)


def test_an_answer_goes_where_steps_are_short(at: TestFleet) -> None:
    at.add("p", Role.PREFILL, **BIG)
    at.add("d0", Role.DECODE, **BIG)
    at.add("d1", Role.DECODE, **BIG)
    at.answers("d0", 10, context=4000)
    at.answers("d1", 20, context=200)
    assert names(placed(at, need())) == ("p", "d1")


def test_an_answer_goes_where_its_target_holds_with_what_is_kept_for_noise(at: TestFleet) -> None:
    """As the gate counts, which else would let it in for the sake of a worker that it does not go to."""
    at.add("p", Role.PREFILL, **BIG)
    for name, rows, context in (("many", 60, 100), ("long", 6, 8000)):
        at.add(name, Role.DECODE, **BIG)
        at.answers(name, rows, context=context)
    assert names(placed(at, need())) == ("p", "long")
    step_s = at.workers["long"].step_s
    for times, chosen in ((1.1, "many"), (1.4, "long")):
        slo = SloClass("c", itl_s=times * step_s)
        assert names(placed(at, replace(need(), slo=slo))) == ("p", chosen)


LOOSE = SloClass("loose", itl_s=0.040)
PRIORITY = Duty(Role.BOTH, PolicyName.DECODE_PRIORITY)


def test_prompts_are_expected_in_the_chunks_that_the_answers_there_bear(at: TestFleet) -> None:
    """A class's gap, the tightest class's if there are two."""
    worker = at.add("w", Role.BOTH, duty=PRIORITY, **BIG)
    at.answers("w", 4, slo=LOOSE)
    assert PromptForecast(worker, 8000, 0).longest_s == pytest.approx(0.040 / GAP_NOISE, rel=0.01)
    at.answers("w", 1, slo=STRICT)
    assert PromptForecast(worker, 8000, 0).longest_s == pytest.approx(0.010 / GAP_NOISE, rel=0.01)
    worker.unbook_decode("answer-4")
    assert PromptForecast(worker, 8000, 0).longest_s == pytest.approx(0.040 / GAP_NOISE, rel=0.01)
    at.answers("w", 1)
    assert PromptForecast(worker, 8000, 0).longest_s == pytest.approx(0.008 / GAP_NOISE, rel=0.01)


def test_an_answer_with_no_gap_to_spare_stays_where_a_handover_would_be_too_long(at: TestFleet) -> None:
    """Beside prompts a hand-over takes three long steps; staying takes two, which are as short as they have to be. Long
    answers can bear it once.
    """
    balanced = SloClass("balanced", ttft_s=5.0, itl_s=0.025)
    at.add("p", Role.PREFILL, **BIG)
    at.add("d", Role.BOTH, duty=PRIORITY, **BIG)
    at.answers("d", 3, slo=balanced, spare=5)
    at.prompt("d", 1000)
    stays = placed(at, replace(need(1000, 40), slo=balanced))
    assert names(stays) == ("d", "d")
    assert stays.forecast is not None
    assert stays.forecast.first_gap_s == math.inf, "the first token will wait for the second"
    soon = placed(at, replace(need(1000, 40), slo=balanced, waited_s=4.85))
    assert names(soon) == ("d", "d")
    assert soon.forecast is not None
    assert soon.forecast.first_gap_s == 0.025, "it cannot, so the worker is told"
    goes = placed(at, replace(need(1000, 400), slo=balanced))
    assert names(goes) == ("p", "d")
    assert goes.forecast is not None
    assert goes.forecast.first_gap_s == math.inf


def test_an_answer_goes_where_it_breaks_no_target(at: TestFleet) -> None:
    """Steps of 9.9 ms would become 10.1 for ten answers who were promised 10; where they are longer, nobody was."""
    at.add("p", Role.PREFILL, **BIG)
    at.add("tight", Role.DECODE, **BIG)
    at.answers("tight", 10, context=19_300, slo=STRICT)
    assert at.workers["tight"].step_s == pytest.approx(9.9e-3, rel=0.01)
    at.add("loose", Role.DECODE, **BIG)
    at.answers("loose", 10, context=30_000, slo=RELAXED)
    assert names(placed(at, need(8000))) == ("p", "loose")
    at.workers["tight"].unbook_decode("answer-0")
    at.workers["tight"].unbook_decode("answer-1")
    assert names(placed(at, need(8000))) == ("p", "tight")


def test_where_targets_are_broken_already_nothing_more_breaks(at: TestFleet) -> None:
    at.add("p", Role.PREFILL, **BIG)
    at.add("tight", Role.DECODE, **BIG)
    at.answers("tight", 3, context=19_300 * 10 // 3, slo=STRICT)
    at.add("broken", Role.DECODE, **BIG)
    at.answers("broken", 10, context=30_000, slo=STRICT)
    assert at.workers["tight"].step_s < STRICT.itl_s < at.workers["broken"].step_s
    assert names(placed(at, need(8000))) == ("p", "broken")


def test_workers_are_asked_in_the_order_of_their_room(at: TestFleet) -> None:
    for name, used in (("full", 60), ("empty", 0), ("half", 30)):
        at.add(name, Role.DECODE)
        at.answers(name, 1, pages=used)
    assert [worker.peer.worker_id for worker in at.fleet.decodes] == ["empty", "half", "full"]
    at.workers["full"].unbook_decode("answer-0")
    assert next(iter(at.fleet.decodes)) is at.workers["full"]


def test_a_request_with_a_target_of_its_own_goes_where_it_is_kept(at: TestFleet) -> None:
    at.add("p", Role.PREFILL, **BIG)
    at.add("small", Role.DECODE, cost=replace(H200, base_s=9.9e-3), **BIG)
    at.add("large", Role.DECODE, cost=replace(H200, base_s=5e-3), **BIG)
    at.answers("large", 100, context=500)
    assert names(placed(at, need(4000, answer=2))) == ("p", "small")
    assert names(placed(at, need(4000, answer=2, slo=STRICT))) == ("p", "large")


class TestModes:
    @pytest.fixture
    def at(self) -> TestFleet:
        at = TestFleet()
        at.add("p", Role.PREFILL, **BIG)
        at.add("b", Role.BOTH, **BIG)
        return at

    def test_disaggregated_never_prefills_where_it_decodes(self, at: TestFleet) -> None:
        at.prompt("p", 4000)
        assert names(placed(at, need(16), Mode.DISAGGREGATED)) == ("p", "b")
        at.prompt("p", 4000)
        assert CostPlacement(Mode.DISAGGREGATED).choose(need(16), at.fleet) is None, "rather waits"
        at.remove("p")
        assert names(placed(at, need(16), Mode.DISAGGREGATED)) == ("b", "b"), "nobody else is there"

    def test_colocated_always_does(self, at: TestFleet) -> None:
        at.prompt("b", 4000)
        assert names(placed(at, need(2000), Mode.COLOCATED)) == ("b", "b")
        at.prompt("b", 4000)
        assert CostPlacement(Mode.COLOCATED).choose(need(2000), at.fleet) is None

    def test_colocated_finds_the_one_worker_that_has_room_for_both(self, at: TestFleet) -> None:
        for number in range(6):
            at.add(f"b{number}", Role.BOTH, **BIG)
            at.answers(f"b{number}", number)
            if number != 5:
                at.prompt(f"b{number}", 5000)
        at.prompt("b", 5000)
        assert names(placed(at, need(2000), Mode.COLOCATED)) == ("b5", "b5")

    @pytest.mark.parametrize("mode", Mode)
    def test_could_serve_says_whom_the_mode_lets_serve(self, at: TestFleet, mode: Mode) -> None:
        """Idle workers and what is asked of them: who would never be chosen is none to wait for."""
        at.add("d", Role.DECODE, **BIG)
        at.add("small", Role.BOTH)
        at.fleet.set_live(at.workers["b"], live=False)
        policy = CostPlacement(mode)

        def agreed(asked: Need) -> bool:
            chosen = policy.choose(asked, at.fleet) is not None
            assert policy.could_serve(asked, at.fleet) == chosen
            return chosen

        large = need(2000)
        assert agreed(large) == (mode is not Mode.COLOCATED), "p and d are large enough, small alone is not"
        assert agreed(need(2000, answer=1)), "one token needs no decode worker"
        assert agreed(need())
        at.remove("d")
        at.remove("p")
        assert not agreed(large)
        at.fleet.set_live(at.workers["b"], live=True)
        assert agreed(large) == (mode is not Mode.DISAGGREGATED), "b alone is large enough for its KV"
        at.remove("small")
        assert agreed(large), "nobody else is there"

    def test_adaptive_takes_a_short_prompt_to_an_idle_decode_worker(self, at: TestFleet) -> None:
        """No transfer, and nobody there to be kept waiting."""
        at.fleet.learn_transfer(at.workers["b"], TransferStats(2**24, 8, "UCX", 10**7))
        assert names(placed(at, need(100))) == ("b", "b")

    def test_adaptive_keeps_a_long_prompt_away_from_answers_with_a_tight_target(self, at: TestFleet) -> None:
        at.answers("b", 8, slo=STRICT)
        assert names(placed(at, need(2000))) == ("p", "b")

    def test_adaptive_takes_it_there_where_targets_bear_it_and_the_prefill_worker_is_busy(self, at: TestFleet) -> None:
        at.answers("b", 2, slo=RELAXED)
        at.prompt("p", 4000)
        assert names(placed(at, need(2000))) == ("b", "b")

    def test_adaptive_takes_what_the_decode_worker_holds_already(self, at: TestFleet) -> None:
        at.answers("b", 4, slo=STRICT)
        digests = tuple(pages(125))
        at.fleet.prefixes.store(at.workers["b"].slot, digests[:124])
        assert names(placed(at, need(2000, digests=digests))) == ("b", "b"), "16 tokens fit into a decode step"
        at.fleet.prefixes.drop(at.workers["b"].slot)
        assert names(placed(at, need(2000, digests=digests))) == ("p", "b")

    def test_an_answer_bears_as_many_long_steps_as_it_has_to_spare(self, at: TestFleet) -> None:
        """At P99 three of 400 gaps or more may be long, whatever others bear on average; then it is left alone."""
        at.answers("b", 3, slo=STRICT, spare=9)
        at.answers("b", 1, slo=STRICT, spare=3)
        at.prompt("p", 4000)
        asked = need(1000)
        for _ in range(3):
            pair = placed(at, asked)
            assert names(pair) == ("b", "b")
            assert pair.forecast is not None
            assert pair.forecast.prompt_steps == 1
            at.workers["b"].note_prompt_steps(pair.forecast.prompt_steps, pair.forecast.longest_s)
        assert names(placed(at, asked)) == ("p", "b")
        at.workers["b"].unbook_decode("answer-3")
        assert names(placed(at, asked)) == ("b", "b"), "the others have some left"

    def test_a_forecast_counts_with_the_steps_that_a_worker_makes(self, at: TestFleet) -> None:
        """Under decode-priority a prompt goes on in small chunks beside answers, none of which is too long for them."""
        duty = Duty(Role.BOTH, PolicyName.DECODE_PRIORITY, itl_target_s=STRICT.itl_s)
        at.add("c", Role.BOTH, duty=duty, **BIG)
        for name in ("b", "c"):
            at.answers(name, 4, slo=STRICT)
        alone = PromptForecast(at.workers["b"], 2000, 0)
        chunked = PromptForecast(at.workers["c"], 2000, 0)
        assert (alone.steps, alone.broken) == (1, 4)
        assert chunked.longest_s <= STRICT.itl_s
        assert chunked.steps == math.ceil(chunked.ttft_s / STRICT.itl_s)
        assert chunked.broken == 0

    def test_steps_that_are_not_long_for_a_class_cost_it_nothing(self, at: TestFleet) -> None:
        at.answers("b", 1, slo=STRICT)
        at.workers["b"].note_prompt_steps(5, STRICT.itl_s)
        assert at.workers["b"].long_per_s(STRICT) == 0
        at.workers["b"].note_prompt_steps(5, STRICT.itl_s + 1e-6)
        assert at.workers["b"].long_per_s(STRICT) > 0

    def test_an_answer_goes_where_prompts_do_not_come(self, at: TestFleet) -> None:
        """Nobody decodes at either, and one of them computes prompts all the time."""
        at.add("b2", Role.BOTH, **BIG)
        at.workers["b"].gaps(STRICT)
        for _ in range(20):
            at.workers["b"].note_prompt_steps(1, 0.040)
        assert (names(placed(at, need(2000, answer=300, slo=STRICT))) or ("", ""))[1] == "b2"
        at.clock.now += 60
        assert at.workers["b"].long_per_s(STRICT) < 0.01, "that is forgotten"

    def test_a_worst_gap_bears_none(self, at: TestFleet) -> None:
        at.answers("b", 4, slo=replace(STRICT, worst_gap_s=0.010))
        at.prompt("p", 4000)
        assert names(placed(at, need(1000))) == ("p", "b")


def test_transfers_count_what_the_receiver_does_not_hold(at: TestFleet) -> None:
    at.add("p", Role.PREFILL, **BIG)
    for name in ("d0", "d1"):
        worker = at.add(name, Role.DECODE, **BIG)
        for _ in range(200):
            at.fleet.learn_transfer(worker, TransferStats(2**24, 8, "TCP", 10**8))
    at.answers("d1", 2)
    digests = tuple(pages(125))
    assert names(placed(at, need(2000, digests=digests))) == ("p", "d0")
    at.fleet.prefixes.store(at.workers["d1"].slot, digests)
    assert names(placed(at, need(2000, digests=digests))) == ("p", "d1")


def test_a_forecast_says_what_to_expect(at: TestFleet) -> None:
    at.add("p0", Role.PREFILL, **BIG)
    at.add("p1", Role.PREFILL, **BIG)
    at.prompt("p0", 4000)
    at.prompt("p1", 2000)
    at.add("d", Role.DECODE, **BIG)
    forecast = placed(at, need(1000)).forecast
    assert forecast is not None
    # 3000 tokens in steps of 2048 and 952, each with 200 tokens for nothing.
    assert forecast.ttft_s == pytest.approx(2 * 4e-3 + (1848 + 752) * 2e-5, rel=0.02)
    assert forecast.itl_s == pytest.approx(4e-3 + 1e-5 + 1030 * 3e-8, rel=0.01)
    assert forecast.measured
    assert forecast.runner_up_s - forecast.cost_s == pytest.approx(2000 * 2e-5, rel=0.2)
    alone = CostPlacement().foresee(need(1000), at.fleet)
    assert alone is not None
    assert alone.ttft_s == forecast.ttft_s


def test_the_expected_answer_is_learnt(at: TestFleet) -> None:
    """Where answers are short, a busy decode worker that holds the prompt is worth more than an idle one."""
    policy = CostPlacement()
    at.add("p", Role.PREFILL, **BIG)
    for name in ("d0", "d1"):
        worker = at.add(name, Role.DECODE, **BIG)
        for _ in range(100):
            at.fleet.learn_transfer(worker, TransferStats(2**24, 8, "TCP", 2 * 10**7))
    at.answers("d1", 20, context=1000)
    digests = tuple(pages(125))
    at.fleet.prefixes.store(at.workers["d1"].slot, digests)
    asked = need(2000, answer=1000, digests=digests)
    assert names(policy.choose(asked, at.fleet)) == ("p", "d0")
    for _ in range(500):
        policy.learn_answer(3)
    assert names(policy.choose(asked, at.fleet)) == ("p", "d1")


@pytest.mark.parametrize("shared", [0, 8])
@pytest.mark.parametrize("mode", list(Mode))
def test_few_workers_are_as_good_as_all(mode: Mode, shared: int) -> None:
    """The few that it looks at hold the choice of a policy that looks at all of them; all prompts may begin alike."""
    dice = random.Random(3)
    at = TestFleet()
    for number in range(24):
        role = Role.BOTH if mode is not Mode.DISAGGREGATED else (Role.PREFILL, Role.DECODE)[number % 2]
        at.add(f"w{number}", role, **BIG)
    system = pages(shared)
    prompts = [(*system, *(dice.randbytes(16) for _ in range(125 - shared))) for _ in range(30)]
    for name in at.workers:
        for prompt in dice.sample(prompts, 3):
            at.fleet.prefixes.store(at.workers[name].slot, prompt[: dice.randrange(shared, 125)])
    few, everybody = CostPlacement(mode), CostPlacement(mode, best=24, hits=24)
    ratios = []
    for number in range(300):
        asked = need(2000, answer=300, digests=dice.choice(prompts))
        chosen, right = few.choose(asked, at.fleet), everybody.choose(asked, at.fleet)
        assert chosen is not None
        assert right is not None
        assert chosen.forecast is not None
        assert right.forecast is not None
        ratios.append(chosen.forecast.cost_s / right.forecast.cost_s)
        prefill, decode = names(chosen) or ("", "")
        at.workers[prefill].book_prefill(f"r{number}", PromptWork(chosen.forecast.computed_tokens))
        at.workers[decode].book_decode(f"r{number}", AnswerWork(20, 2150, RELAXED))
        for old in range(max(0, number - 30), number - 20):
            for worker in at.workers.values():
                worker.unbook_prefill(f"r{old}")
        for worker in at.workers.values():
            worker.unbook_decode(f"r{number - 120}")
    assert sum(ratios) / len(ratios) < 1.01
    assert max(ratios) < 1.2
