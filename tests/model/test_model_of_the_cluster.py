"""Model test of the cluster: invariants hold while messages are delayed, reordered, repeated or lost and workers die.

No page is in two states at once, written by another request's transfer, or leaked. Each request ends exactly once, with
the right tokens or a clear error.

The KV is 8-bit: the scales of a page are stamps that identify the prefix that it belongs to. In the runs with windows
the KV is 32-bit.

Hypothesis drives a cluster of real parts in one thread (`world.py` lists the real and the simulated parts).
`machine.py` defines the moves; `checks.py`, `World.check` and `World.end` define the invariants. `make test` makes the
same 3,000 moves each time, `make soak` a million others. For a minimal example of a failure:

    TANDEM_MODEL_SEED=2 TANDEM_MODEL_RUNS=25 TANDEM_MODEL_SHRINK=1 python -m pytest tests/model -k holds

A failure names its seed and its number of runs.

`mutants.py` and `stories.py` show that the checks are effective: each mutant removes one safety measure and must be
detected.
"""

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from decode_worker.page_budget import PageBudget
from prefill_worker.prompt_pages import PromptPages
from prefill_worker.request import PrefillRequest
from tandem.protocol.kv_pages import STATE
from tandem.protocol.messages import SamplingParams
from tests.model import workers
from tests.model.checks import Broken, WatchedEngine
from tests.model.machine import ROLES, ClusterMachine, FlippingMachine
from tests.model.mutants import MUTANTS, Mutant
from tests.model.stories import STORIES, Story
from tests.model.world import World
from tests.soak import SOAKING, soak

MOVES_A_RUN = 200
RUNS = 5000 if SOAKING else 15
"""The number of runs; few of them have less than the maximum number of moves."""
LEAST_IN_A_RUN = {
    "moves": 190,
    "prior_output_tokens": 9.5,
    "killed": 1.9,
    "taken for dead": 0.47,
    # write windows that were renewed, and so outlasted their original end
    "renewed": 0.95,
    # renewals of write windows that were requested after their lease had ended
    "not renewed": 0.19,
    # writes that arrive after the end of their request
    "quarantined": 1.9,
    # writes that arrive after the death of their writer
    "from the dead": 0.47,
    # writes that arrive after they failed
    "after a failure": 0.19,
    # writes of pages that other requests read as well
    "from shared pages": 1.9,
    # steps that read pages of other requests
    "reads shared": 1.9,
    "tokens from the cache": 9.5,
    # requests that were preempted in favour of older ones
    "gave way": 0.005,
}
"""The minimum average number of each event per run; with fewer events, the runs would test too little."""
WINDOW_RUNS = 20 if SOAKING else 3
"""The number of additional runs with sliding windows."""
WINDOWS = (None, 5, 3)
"""The windows of the groups of layers in those runs.

With a window of 5 tokens and pages of 4, a page becomes invisible exactly when a later page begins; with a window of 3,
in the middle of a page.
"""
FLIPPING_RUNS = 12 if SOAKING else 3
"""The number of additional runs with changing roles."""
SEED = 8
SEEDS_FOR_A_MUTANT = range(3, 67)
RUNS_FOR_A_MUTANT = 5
"""The number of runs per seed: another seed finds a mutant sooner than more runs of the same seed."""


