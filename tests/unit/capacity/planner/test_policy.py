"""Decisions, window by window: the wanted split, the moment of the change, and no reaction to noise."""

import random
from dataclasses import replace

import pytest

from tandem.capacity.planner.decision import Decision, Direction, Split, State
from tandem.capacity.planner.observation import Observation, TargetCounts
from tandem.capacity.planner.policy import GAIN, plan
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.lifecycle.spans import Phase
from tandem.settings.planner import Limits, Range
from tests.unit.capacity.planner.scenes import FACTS, offered, seen

FLIPS = Limits()
COUNTS = Limits(workers=Range(2, 32))


def decide(windows: list[Observation], limits: Limits = FLIPS, state: State | None = None) -> list[Decision]:
    """Applies each decision at once, unless a window says otherwise."""
    state, decisions = state or State(), []
    for window in windows:
        decisions.append(plan(window, limits, state))
        state = decisions[-1].state
    return decisions


def follow(loads: list[tuple[float, float, float]], limits: Limits, split: Split) -> list[Decision]:
    """Returns the decisions for loads on a cluster that applies them."""
    state, decisions = State(), []
    for load in loads:
        window = seen(*load, prefill=split.prefill, decode=split.decode, shared=split.shared)
        decisions.append(plan(window, limits, state))
        state = decisions[-1].state
        if decisions[-1].change is not Direction.NONE:
            split = decisions[-1].split
    return decisions


def changes(decisions: list[Decision]) -> list[Split]:
    return [decision.split for decision in decisions if decision.change is not Direction.NONE]


PROMPTS, ANSWERS = (45.0, 900.0, 10.0), (45.0, 90.0, 450.0)
"""Loads: the prompts of the first need nearly five of eight workers, the decoding of the second more than four."""


def test_the_split_follows_a_swing_and_then_stays() -> None:
    decisions = follow([PROMPTS] * 10 + [ANSWERS] * 10, FLIPS, Split(4, 4))
    assert [split.prefill for split in changes(decisions)] == [7, 1]
    first, second = (number for number, decision in enumerate(decisions) if decision.change is not Direction.NONE)
    assert first == FLIPS.required_windows - 1
    assert second == 10 + FLIPS.required_windows - 1


def test_the_wanted_split_has_the_smallest_larger_load_ratio() -> None:
    decision = plan(seen(*PROMPTS), FLIPS, State())
    load_ratios = {
        prefill: max(
            load_ratio.value
            for load_ratio in _load_ratios(plan(seen(*PROMPTS, prefill=prefill, decode=8 - prefill), FLIPS, State()))
        )
        for prefill in range(1, 8)
    }
    assert decision.split.prefill == min(load_ratios, key=lambda prefill: load_ratios[prefill])
    assert load_ratios[decision.split.prefill] < load_ratios[4] * (1 - GAIN)


def _load_ratios(decision: Decision) -> tuple[object, ...]:
    assert decision.prefill is not None
    assert decision.decode is not None
    return decision.prefill, decision.decode


def test_nothing_changes_while_all_targets_are_met() -> None:
    quiet = [(rate / 5, prompt, answer) for rate, prompt, answer in (PROMPTS, ANSWERS)]
    assert changes(follow([quiet[0]] * 20 + [quiet[1]] * 20, FLIPS, Split(4, 4))) == []


def test_a_change_must_be_wanted_in_several_windows() -> None:
    assert changes(follow([ANSWERS, PROMPTS] * 10, Limits(required_windows=3), Split(4, 4))) == []


def acted(decisions: list[Decision]) -> list[tuple[int, Direction]]:
    """Returns the windows with a change, and the changes."""
    return [
        (number, decision.change) for number, decision in enumerate(decisions) if decision.change is not Direction.NONE
    ]


def test_a_young_change_is_undone_only_when_that_is_wanted_for_longer() -> None:
    """Undoing has to be wanted for longer than other changes, and for longer than the cooldown after the last one."""
    loads = [PROMPTS] * 2 + [ANSWERS] * 6
    first = FLIPS.required_windows - 1, Direction.TO_PREFILL
    young = acted(follow(loads, FLIPS, Split(4, 4)))
    assert young == [first, (first[0] + FLIPS.required_windows_back, Direction.TO_DECODE)]
    old = acted(follow(loads, replace(FLIPS, settled=1), Split(4, 4)))
    assert old == [first, (first[0] + FLIPS.cooldown + 1, Direction.TO_DECODE)]


