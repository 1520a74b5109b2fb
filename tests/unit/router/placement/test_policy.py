"""Tests of the choice of workers by predicted cost, and that few workers are compared."""

import random
from dataclasses import replace
from typing import Any

import pytest

from router.placement import policy as policy_module
from router.placement.latency_model import PromptPrediction
from router.placement.policy import Placement, PlacementPolicy
from router.placement.queue import QueuedRequest
from router.placement.worker_state import AnswerWork, PromptWork, WorkerState
from tandem.protocol.lifecycle.events import TransferStats
from tandem.protocol.messages import Role, TierLoad
from tandem.protocol.mode import Mode
from tandem.protocol.prefixes import KvTier
from tandem.settings.slo import SloClass
from tests.unit.router.fleets import H200, MODEL, TestFleet, load, names, need

STRICT = SloClass("strict", ttft_s=2.0, itl_s=0.010)
RELAXED = SloClass("relaxed", ttft_s=2.0, itl_s=0.2)
BIG = {"pages_total": 10_000, "max_step_tokens": 2048, "max_batch_requests": 256}


def pages(count: int) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in range(count)]


@pytest.fixture
def at() -> TestFleet:
    return TestFleet()


def placed(at: TestFleet, request: QueuedRequest, mode: Mode = Mode.ADAPTIVE) -> Placement:
    placement = PlacementPolicy(mode).place(request, at.fleet, 0.0)
    assert placement is not None
    return placement


def test_a_prompt_goes_where_its_beginning_is_unless_too_much_waits_there(at: TestFleet) -> None:
    for name in ("p0", "p1", "p2"):
        at.add(name, Role.PREFILL, **BIG)
    at.add("d", Role.DECODE, **BIG)
    digests = tuple(pages(125))
    at.fleet.prefixes.store(at.workers["p2"].slot, digests[:100])
    asked = need(2000, digests=digests)
    pair = placed(at, asked)
    assert names(pair) == ("p2", "d")
    assert (pair.cached_tokens, pair.computed_tokens) == (1600, 400)
    at.prompt("p2", 500)
    assert names(placed(at, asked)) == ("p2", "d"), "900 tokens in all are less than 2000"
    at.prompt("p2", 1900)
    assert names(placed(at, asked)) == ("p0", "d")


def test_a_prompt_goes_where_it_is_loaded_sooner_than_computed(at: TestFleet) -> None:
    for name in ("p0", "p1", "p2"):
        at.add(name, Role.PREFILL, kv_tier_pages=1000, **BIG)
    at.add("d", Role.DECODE, **BIG)
    digests, holder = tuple(pages(125)), at.workers["p2"]
    asked = need(2000, digests=digests)
    at.fleet.prefixes.store(holder.slot, digests, KvTier.HOST)
    assert names(placed(at, asked)) == ("p0", "d"), "it has not reported its tiers"

    def report(page_s: float, queued: int = 0) -> None:
        tiers = (TierLoad(KvTier.HOST, page_s, queued), TierLoad(KvTier.DISK))
        holder.report(replace(load(), cost=H200, tiers=tiers))

    report(1e-4)
    chosen = placed(at, asked)
    assert names(chosen) == ("p2", "d")
    # The page of the last token is computed.
    assert (chosen.prompt.resident_tokens, chosen.prompt.reloaded_tokens, chosen.computed_tokens) == (0, 1984, 16)
    assert (chosen.cached_tokens, chosen.reload_pages) == (1984, {KvTier.HOST: 124})
    assert chosen.ttft_s == pytest.approx(0.0124 + chosen.prompt.compute_s)
    report(1e-4, 400)
    assert names(placed(at, asked)) == ("p0", "d"), "too much is loaded before"
    report(1e-3)
    assert names(placed(at, asked)) == ("p0", "d"), "the tier is slow"
    report(1e-4)
    at.fleet.prefixes.store(at.workers["p1"].slot, digests[:100])
    assert names(placed(at, asked)) == ("p1", "d"), "most of it is on a device"


