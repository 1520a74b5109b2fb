"""What is left to compute at a worker: by its own word, and what that cannot know yet."""

import pytest

from costs.step_cost import chunk_pairs
from router.placed_work import PromptWork
from router.prompt_queue import PromptQueue


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Time:
    return Time()


@pytest.fixture
def queue(clock: Time) -> PromptQueue:
    return PromptQueue(clock)


def test_without_a_word_whole_prompts_count(queue: PromptQueue) -> None:
    queue.book("a", PromptWork(1000))
    queue.book("b", PromptWork(500, cached=200))
    assert queue.tokens == 1500
    assert queue.pairs(1500) == PromptWork(1000).pairs + PromptWork(500, 200).pairs
    assert queue.computed("a")
    assert not queue.computed("a")
    assert (queue.tokens, queue.idle, queue.request_ids) == (500, False, {"a", "b"})
    assert queue.forget("b")
    assert (queue.tokens, queue.idle, queue.request_ids) == (0, True, {"a"})
    assert not queue.forget("a"), "nothing of it was left"


def test_the_worker_knows_how_far_a_prompt_is(queue: PromptQueue, clock: Time) -> None:
    queue.book("a", PromptWork(1000))
    queue.taken("a")
    clock.now += 0.05
    assert queue.tell(400)
    assert queue.tokens == 400
    assert queue.pairs(400) == pytest.approx(PromptWork(400, cached=600).pairs, rel=1e-2)
    assert not queue.tell(400)


def test_a_worker_that_lost_its_last_prompt_has_nothing_left(queue: PromptQueue, clock: Time) -> None:
    queue.book("a", PromptWork(1000))
    queue.taken("a")
    clock.now += 0.05
    queue.tell(400)
    assert queue.forget("a")
    assert queue.tokens == 0, "it may say nothing more"


def test_what_it_had_not_taken_then_counts_beside(queue: PromptQueue, clock: Time) -> None:
    queue.book("a", PromptWork(1000))
    queue.tell(0)
    assert queue.tokens == 1000, "on its way"
    queue.taken("a")
    assert queue.tokens == 1000, "since its last word"
    clock.now += 1e-3
    queue.tell(0)
    assert queue.tokens == 1000, "a word that left before may come behind"
    clock.now += 5e-3
    assert queue.tell(0), "the same number says something else now"
    assert queue.tokens == 0


def test_other_routers_prompts_count(queue: PromptQueue) -> None:
    queue.tell(700)
    assert (queue.tokens, queue.idle) == (700, True)
    assert queue.pairs(700) == chunk_pairs(700, 0)
    queue.book("a", PromptWork(1000))
    assert queue.tokens == 1700
    assert queue.expire()
    assert queue.tokens == 1000
    assert not queue.expire()


def test_another_attempt_there_begins_anew(queue: PromptQueue, clock: Time) -> None:
    queue.book("a", PromptWork(1000))
    queue.taken("a")
    clock.now += 0.05
    queue.tell(200)
    queue.book("a", PromptWork(900))
    assert queue.tokens == 1100, "the worker's word may have the attempt before"
    queue.taken("another")
    assert queue.tokens == 1100