LOW, HIGH, HIGHER = (20.0, 900.0, 450.0), (90.0, 900.0, 450.0), (180.0, 900.0, 450.0)


def test_workers_that_were_just_taken_away_come_back_only_when_that_is_wanted_for_longer() -> None:
    limits = replace(COUNTS, cooldown=0)
    decisions = acted(follow([LOW] * limits.required_windows_down + [HIGH] * 6, limits, Split(8, 8)))
    down = limits.required_windows_down - 1
    assert decisions[:2] == [(down, Direction.DOWN), (down + limits.required_windows_back, Direction.UP)]


def test_repeating_a_change_takes_as_many_windows_and_undoing_by_removal_no_fewer() -> None:
    limits = replace(COUNTS, cooldown=0)
    up = limits.required_windows - 1
    more = acted(follow([HIGH] * 2 + [HIGHER] * 3, limits, Split(4, 4)))
    assert more[:2] == [(up, Direction.UP), (up + limits.required_windows, Direction.UP)]
    less = acted(follow([HIGH] * 2 + [LOW] * 9, limits, Split(4, 4)))
    assert less[:2] == [(up, Direction.UP), (up + limits.required_windows_down, Direction.DOWN)]


@pytest.mark.parametrize("seed", range(3))
def test_noise_changes_nothing_once_the_split_is_right(seed: int) -> None:
    """Loads and lengths vary by a quarter of the mean between windows: at most one intermediate step occurs."""
    dice = random.Random(seed)
    loads = [tuple(prompt * dice.uniform(0.75, 1.25) for prompt in PROMPTS) for _ in range(200)]
    made = changes(follow(loads, FLIPS, Split(7, 1)))  # type: ignore[arg-type]
    assert len(made) <= 1, made


def test_limits_of_roles_hold() -> None:
    limits = Limits(prefill=Range(2, 5), decode=Range(3, 6))
    decisions = follow([PROMPTS] * 6 + [ANSWERS] * 9, limits, Split(4, 4))
    assert [(split.prefill, split.decode) for split in changes(decisions)] == [(5, 3), (2, 6)]


def test_workers_are_added_until_there_is_headroom_and_removed_much_later() -> None:
    double = (90.0, 900.0, 450.0)
    up = follow([double] * 12, COUNTS, Split(4, 4))
    assert changes(up)
    last = changes(up)[-1]
    assert last.workers > 8
    half = tuple(prompt_load / (3 if number == 0 else 1) for number, prompt_load in enumerate(double))
    down = follow([double] * 4 + [half] * 30, COUNTS, last)  # type: ignore[list-item]
    kinds = [decision.change for decision in down if decision.change is not Direction.NONE]
    assert kinds[0] is Direction.DOWN
    first = next(number for number, decision in enumerate(down) if decision.change is Direction.DOWN)
    assert first >= 4 + COUNTS.required_windows_down - 1
    assert changes(down)[-1].workers < last.workers
    assert Direction.UP not in kinds


def test_workers_that_are_starting_are_not_added_again() -> None:
    """A load beyond their capacity asks for more of them."""
    heavy = {"prefill": 4, "decode": 4}
    (grown,) = changes(decide([seen(90.0, 900.0, 450.0, **heavy)] * 2, COUNTS))
    coming = grown.workers - 8
    waits = decide([seen(90.0, 900.0, 450.0, coming=coming, **heavy)] * 20, COUNTS)
    assert all(split.workers == 8 for split in changes(waits))
    assert f"{coming} more workers are starting" in waits[-1].reason
    assert changes(decide([seen(180.0, 900.0, 450.0, coming=coming, **heavy)] * 2, COUNTS))[0].workers > 8 + coming


def test_a_shared_cluster_changes_only_its_number_of_workers() -> None:
    load = (90.0, 900.0, 450.0)
    assert changes(follow([load] * 6, FLIPS, Split(shared=4))) == []
    wanted = changes(follow([load] * 6, COUNTS, Split(shared=4)))
    assert len(wanted) == 1
    assert wanted[0].shared > 4
    assert wanted[0].prefill == wanted[0].decode == 0


def test_missed_targets_raise_the_load_ratio_of_a_role() -> None:
    late = TargetCounts(50.0, {Phase.DECODE: 50.0})
    calm = seen(24.0, 900.0, 620.0, prefill=3, decode=5)
    decisions = decide([replace(calm, kept=late)] * 20)
    assert decisions[-1].state.decode_scale > 1.2
    assert decisions[-1].state.prefill_scale == 1.0
    load_ratios = [decision.decode.value for decision in decisions if decision.decode is not None]
    assert load_ratios[-1] > 1.2 * load_ratios[0]
    better = decide([calm] * 60, state=decisions[-1].state)
    assert better[-1].state.decode_scale < 1.1


