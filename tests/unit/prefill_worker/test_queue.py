"""The order of prefill: short prompts overtake, long ones end in bounded time."""

from collections.abc import Callable

import pytest

from prefill_worker.progress import Progress
from prefill_worker.queue import OLDEST_SHARE, STEP_S, PromptQueue, ScoredTokens, StartResult, WaitingPrompts
from prefill_worker.request import PrefillRequest
from tandem.cost_model.chunks import RECENT_PROMPTS
from tandem.engine.cache.page_pool import PagePool
from tandem.engine.cache.prefix_cache import PrefixCache
from tandem.engine.steps.prompt_scoring import PromptScores
from tandem.protocol.kv_pages import KvPages
from tandem.protocol.messages import PrefillTask, RequestRef, SamplingParams

CACHE = PrefixCache(PagePool(1), KvPages(16))
BUDGET = 16


class Prompts:
    """A queue, the prompts in it by name, and a clock of steps. `room` says whether a prompt finds pages."""

    def __init__(self, room: Callable[[str], StartResult] = lambda _: StartResult.STARTED) -> None:
        self.queue = PromptQueue()
        self.requests: dict[str, PrefillRequest] = {}
        self.ended: dict[str, int] = {}
        self.steps = 0
        self._room = room

    def add(
        self, name: str, tokens: int, *, local: bool = False, scored: bool = False, waited_s: float = 0.0
    ) -> PrefillRequest:
        task = PrefillTask("r", RequestRef(name, 1), (5,) * tokens, SamplingParams(2), None, waited_s=waited_s)
        scores = PromptScores(task.prompt_token_ids, 0) if scored else None
        request = PrefillRequest(task, 1, local, Progress(), CACHE.prefix((), ""), scores=scores)
        self.requests[name] = request
        self.queue.add(request)
        return request

    def step(self, budget: int = BUDGET, max_rows: int = 64, scored_most: int = BUDGET) -> dict[str, int]:
        """Tokens of each prompt in the next step, which ends at once."""
        self.steps += 1
        start = lambda request: self._room(request.task.ref.request_id)  # noqa: E731
        plan = self.queue.plan(budget, max_rows, start, scored_most)
        for request, tokens in plan:
            request.next_chunk(tokens)
            if not request.remaining:
                self.queue.remove(request)
                self.ended[request.task.ref.request_id] = self.steps
        tokens_of = {request.task.ref.request_id: tokens for request, tokens in plan}
        assert len(tokens_of) == len(plan), "one row a prompt"
        assert sum(tokens_of.values()) <= budget
        assert all(tokens > 0 for tokens in tokens_of.values())
        return tokens_of


def test_short_prompts_overtake_and_the_oldest_keeps_its_share() -> None:
    prompts = Prompts()
    prompts.add("long", 100)
    assert prompts.step() == {"long": BUDGET}
    prompts.add("short", 5)
    prompts.add("shorter", 3)
    assert prompts.step() == {"long": 4 + 4, "shorter": 3, "short": 5}


def test_a_step_is_filled_with_many_prompts() -> None:
    prompts = Prompts()
    for number in range(6):
        prompts.add(f"p{number}", 4)
    assert prompts.step() == {f"p{number}": 4 for number in range(4)}
    assert prompts.step() == {"p4": 4, "p5": 4}


