"""Role changes during a load, as in a real cluster: no request is lost, and closed halves get none."""

import pytest

from tandem.capacity.simulation.prompt import VirtualPrompt
from tandem.capacity.simulation.request import LoadRequest
from tandem.capacity.simulation.worker import VirtualWorker
from tandem.protocol.messages import Role
from tandem.protocol.mode import Mode
from tandem.settings.slo import BEST_EFFORT
from tests.unit.capacity.simulation.stages import cluster, moments
from tests.unit.capacity.simulation.test_virtual_cluster import load

ROLES = [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE]
FIRST_S, BACK_S = 0.3, 0.9


def test_roles_change_amid_a_load_and_every_answer_is_whole() -> None:
    stage = cluster(Mode.DISAGGREGATED, ROLES)
    prefill, decode = list(stage.workers.values())[1:3]
    seen: list[tuple[VirtualWorker, Role, Role | None]] = []

    def assume(worker: VirtualWorker, role: Role) -> None:
        worker.assume(role)
        seen.append((worker, worker.assignment.role, worker.assignment.closing))

    stage.clock.at(FIRST_S, lambda: assume(decode, Role.PREFILL))
    stage.clock.at(BACK_S, lambda: assume(prefill, Role.DECODE))
    asked = load(1, count=120, rate=80.0)
    outcomes = stage.run(asked)
    assert seen[0][1:] == (Role.BOTH, Role.DECODE)  # it finishes its decoding requests
    assert [virtual_worker.assignment.role for virtual_worker in stage.workers.values()] == [
        Role.PREFILL,
        Role.DECODE,
        Role.PREFILL,
        Role.DECODE,
    ]
    assert len(outcomes) == len(asked)
    for outcome in outcomes:
        assert not outcome.error
        assert len(moments(outcome)) == outcome.asked.new_tokens
    late = [result for result in outcomes if result.asked.due_s > BACK_S + 0.1]
    assert {result.prefill_worker for result in late} == {"prefill-0", "decode-2"}
    assert {result.decode_worker for result in late if result.decode_worker} == {"prefill-1", "decode-3"}


@pytest.mark.parametrize("jumps", [True, False], ids=["many steps at once", "every step"])
def test_answers_are_preempted_where_prompts_need_pages_and_continue(*, jumps: bool) -> None:
    """A decode worker that also prefills reserves less; pages reserved before may not be available."""
    stage = cluster(Mode.DISAGGREGATED, [Role.PREFILL, Role.DECODE], jumps=jumps, pages=64)
    decode = list(stage.workers.values())[1]
    stage.clock.at(FIRST_S, lambda: decode.assume(Role.BOTH))
    asked = [LoadRequest(0.0, VirtualPrompt(number, 100, ()), 300, BEST_EFFORT) for number in range(16)]
    outcomes = stage.run(asked)
    assert decode.admission.requests.preemptions
    assert len(outcomes) == len(asked)
    for outcome in outcomes:
        assert not outcome.error
        assert len(moments(outcome)) == outcome.asked.new_tokens
        assert sorted(moments(outcome)) == list(moments(outcome))


def test_a_closing_half_opens_again_when_its_role_returns() -> None:
    stage = cluster(Mode.DISAGGREGATED, ROLES)
    decode = list(stage.workers.values())[2]
    stage.clock.at(FIRST_S, lambda: decode.assume(Role.PREFILL))
    stage.clock.at(FIRST_S + 1e-3, lambda: decode.assume(Role.DECODE))
    outcomes = stage.run(load(2, count=100, rate=80.0))
    assert decode.assignment.role is Role.DECODE
    assert decode.assignment.closing is None
    assert {outcome.error for outcome in outcomes} == {""}
    assert "decode-2" in {outcome.decode_worker for outcome in outcomes if outcome.asked.due_s > 2 * FIRST_S}