def test_missed_targets_with_headroom_for_twice_the_load_change_no_load_ratio() -> None:
    """More workers would not help: for instance, the gap of a hand-over exceeds the target."""
    late = TargetCounts(90.0, {Phase.DECODE: 10.0})
    decisions = decide([seen(15.0, 900.0, 300.0, prefill=3, decode=5, kept=late)] * 20)
    assert decisions[-1].decode is not None
    assert decisions[-1].decode.value < 0.5
    assert decisions[-1].state.decode_scale == 1.0


def test_learned_scales_do_not_hold_for_another_demand() -> None:
    late = TargetCounts(50.0, {Phase.DECODE: 50.0})
    taught = decide([seen(24.0, 900.0, 620.0, prefill=3, decode=5, kept=late)] * 20)[-1].state
    swung = decide([seen(45.0, 90.0, 900.0, prefill=3, decode=5, kept=late)], state=taught)
    assert taught.decode_scale > 1.2
    assert swung[-1].state.decode_scale == 1.0


def test_growing_decode_batches_show_long_answers_before_any_has_ended() -> None:
    """Only short requests have ended; ten times as many decode as these explain."""
    before = plan(seen(45.0, 90.0, 20.0, running_requests=20.0), FLIPS, State())
    after = plan(seen(45.0, 90.0, 20.0, running_requests=400.0), FLIPS, before.state)
    assert after.state.demand is not None
    assert after.state.demand.answer_tokens > 10 * 20.0


def test_rejections_for_the_gap_target_show_long_answers_before_any_has_ended() -> None:
    """The number of decoding requests is at its limit and thus constant; those admitted occupy the whole capacity."""
    before = plan(seen(45.0, 90.0, 20.0, running_requests=200.0), FLIPS, State())
    load = replace(offered(45.0, 90.0, 20.0), refused_per_s=30.0, crowded_per_s=30.0)
    after = plan(seen(45.0, 90.0, 20.0, running_requests=200.0, offered=load), FLIPS, before.state)
    assert after.state.demand is not None
    step_s = 10e-3 + 200 / 4 * 1e-4
    assert after.state.demand.answer_tokens == pytest.approx(200.0 / 15.0 / step_s, rel=0.05)
    drafting = replace(FACTS, decode_speedup=1.5)
    faster = seen(45.0, 90.0, 20.0, running_requests=200.0, offered=load, answers=drafting)
    demand = plan(faster, FLIPS, before.state).state.demand
    assert demand is not None
    assert demand.answer_tokens == pytest.approx(1.5 * 200.0 / 15.0 / step_s, rel=0.05), "steps gain more than a token"
    late = replace(load, crowded_per_s=0.0)
    after = plan(seen(45.0, 90.0, 20.0, running_requests=200.0, offered=late), FLIPS, before.state)
    assert after.state.demand is not None
    assert after.state.demand.answer_tokens == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("window", "why"),
    [
        (seen(0.0, 0.0, 0.0), "there has been no load"),
        (seen(*PROMPTS, answers=None), "no worker has measured its steps"),
    ],
)
def test_nothing_changes_without_observations(window: Observation, why: str) -> None:
    decision = plan(window, FLIPS, State())
    assert decision.change is Direction.NONE
    assert why in decision.reason


def test_the_reason_states_the_figures() -> None:
    decisions = follow([PROMPTS] * 3, FLIPS, Split(4, 4))
    reason = next(decision.reason for decision in decisions if decision.change is not Direction.NONE)
    for part in ("from 4:4 to 7:1", "45 requests/s", "900 computed", "prefill", "decode", "%", "met their targets"):
        assert part in reason


def test_facts_of_prefill_and_decode_workers_are_separate() -> None:
    """Faster prefill devices need fewer prefill workers."""
    fast = replace(FACTS, cost=replace(FACTS.cost, base_s=2e-3, token_s=2e-5))
    same = plan(seen(*PROMPTS), FLIPS, State()).split
    assert plan(seen(*PROMPTS, prompts=fast), FLIPS, State()).split.prefill < same.prefill


def test_an_empty_range_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="3:2"):
        Range(3, 2)
