"""What every policy keeps to, and where the plain one sends requests."""

import pytest

from router.cost_placement import CostPlacement
from router.placement import LeastLoaded, Mode, Need, Placement
from tests.unit.router.fleets import TestFleet, load, names, need
from wire.messages import Role


@pytest.fixture
def at() -> TestFleet:
    return TestFleet()


def choose(at: TestFleet, asked: Need | None = None) -> tuple[str, str] | None:
    return names(LeastLoaded().choose(asked or need(), at.fleet))


def test_the_least_loaded_of_each_role(at: TestFleet) -> None:
    at.add("busy-p", Role.PREFILL)
    at.prompt("busy-p", 200)
    at.add("busy-d", Role.DECODE)
    at.answers("busy-d", 1, pages=30)
    at.add("p", Role.PREFILL)
    at.add("d", Role.DECODE)
    assert choose(at) == ("p", "d")


def test_free_share_counts_before_the_number_of_requests(at: TestFleet) -> None:
    at.add("p", Role.PREFILL)
    at.add("full", Role.DECODE)
    at.answers("full", 1, pages=40)
    at.add("many", Role.DECODE)
    at.answers("many", 3, pages=7)
    assert choose(at) == ("p", "many")


POLICIES = [LeastLoaded(), *(CostPlacement(mode) for mode in Mode)]


@pytest.mark.parametrize("policy", POLICIES)
class TestEveryPolicy:
    def test_a_request_waits_for_room(self, policy: Placement, at: TestFleet) -> None:
        prefill, decode = at.add("p", Role.PREFILL), at.add("d", Role.DECODE)
        assert names(policy.choose(need(), at.fleet)) == ("p", "d")
        at.prompt("p", 1023)
        assert names(policy.choose(need(), at.fleet)) == ("p", "d")
        at.prompt("p", 1)
        assert policy.choose(need(), at.fleet) is None
        prefill.prompt_computed("prompt-0")
        at.answers("d", 1, pages=54)
        assert names(policy.choose(need(), at.fleet)) == ("p", "d"), "10 pages are left for 159 tokens"
        assert policy.choose(need(answer=62), at.fleet) is None
        at.answers("d", 2, pages=0)
        assert names(policy.choose(need(), at.fleet)) == ("p", "d")
        at.answers("d", 1, pages=0)
        assert policy.choose(need(), at.fleet) is None, "its batch is full"
        assert decode.decode_requests == 4

    def test_who_refused_is_left_alone_for_a_moment(self, policy: Placement, at: TestFleet) -> None:
        prefill = at.add("p", Role.PREFILL)
        at.add("d", Role.DECODE)
        prefill.refuse()
        assert policy.choose(need(), at.fleet) is None
        at.clock.now += 0.06
        assert names(policy.choose(need(), at.fleet)) == ("p", "d")

    def test_an_idle_prefill_worker_takes_a_prompt_of_any_length(self, policy: Placement, at: TestFleet) -> None:
        at.add("p", Role.PREFILL, pages_total=1000)
        at.add("d", Role.DECODE, pages_total=1000)
        assert names(policy.choose(need(5000), at.fleet)) == ("p", "d")
        assert policy.choose(need(16_001, answer=1), at.fleet) is None, "one that its pool can hold"

    def test_who_does_both_promises_answers_what_prompts_leave(self, policy: Placement, at: TestFleet) -> None:
        """Its pool was promised whole, and the worker refused for good what it never has room for."""
        at.add("b", Role.BOTH)  # 64 pages, half of them for prompts, as a context has 128
        assert names(policy.choose(need(answer=412), at.fleet)) == ("b", "b")
        assert policy.choose(need(answer=414), at.fleet) is None
        assert not policy.could_serve(need(answer=414), at.fleet)
        assert names(policy.choose(need(1000, answer=1), at.fleet)) == ("b", "")
        at.remove("b")
        at.add("p", Role.PREFILL)
        at.add("d", Role.DECODE)
        assert names(policy.choose(need(answer=414), at.fleet)) == ("p", "d"), "all of its pages are for answers"

    def test_who_does_not_fit_gets_no_request_together(self, policy: Placement, at: TestFleet) -> None:
        runs = {name: at.add(name, Role.PREFILL).peer for name in ("p0", "p1", "p2")}
        runs |= {name: at.add(name, Role.DECODE).peer for name in ("d0", "d1", "d2")}
        at.prompt("p2", 300)
        at.answers("d2", 1)
        for pair in ((p, d) for p in ("p0", "p1", "p2") for d in ("d0", "d1", "d2") if (p, d) != ("p2", "d2")):
            at.fleet.misfits.learn(runs[pair[0]], runs[pair[1]], "other releases")
        assert names(policy.choose(need(), at.fleet)) == ("p2", "d2"), "behind those with more room"
        assert names(policy.choose(need(answer=1), at.fleet)) in {("p0", ""), ("p1", "")}
        assert policy.could_serve(need(), at.fleet)
        at.fleet.misfits.learn(runs["p2"], runs["d2"], "other releases")
        assert policy.choose(need(), at.fleet) is None
        assert not policy.could_serve(need(), at.fleet)
        assert policy.could_serve(need(answer=1), at.fleet)
        at.add("b", Role.BOTH)
        assert "b" in (names(policy.choose(need(), at.fleet)) or ()), "nobody has refused it"
        at.remove("b")
        at.remove("d0")
        at.add("d0", Role.DECODE)
        assert policy.choose(need(), at.fleet) is not None, "forgotten with the run"

    def test_roles_are_kept(self, policy: Placement, at: TestFleet) -> None:
        at.add("p", Role.PREFILL)
        assert policy.choose(need(), at.fleet) is None
        assert names(policy.choose(need(answer=1), at.fleet)) == ("p", ""), "one token takes no decode worker"
        at.remove("p")
        at.add("d", Role.DECODE)
        assert policy.choose(need(), at.fleet) is None
        at.remove("d")
        at.add("b", Role.BOTH)
        assert names(policy.choose(need(), at.fleet)) == ("b", "b")

    def test_who_is_not_live_gets_nothing(self, policy: Placement, at: TestFleet) -> None:
        worker = at.add("b", Role.BOTH)
        at.fleet.set_live(worker, live=False)
        assert policy.choose(need(), at.fleet) is None
        at.fleet.set_live(worker, live=True)
        assert names(policy.choose(need(), at.fleet)) == ("b", "b")


def test_what_others_placed_counts_by_the_workers_own_word(at: TestFleet) -> None:
    worker = at.add("b", Role.BOTH)
    worker.report(load(prefill_tokens=700, decode_requests=3, pages_used=20))
    assert (worker.prefill_tokens, worker.decode_requests, worker.pages_used) == (700, 3, 20)
    at.answers("b", 4, pages=10)
    assert (worker.decode_requests, worker.pages_used) == (4, 40), "what is on its way there counts at once"
    at.clock.now += 1.1
    worker.expire()
    assert (worker.prefill_tokens, worker.decode_requests) == (0, 4)


def test_books_are_empty_when_all_is_over(at: TestFleet) -> None:
    worker = at.add("b", Role.BOTH)
    at.prompt("b", 300)
    at.answers("b", 1)
    worker.prompt_computed("prompt-0")
    worker.prompt_computed("prompt-0")
    worker.unbook_prefill("prompt-0")
    worker.unbook_decode("answer-1")
    worker.unbook_decode("answer-1")
    assert worker.idle
    assert (worker.prefill_pairs, worker.decode_context, worker.slo_loads) == (0, 0, {})
