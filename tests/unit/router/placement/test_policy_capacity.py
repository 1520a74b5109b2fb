"""The capacity, roles and compatibility that placement keeps to in every mode."""

import pytest

from router.placement.policy import PlacementPolicy
from tandem.protocol.messages import PeerRef, Role
from tandem.protocol.mode import Mode
from tests.unit.router.fleets import TestFleet, names, need


@pytest.fixture
def at() -> TestFleet:
    return TestFleet()


POLICIES = [PlacementPolicy(mode) for mode in Mode]


@pytest.mark.parametrize("policy", POLICIES)
class TestEveryMode:
    def test_a_request_waits_for_capacity(self, policy: PlacementPolicy, at: TestFleet) -> None:
        prefill, decode = at.add("p", Role.PREFILL), at.add("d", Role.DECODE)
        assert names(policy.place(need(), at.fleet, 0.0)) == ("p", "d")
        at.prompt("p", 1023)
        assert names(policy.place(need(), at.fleet, 0.0)) == ("p", "d")
        at.prompt("p", 1)
        assert policy.place(need(), at.fleet, 0.0) is None
        prefill.prompt_computed("prompt-0")
        at.answers("d", 1, pages=54)
        assert names(policy.place(need(), at.fleet, 0.0)) == ("p", "d"), "10 pages are left for 159 tokens"
        assert policy.place(need(answer=62), at.fleet, 0.0) is None
        at.answers("d", 2, pages=0)
        assert names(policy.place(need(), at.fleet, 0.0)) == ("p", "d")
        at.answers("d", 1, pages=0)
        assert policy.place(need(), at.fleet, 0.0) is None, "its batch is full"
        assert decode.decode_requests == 4

    def test_a_large_worker_is_chosen_among_many_small_ones(self, policy: PlacementPolicy, at: TestFleet) -> None:
        """The first 64 were looked at, and a request that none of them could hold waited."""
        for number in range(70):
            at.add(f"small-{number}", Role.BOTH, pages_total=8)
        at.add("large-0", Role.BOTH, pages_total=100)
        at.add("large-1", Role.BOTH, pages_total=100)
        at.answers("large-0", 3, pages=12)
        at.answers("large-1", 3, pages=12)
        chosen = names(policy.place(need(), at.fleet, 0.0))
        assert chosen is not None
        assert chosen[1].startswith("large")

    def test_a_worker_that_refused_is_not_asked_for_a_moment(self, policy: PlacementPolicy, at: TestFleet) -> None:
        prefill = at.add("p", Role.PREFILL)
        at.add("d", Role.DECODE)
        prefill.back_off()
        assert policy.place(need(), at.fleet, 0.0) is None
        at.clock.now += 0.06
        assert names(policy.place(need(), at.fleet, 0.0)) == ("p", "d")

    def test_an_idle_prefill_worker_takes_a_prompt_of_any_length(self, policy: PlacementPolicy, at: TestFleet) -> None:
        at.add("p", Role.PREFILL, pages_total=1000)
        at.add("d", Role.DECODE, pages_total=1000)
        assert names(policy.place(need(5000), at.fleet, 0.0)) == ("p", "d")
        assert policy.place(need(16_001, answer=1), at.fleet, 0.0) is None, "one that its pool can hold"

    def test_with_both_roles_answers_have_what_prompts_leave(self, policy: PlacementPolicy, at: TestFleet) -> None:
        """Its pool counted whole, and the worker refused for good what it never has capacity for."""
        at.add("b", Role.BOTH)  # 64 pages, half of them for prompts, as a context has 128
        assert names(policy.place(need(answer=412), at.fleet, 0.0)) == ("b", "b")
        assert policy.place(need(answer=414), at.fleet, 0.0) is None
        assert not policy.could_serve(need(answer=414), at.fleet)
        assert names(policy.place(need(1000, answer=1), at.fleet, 0.0)) == ("b", "")
        at.remove("b")
        at.add("p", Role.PREFILL)
        at.add("d", Role.DECODE)
        assert names(policy.place(need(answer=414), at.fleet, 0.0)) == ("p", "d"), "all of its pages are for answers"

    def test_incompatible_workers_get_no_request_together(self, policy: PlacementPolicy, at: TestFleet) -> None:
        runs = {name: at.add(name, Role.PREFILL).peer for name in ("p0", "p1", "p2")}
        runs |= {name: at.add(name, Role.DECODE).peer for name in ("d0", "d1", "d2")}
        at.prompt("p2", 300)
        at.answers("d2", 1)
        for pair in ((p, d) for p in ("p0", "p1", "p2") for d in ("d0", "d1", "d2") if (p, d) != ("p2", "d2")):
            at.fleet.incompatible.learn(runs[pair[0]], runs[pair[1]], "other releases")
        assert names(policy.place(need(), at.fleet, 0.0)) == ("p2", "d2"), "behind those with more capacity"
        assert names(policy.place(need(answer=1), at.fleet, 0.0)) in {("p0", ""), ("p1", "")}
        assert policy.could_serve(need(), at.fleet)
        at.fleet.incompatible.learn(runs["p2"], runs["d2"], "other releases")
        assert policy.place(need(), at.fleet, 0.0) is None
        assert not policy.could_serve(need(), at.fleet)
        assert policy.could_serve(need(answer=1), at.fleet)
        at.add("b", Role.BOTH)
        assert "b" in (names(policy.place(need(), at.fleet, 0.0)) or ()), "no worker has refused it"
        at.remove("b")
        at.remove("d0")
        at.add("d0", Role.DECODE, peer=PeerRef("d0", 2))
        assert policy.place(need(), at.fleet, 0.0) is not None, "another run"

    def test_roles_are_kept(self, policy: PlacementPolicy, at: TestFleet) -> None:
        at.add("p", Role.PREFILL)
        assert policy.place(need(), at.fleet, 0.0) is None
        assert names(policy.place(need(answer=1), at.fleet, 0.0)) == ("p", ""), "one token takes no decode worker"
        at.remove("p")
        at.add("d", Role.DECODE)
        assert policy.place(need(), at.fleet, 0.0) is None
        at.remove("d")
        at.add("b", Role.BOTH)
        assert names(policy.place(need(), at.fleet, 0.0)) == ("b", "b")

    def test_a_worker_that_is_not_live_gets_nothing(self, policy: PlacementPolicy, at: TestFleet) -> None:
        worker = at.add("b", Role.BOTH)
        at.fleet.set_live(worker, live=False)
        assert policy.place(need(), at.fleet, 0.0) is None
        at.fleet.set_live(worker, live=True)
        assert names(policy.place(need(), at.fleet, 0.0)) == ("b", "b")