@pytest.mark.parametrize("arrivals", [1, 2, 4])
def test_a_long_prompt_ends_in_bounded_time_under_a_stream_of_short_ones(arrivals: int) -> None:
    """At 4 arrivals of 8 tokens a step the short ones alone are twice what a step takes."""
    prompts = Prompts()
    prompts.add("first", 8)
    prompts.add("long", 100)
    bound = 1 + -(-100 * OLDEST_SHARE // BUDGET)
    for step in range(bound):
        for number in range(arrivals):
            prompts.add(f"short-{step}-{number}", 8)
        prompts.step()
    assert prompts.ended["long"] <= bound
    assert sum(name.startswith("short") for name in prompts.ended) >= min(arrivals, 1) * bound // 2


def test_short_prompts_are_soon_served_under_a_long_one() -> None:
    prompts = Prompts()
    prompts.add("long", 1000)
    for step in range(10):
        prompts.add(f"short-{step}", 8)
        prompts.step()
        assert prompts.ended[f"short-{step}"] == prompts.steps


def test_scored_prompts_have_few_tokens_of_a_step_together_and_take_no_pages_beyond() -> None:
    begun = []

    def start(name: str) -> StartResult:
        begun.append(name)
        return StartResult.STARTED

    prompts = Prompts(start)
    prompts.add("scored", 100, scored=True)
    assert prompts.step(scored_most=5) == {"scored": 5}
    prompts.add("short", 3, scored=True)
    prompts.add("plain", 50)
    assert prompts.step(scored_most=5) == {"scored": 4, "short": 1, "plain": 11}
    prompts.add("shortest", 1, scored=True)
    assert prompts.step(scored_most=4) == {"scored": 4, "plain": 12}
    assert begun == ["scored", "short", "plain"]


def test_scored_tokens_of_a_step_are_as_many_as_its_time_allows() -> None:
    scored = ScoredTokens()
    first = scored.most
    scored.observe(first, STEP_S / 3)
    assert scored.most == 2 * first
    scored.observe(first, STEP_S / 3)
    assert scored.most == 2 * first, "the step was not full"
    scored.observe(2 * first, STEP_S * 0.75)
    assert scored.most == 2 * first
    for _ in range(20):
        scored.observe(scored.most, 2 * STEP_S)
    assert 0 < scored.most < first
    for _ in range(20):
        scored.observe(scored.most, 0.01)
    assert scored.most > 10_000, "a fast device has no limit"


def test_rows_are_limited() -> None:
    prompts = Prompts()
    for name in "abc":
        prompts.add(name, 2)
    assert prompts.step(max_rows=2) == {"a": 2, "b": 2}
    assert prompts.step(max_rows=2) == {"c": 2}


def test_no_tokens_no_prompt() -> None:
    prompts = Prompts(lambda _: pytest.fail("pages were taken"))
    prompts.add("a", 2)
    assert prompts.step(budget=0) == {}


def test_who_comes_first_and_has_no_room_keeps_others_from_starting() -> None:
    full = {"large"}
    prompts = Prompts(lambda name: StartResult.NO_PAGES if name in full else StartResult.STARTED)
    prompts.add("running", 40)
    assert prompts.step() == {"running": BUDGET}
    prompts.add("large", 30)
    prompts.add("small", 2)
    # The small one comes before the large one here, and so it starts; a second one finds the large one the oldest.
    assert prompts.step() == {"small": 2, "running": 14}
    prompts.step()
    assert prompts.ended["running"] == 3
    prompts.add("late", 2)
    assert prompts.step() == {}
    full.clear()
    assert prompts.step() == {"large": 14, "late": 2}


def test_a_local_prompt_starts_although_remote_ones_lack_capacity() -> None:
    """The pages that are missing may be those promised to it."""
    full = {"large"}
    prompts = Prompts(lambda name: StartResult.NO_PAGES if name in full else StartResult.STARTED)
    prompts.add("large", 30)
    prompts.add("local", 40, local=True)
    prompts.add("late", 2)
    assert prompts.step() == {"local": BUDGET}
    full.clear()
    assert set(prompts.step()) == {"large", "late", "local"}


def test_one_that_fails_leaves_alone() -> None:
    prompts = Prompts(lambda name: StartResult.FAILED if name == "lost" else StartResult.STARTED)
    prompts.add("lost", 3)
    prompts.add("other", 6)
    assert prompts.step() == {"other": 6}
    assert len(prompts.queue) == 0


def test_what_waits() -> None:
    prompts = Prompts()
    assert prompts.queue.waiting() == WaitingPrompts()
    first = prompts.add("first", 100)
    prompts.add("second", 50)
    prompts.step(20)
    assert prompts.queue.waiting() == WaitingPrompts(prompts=2, tokens=130, context=15), (
        "the shortest is the further one"
    )
    first.withdrawn = True
    assert prompts.queue.waiting() == WaitingPrompts(prompts=1, tokens=35, context=15)
    assert prompts.step() == {"second": 16}
    prompts.queue.remove(first)
    prompts.queue.remove(first)
    assert len(prompts.queue) == 1


def test_the_wait_of_the_prompts_that_have_started() -> None:
    """A prompt counts when it gets pages, with the tokens that are not cached."""
    prompts = Prompts(lambda name: StartResult.NO_PAGES if name == "waits" else StartResult.STARTED)
    for number in range(RECENT_PROMPTS - 1):
        prompts.add(f"p{number}", 3, waited_s=0.3)
        prompts.step()
    prompts.add("waits", 3, waited_s=9.0)
    prompts.step()
    assert prompts.queue.waiting() == WaitingPrompts(prompts=1, tokens=3)
    prompts.add("cached", 12, local=True, waited_s=0.3).cached = 9
    prompts.step()
    assert prompts.queue.waiting() == WaitingPrompts(prompts=1, tokens=3, wait_s=pytest.approx(0.1))
