"""Tests of the live workers and the order in which they are considered."""

import pytest

from tandem.protocol.messages import Role
from tests.unit.router.fleets import TestFleet


@pytest.fixture
def at() -> TestFleet:
    return TestFleet()


def order(ranking: object) -> list[str]:
    return [worker.peer.worker_id for worker in ranking]  # type: ignore[attr-defined]


def test_prompts_go_first_to_the_worker_with_the_least_to_compute(at: TestFleet) -> None:
    for name, tokens in (("a", 300), ("b", 0), ("c", 100)):
        at.add(name, Role.PREFILL)
        if tokens:
            at.prompt(name, tokens)
    assert order(at.fleet.prefills) == ["b", "c", "a"]
    at.prompt("b", 200)
    assert order(at.fleet.prefills) == ["c", "b", "a"]
    at.workers["a"].remove_prompt("prompt-0")
    assert order(at.fleet.prefills) == ["a", "c", "b"]


def test_a_worker_with_both_roles_is_asked_for_prompts_by_its_answers_too(at: TestFleet) -> None:
    for name in ("a", "b"):
        at.add(name, Role.BOTH)
    at.answers("a", 2)
    assert order(at.fleet.prefills) == ["b", "a"]


def test_a_full_worker_is_asked_last(at: TestFleet) -> None:
    for name, pages in (("full", 64), ("empty", 0), ("half", 32)):
        at.add(name, Role.DECODE)
        if pages:
            at.answers(name, 1, pages=pages)
    assert order(at.fleet.decodes) == ["empty", "half", "full"]


def test_who_is_not_live_is_not_asked(at: TestFleet) -> None:
    first, second = at.add("a", Role.BOTH), at.add("b", Role.DECODE)
    assert at.fleet.both_roles == 1
    before = at.fleet.changes
    at.fleet.set_live(first, live=False)
    assert (order(at.fleet.prefills), order(at.fleet.decodes)) == ([], ["b"])
    assert not at.fleet.both_roles
    assert at.fleet.worker(first.slot) is None
    assert at.fleet.changes > before
    assert at.fleet.live == [second]


def test_what_a_worker_held_leaves_with_it_and_its_number_is_given_again(at: TestFleet) -> None:
    digest = b"x" * 16
    first = at.add("a", Role.BOTH)
    at.add("b", Role.BOTH)
    at.fleet.prefixes.store(first.slot, [digest])
    at.remove("a")
    assert order(at.fleet.decodes) == ["b"]
    again = at.add("c", Role.BOTH)
    assert again.slot == first.slot
    assert at.fleet.prefixes.match((digest,)).pages(again.slot) == 0