def play(runs: int, number: int, *phases: Phase, machine: type[ClusterMachine] = ClusterMachine) -> Counter[str]:
    """Play `runs` runs of seed `number` until one fails, and return the number of events of each kind."""
    ClusterMachine.seen = Counter()
    rules = settings(
        max_examples=runs,
        stateful_step_count=MOVES_A_RUN,
        database=None,
        phases=[Phase.generate, *phases],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    try:
        run_state_machine_as_test(seed(number)(machine), settings=rules)
    except Exception as error:
        error.add_note(f"again: TANDEM_MODEL_SEED={number} TANDEM_MODEL_RUNS={runs}")
        raise
    return ClusterMachine.seen


@pytest.mark.timeout(0 if SOAKING else 1200)
def test_whatever_happens_the_cluster_holds() -> None:
    runs = int(os.environ.get("TANDEM_MODEL_RUNS", RUNS))
    number = int(os.environ.get("TANDEM_MODEL_SEED", random.randrange(1 << 32) if SOAKING else SEED))
    phases = [Phase.shrink] if "TANDEM_MODEL_SHRINK" in os.environ else []
    seen = play(runs, number, *phases)
    print(seen)
    if runs >= RUNS:
        assert {event: seen[event] for event, least in LEAST_IN_A_RUN.items() if seen[event] <= least * runs} == {}


@pytest.mark.timeout(1200)
def test_the_cluster_holds_with_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that have left the window are freed while requests run: none is read, sent or reused too early."""
    monkeypatch.setattr(WatchedEngine, "windows", WINDOWS)
    monkeypatch.setattr(WatchedEngine, "quantized", False)
    seen = play(WINDOW_RUNS, SEED)
    assert seen["pages behind windows"] > 25 * WINDOW_RUNS
    assert seen["prior_output_tokens"] > 2.5 * WINDOW_RUNS


@pytest.mark.timeout(1200)
def test_the_cluster_holds_with_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state is read only after the tokens before it, and never from a page that others write or that was freed."""
    monkeypatch.setattr(WatchedEngine, "windows", (None, 5, STATE, STATE))
    monkeypatch.setattr(workers, "DRAFTS", 0)
    monkeypatch.setattr(WatchedEngine, "quantized", False)
    seen = play(WINDOW_RUNS, SEED)
    print(seen)
    assert seen["states"] > 25 * WINDOW_RUNS
    assert seen["prior_output_tokens"] > 2.5 * WINDOW_RUNS


def pages_that_chunks_in_flight_read_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    deadline_s = PromptPages._release_unattended

    def too_early(self: PromptPages, request: PrefillRequest, position: int) -> None:
        deadline_s(self, request, max(position, request.launched))

    monkeypatch.setattr(PromptPages, "_release_unattended", too_early)


def pages_that_decode_steps_in_flight_read_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        PageBudget,
        "_retire_unseen",
        lambda self, request: self._retire(request, self._kv.tokens_of(request.pages)),
    )


@soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "mutant", [pages_that_chunks_in_flight_read_are_freed, pages_that_decode_steps_in_flight_read_are_freed]
)
def test_a_page_that_is_given_up_too_early_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WatchedEngine, "windows", WINDOWS)
    mutant(monkeypatch)
    with pytest.raises(Exception, match=r"reads|state"):
        play_several(RUNS_FOR_A_MUTANT, SEEDS_FOR_A_MUTANT)


def test_a_run_does_not_depend_on_the_speed_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypothesis repeats a run that failed, and the repetition has to fail as well."""
    fast, pauses = play(2, 102), random.Random()  # Hypothesis seeds the global random generator

    def slow_down(name: str, most: int) -> None:
        clock = getattr(time, name)
        monkeypatch.setattr(time, name, lambda: clock() + most * pauses.randrange(1000) // 1000)

    for name in ("monotonic", "perf_counter", "time"):
        slow_down(name, 2)
        slow_down(f"{name}_ns", 2 * 10**9)
    assert play(2, 102) == fast


@pytest.mark.timeout(1200)
def test_the_cluster_holds_while_workers_change_their_roles() -> None:
    seen = play(FLIPPING_RUNS, SEED, machine=FlippingMachine)
    assert seen["flipped"] > 4 * FLIPPING_RUNS
    assert seen["prior_output_tokens"] > 4 * FLIPPING_RUNS


@soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("mutant", "said"), MUTANTS.items(), ids=[mutant.__name__ for mutant in MUTANTS])
def test_a_missing_safety_measure_is_found(mutant: Mutant, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(Exception, match=said):
        play_several(RUNS_FOR_A_MUTANT, SEEDS_FOR_A_MUTANT)


def play_several(runs: int, seeds: Iterable[int]) -> None:
    """Play `runs` runs of each seed until one fails."""
    for number in seeds:
        play(runs, number)


@pytest.mark.parametrize("story", STORIES, ids=[story.__name__ for story in STORIES])
def test_a_story_ends_well_only_with_its_safety_measure(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    play_story(story)
    mutant, said = STORIES[story]
    mutant(monkeypatch)
    with pytest.raises(Broken, match=said):
        play_story(story)


def play_story(story: Story) -> None:
    world = World(dict(ROLES), asynchronous=False)
    try:
        story(world)
    finally:
        world.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_without_faults_every_answer_comes(asynchronous: bool) -> None:
    world = World(dict(ROLES), asynchronous=asynchronous)
    try:
        run(world, lambda: len(world.router.dispatcher.pool.views()) == len(ROLES))
        clients = [world.router.ask([10 + n, *range(30, 30 + n)], SamplingParams(6)) for n in range(8)]
        run(world, lambda: all(client.over for client in clients))
        assert all(client.ending is not None for client in clients)
        world.end()
    finally:
        world.close()


def run(world: World, done: Callable[[], bool]) -> None:
    for _ in range(500):
        if done():
            return
        world.calm()
        world.check()
    raise AssertionError("nothing more happens")