def test_pages_of_several_groups_are_loaded_for_a_page_of_the_index(at: TestFleet) -> None:
    windows = replace(MODEL, kv_windows=(None, None, 64))
    worker = at.add("w", Role.BOTH, model=windows, kv_tier_pages=1000, **BIG)
    worker.report(replace(load(), cost=H200, tiers=(TierLoad(KvTier.HOST, 1e-5),)))
    digests = tuple(pages(100))
    at.fleet.prefixes.store(worker.slot, digests, KvTier.HOST)
    chosen = placed(at, need(1601, digests=digests))
    # Two groups without a window, and 63 tokens before the next one in the third group.
    assert chosen.reload_pages == {KvTier.HOST: 2 * 100 + 4}


def test_a_worker_is_looked_at_for_what_others_do_not_hold(at: TestFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Holding what those hold that are asked anyway is no reason: all hold the beginning of all prompts."""
    for number in range(6):
        worker = at.add(f"w{number}", Role.BOTH, **BIG)
        at.answers(f"w{number}", 6 - number)
        at.fleet.prefixes.store(worker.slot, pages(8))
    at.fleet.prefixes.store(at.workers["w1"].slot, pages(60))
    looked: list[str] = []
    made = PromptPrediction.__init__

    def note(prediction: PromptPrediction, worker: WorkerState, *rest: Any, **more: Any) -> None:
        looked.append(worker.peer.worker_id)
        made(prediction, worker, *rest, **more)

    monkeypatch.setattr(PromptPrediction, "__init__", note)
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
    prediction = placed(at, need(160, digests=digests))
    assert (prediction.cached_tokens, prediction.computed_tokens) == (159, 1)


def test_an_answer_goes_where_steps_are_short(at: TestFleet) -> None:
    at.add("p", Role.PREFILL, **BIG)
    at.add("d0", Role.DECODE, **BIG)
    at.add("d1", Role.DECODE, **BIG)
    at.answers("d0", 10, context=4000)
    at.answers("d1", 20, context=200)
    assert names(placed(at, need())) == ("p", "d1")


def test_an_answer_goes_where_its_target_holds_with_what_is_kept_for_noise(at: TestFleet) -> None:
    """Placement uses the margin of admission, which else would admit it for a worker that it does not go to."""
    at.add("p", Role.PREFILL, **BIG)
    for name, rows, context in (("many", 60, 100), ("long", 6, 8000)):
        at.add(name, Role.DECODE, **BIG)
        at.answers(name, rows, context=context)
    assert names(placed(at, need())) == ("p", "long")
    step_s = at.workers["long"].step_s
    for times, chosen in ((1.1, "many"), (1.4, "long")):
        slo = SloClass("c", itl_s=times * step_s)
        assert names(placed(at, replace(need(), slo=slo))) == ("p", chosen)


def test_an_answer_goes_where_it_breaks_no_target(at: TestFleet) -> None:
    """Steps of 9.9 ms would become 10.1 for ten answers who were promised 10; where they are longer, nobody was."""
    at.add("p", Role.PREFILL, **BIG)
    at.add("tight", Role.DECODE, **BIG)
    at.answers("tight", 10, context=19_300, slo=STRICT)
    assert at.workers["tight"].step_s == pytest.approx(9.9e-3, rel=0.01)
    at.add("loose", Role.DECODE, **BIG)
    at.answers("loose", 10, context=30_000, slo=RELAXED)
    assert names(placed(at, need(8000))) == ("p", "loose")
    at.workers["tight"].remove_answer("answer-0")
    at.workers["tight"].remove_answer("answer-1")
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
    at.workers["full"].remove_answer("answer-0")
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
        assert PlacementPolicy(Mode.DISAGGREGATED).place(need(16), at.fleet, 0.0) is None, "rather waits"
        at.remove("p")
        assert names(placed(at, need(16), Mode.DISAGGREGATED)) == ("b", "b"), "nobody else is there"

    def test_colocated_always_does(self, at: TestFleet) -> None:
        at.prompt("b", 4000)
        assert names(placed(at, need(2000), Mode.COLOCATED)) == ("b", "b")
        at.prompt("b", 4000)
        assert PlacementPolicy(Mode.COLOCATED).place(need(2000), at.fleet, 0.0) is None

    def test_colocated_finds_the_one_worker_that_has_room_for_both(self, at: TestFleet) -> None:
        for number in range(6):
            at.add(f"b{number}", Role.BOTH, **BIG)
            at.answers(f"b{number}", number)
            if number != 5:
                at.prompt(f"b{number}", 5000)
        at.prompt("b", 5000)
        assert names(placed(at, need(2000), Mode.COLOCATED)) == ("b5", "b5")

    @pytest.mark.parametrize("mode", Mode)
    def test_could_serve_follows_the_mode(self, at: TestFleet, mode: Mode) -> None:
        """Idle workers and what is asked of them: who would never be chosen is none to wait for."""
        at.add("d", Role.DECODE, **BIG)
        at.add("small", Role.BOTH)
        at.fleet.set_live(at.workers["b"], live=False)
        policy = PlacementPolicy(mode)

        def agreed(asked: QueuedRequest) -> bool:
            chosen = policy.place(asked, at.fleet, 0.0) is not None
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
        at.workers["b"].learn_transfer(TransferStats(2**24, 8, "UCX", 10**7))
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


def test_transfers_count_what_the_receiver_does_not_hold(at: TestFleet) -> None:
    at.add("p", Role.PREFILL, **BIG)
    for name in ("d0", "d1"):
        worker = at.add(name, Role.DECODE, **BIG)
        for _ in range(200):
            worker.learn_transfer(TransferStats(2**24, 8, "TCP", 10**8))
    at.answers("d1", 2)
    digests = tuple(pages(125))
    assert names(placed(at, need(2000, digests=digests))) == ("p", "d0")
    at.fleet.prefixes.store(at.workers["d1"].slot, digests)
    assert names(placed(at, need(2000, digests=digests))) == ("p", "d1")


def test_a_prediction_says_what_to_expect(at: TestFleet) -> None:
    at.add("p0", Role.PREFILL, **BIG)
    at.add("p1", Role.PREFILL, **BIG)
    at.prompt("p0", 4000)
    at.prompt("p1", 2000)
    at.add("d", Role.DECODE, **BIG)
    prediction = placed(at, need(1000))
    # 3000 tokens in steps of 2048 and 952, each with 200 tokens for nothing.
    assert prediction.ttft_s == pytest.approx(2 * 4e-3 + (1848 + 752) * 2e-5, rel=0.02)
    assert prediction.itl_s == pytest.approx(4e-3 + 1e-5 + 1030 * 3e-8, rel=0.01)
    assert prediction.runner_up_s - prediction.cost_s == pytest.approx(2000 * 2e-5, rel=0.2)
    alone = PlacementPolicy().predict_prompt(need(1000), at.fleet)
    assert alone is not None
    assert alone.ttft_s == prediction.ttft_s


def test_the_expected_length_of_the_answer_counts(at: TestFleet) -> None:
    """A busy decode worker that holds the prompt is worth more than an idle one if answers are short."""
    at.add("p", Role.PREFILL, **BIG)
    for name in ("d0", "d1"):
        worker = at.add(name, Role.DECODE, **BIG)
        for _ in range(100):
            worker.learn_transfer(TransferStats(2**24, 8, "TCP", 2 * 10**7))
    at.answers("d1", 20, context=1000)
    digests = tuple(pages(125))
    at.fleet.prefixes.store(at.workers["d1"].slot, digests)
    asked = need(2000, answer=1000, digests=digests)
    assert names(placed(at, asked)) == ("p", "d0")
    asked.mean_tokens = 3.0
    assert names(placed(at, asked)) == ("p", "d1")


@pytest.mark.parametrize("shared", [0, 8])
@pytest.mark.parametrize("mode", list(Mode))
def test_few_workers_are_as_good_as_all(mode: Mode, shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The few that it compares hold the choice of a policy that compares all of them; all prompts may begin alike."""
    dice, few = random.Random(3), policy_module._CANDIDATES
    at = TestFleet()
    for number in range(24):
        role = Role.BOTH if mode is not Mode.DISAGGREGATED else (Role.PREFILL, Role.DECODE)[number % 2]
        at.add(f"w{number}", role, **BIG)
    system = pages(shared)
    prompts = [(*system, *(dice.randbytes(16) for _ in range(125 - shared))) for _ in range(30)]
    for name in at.workers:
        for prompt in dice.sample(prompts, 3):
            at.fleet.prefixes.store(at.workers[name].slot, prompt[: dice.randrange(shared, 125)])
    policy = PlacementPolicy(mode)
    ratios = []
    for number in range(300):
        asked = need(2000, answer=300, digests=dice.choice(prompts))
        monkeypatch.setattr(policy_module, "_CANDIDATES", 24)
        right = policy.place(asked, at.fleet, 0.0)
        monkeypatch.setattr(policy_module, "_CANDIDATES", few)
        chosen = policy.place(asked, at.fleet, 0.0)
        assert chosen is not None
        assert right is not None
        ratios.append(chosen.cost_s / right.cost_s)
        prefill, decode = names(chosen) or ("", "")
        at.workers[prefill].add_prompt(f"r{number}", PromptWork(chosen.computed_tokens))
        at.workers[decode].add_answer(f"r{number}", AnswerWork(20, 2150, RELAXED))
        for old in range(max(0, number - 30), number - 20):
            for worker in at.workers.values():
                worker.remove_prompt(f"r{old}")
        for worker in at.workers.values():
            worker.remove_answer(f"r{number - 120}")
    assert sum(ratios) / len(ratios) < 1.01
    assert max(ratios) < 1.2


def test_a_target_that_would_be_missed_is_worth_a_longer_step(at: TestFleet) -> None:
    """A prompt that waited goes where it is in time, even where that delays others."""
    slow = replace(H200, token_s=4e-5)
    at.add("slow", Role.PREFILL, cost=slow, **BIG)
    at.add("b", Role.BOTH, **BIG)
    at.answers("b", 60, slo=RELAXED)
    asked = need(2000, slo=SloClass("soon", ttft_s=0.1))
    policy = PlacementPolicy()
    assert names(policy.place(asked, at.fleet, 0.0)) == ("slow", "b")
    assert names(policy.place(asked, at.fleet, 0.05)) == ("b", "b")
    assert names(policy.place(asked, at.fleet, 0.5)) == ("slow", "b"), "missed everywhere: nobody else is delayed"


def test_no_prediction_without_a_worker(at: TestFleet) -> None:
    policy = PlacementPolicy()
    assert policy.predict_prompt(need(), at.fleet) is None
    assert policy.predict_answer(need(slo=STRICT), at.fleet, 0) is None
    at.add("p", Role.PREFILL, cost=replace(H200, observed=0), **BIG)
    assert policy.predict_prompt(need(), at.fleet) is not None
    at.add("d", Role.DECODE, cost=replace(H200, observed=0), **BIG)
    assert policy.predict_answer(need(slo=STRICT), at.fleet, 0) is None, "nothing was measured"


def test_the_gap_is_predicted_with_the_answers_ahead(at: TestFleet) -> None:
    for name in ("d0", "d1"):
        at.add(name, Role.DECODE, **BIG)
    policy, asked = PlacementPolicy(), need(1000, slo=STRICT)
    steps = [policy.predict_answer(asked, at.fleet, ahead) for ahead in (0, 20)]
    assert all(gap is not None for gap in steps)
    first, later = (gap for gap in steps if gap is not None)
    assert first.step_s == pytest.approx(H200.base_s + H200.row_s + 1030 * H200.context_s)
    assert later.step_s - first.step_s == pytest.approx(10 * (H200.row_s + 1030 * H200.context_s)), "half of them each"
    assert first.target_s == pytest.approx(STRICT.itl_s / at.workers["d0"].cost.margin)
