"""The controller's wanted state: modes become assignments, workers take them, and no kind of work is ever refused."""

import asyncio
from typing import Any

import pytest

import tandem.cluster.background
import tandem.cluster.operations.assignments
import tandem.cluster.operations.operator
from tandem.cluster.background import begin, going_on
from tandem.cluster.supervision.health import Phase
from tandem.cluster.supervision.modes import ModeChange, Topology, assign
from tandem.protocol.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, NotFound
from tandem.protocol.messages import Assignment, WorkerInfo
from tandem.protocol.mode import Mode
from tandem.protocol.policy_name import PolicyName

from .crew import BOTH, DISAGGREGATED, Crew, D, P, Workers, until


async def test_in_all_modes_every_kind_of_work_has_a_worker() -> None:
    workers = Workers({"a": P, "b": D}, DISAGGREGATED)
    await until(lambda: workers.seen)
    for change, roles in (
        (ModeChange("colocated", step_policy="chunked", step_budget=7), {"a": BOTH, "b": BOTH}),
        (ModeChange("disaggregated"), {"a": P, "b": D}),
        (ModeChange("adaptive", itl_target_s=0.02), {"a": BOTH, "b": BOTH}),
        (ModeChange("disaggregated", prefill=1, decode=1), {"a": P, "b": D}),
        (ModeChange("colocated", itl_target_s=-1), {"a": BOTH, "b": BOTH}),
    ):
        await workers.assignments.set_mode(change)
        assert workers.roles == roles
        assert workers.registry.membership().mode == change.mode
        await until(lambda change=change: workers.seen[-1][0] == change.mode)  # type: ignore[misc]
    workers.check()
    assert workers.infos["b"].assignment == Assignment(BOTH, PolicyName.CHUNKED, 7, None)
    await workers.stop()


async def test_the_answer_comes_when_the_last_half_is_empty() -> None:
    workers = Workers({"a": BOTH, "b": BOTH}, Topology(Mode.ADAPTIVE))
    workers.busy |= {"a", "b"}
    changing = asyncio.ensure_future(workers.assignments.set_mode(ModeChange("disaggregated")))
    await until(lambda: workers.infos["b"].closing is P)
    assert (workers.infos["a"].role, workers.infos["a"].closing) == (BOTH, D)
    assert workers.registry.membership().mode == "disaggregated"
    workers.finish("a")
    await asyncio.sleep(0.01)
    assert not changing.done()
    workers.finish("b")
    await changing
    assert workers.roles == {"a": P, "b": D}
    await workers.stop()


async def test_assignments_are_sent_although_a_call_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An unexpected failure of a call or of the comparison does not stop the loop."""
    for module in (tandem.cluster.operations.assignments, tandem.cluster.background):
        monkeypatch.setattr(module, "RETRY_S" if module is tandem.cluster.operations.assignments else "AGAIN_S", 0.0)
    workers = Workers({"a": P, "b": D}, DISAGGREGATED)
    send, poll, failures = workers.assignments._send, workers.assignments._poll, ["send", "poll"]

    async def send_at_last(info: WorkerInfo, assignment: Assignment, grace_s: float) -> None:
        if "send" in failures:
            failures.remove("send")
            raise KeyError("a defect of telling")
        await send(info, assignment, grace_s)

    def look_at_last() -> None:
        if "poll" in failures:
            failures.remove("poll")
            raise KeyError("a defect of looking")
        poll()

    workers.assignments._send = send_at_last
    await until(lambda: workers.seen)
    workers._tasks[1].cancel()
    monkeypatch.setattr(workers.assignments, "_poll", look_at_last)
    workers._tasks.append(begin(going_on(workers.assignments.run, "sending"), "sending"))
    await until(lambda: "poll" not in failures)
    await workers.assignments.set_mode(ModeChange("colocated"))
    assert workers.roles == {"a": BOTH, "b": BOTH}
    assert not failures
    assert "sending failed; restarting it" in caplog.text
    assert "could not send" in caplog.text
    await workers.stop()


async def test_a_worker_that_comes_back_has_the_current_assignment() -> None:
    workers = Workers({"a": P, "b": D}, DISAGGREGATED)
    await workers.assignments.set_mode(ModeChange("colocated", step_policy="decode-priority"))
    workers.die("b")
    assert workers.assignments.wanted("b") == Assignment(BOTH, PolicyName.DECODE_PRIORITY)
    # Made before the change, registered after it: it is told.
    workers.start("b", 2, Assignment(D))
    await until(lambda: workers.infos["b"].assignment == workers.assignments.wanted("b"))
    assert workers.roles == {"a": BOTH, "b": BOTH}
    await workers.stop()


async def test_who_dies_in_a_change_does_not_hold_it_up() -> None:
    workers = Workers({"a": P, "b": D}, DISAGGREGATED)
    workers.deaf.add("b")
    changing = asyncio.ensure_future(workers.assignments.set_mode(ModeChange("adaptive")))
    await until(lambda: workers.infos["a"].open is BOTH)
    await asyncio.sleep(0.01)
    assert not changing.done()
    workers.die("b")
    await changing
    workers.deaf.clear()
    workers.start("b", 2, workers.assignments.wanted("b"))
    await until(lambda: workers.roles == {"a": BOTH, "b": BOTH})
    await workers.stop()


async def test_without_what_is_needed_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers({"a": P, "b": D}, DISAGGREGATED)
    workers.deaf.add("b")
    monkeypatch.setattr(tandem.cluster.operations.assignments, "OPEN_S", 0.05)
    with pytest.raises(DeadlineExceeded, match="b did not open"):
        await workers.assignments.set_mode(ModeChange("colocated"))
    await until(lambda: workers.roles == {"a": P, "b": D})
    assert workers.registry.membership().mode == "disaggregated"
    assert workers.assignments.topology == DISAGGREGATED
    await workers.stop()


async def test_who_takes_too_long_follows_later(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers({"a": BOTH, "b": BOTH}, Topology(Mode.ADAPTIVE))
    workers.busy.add("b")
    monkeypatch.setattr(tandem.cluster.operations.assignments, "STABLE_TIMEOUT_S", 0.05)
    with pytest.raises(DeadlineExceeded, match="b still finishes"):
        await workers.assignments.set_mode(ModeChange("disaggregated"))
    workers.finish("b")
    assert workers.roles == {"a": P, "b": D}
    await workers.stop()


async def test_a_prefill_worker_with_pipeline_stages_is_not_asked_to_decode() -> None:
    workers = Workers({"a": P, "b": D}, DISAGGREGATED, prefill_only="--prefill-pipeline-size")
    await workers.assignments.cover_role_of("b")
    workers.die("b")
    assert workers.assignments.wanted("a").role is P
    workers.start("b", 2, workers.assignments.wanted("b"))
    await workers.assignments.restore_worker("b")
    for change in (workers.assignments.set_mode(ModeChange("colocated")), workers.assignments.flip(-1, 0.0)):
        with pytest.raises(FailedPrecondition):
            await change
    assert workers.roles == {"a": P, "b": D}
    await workers.assignments.cover_role_of("a")
    workers.die("a")
    assert workers.roles == {"b": BOTH}, "a decode worker has one stage and can do both"
    await workers.stop()


async def test_after_a_takeover_without_decode_workers_pipeline_stages_do_not_decode() -> None:
    workers = Workers({"a": P, "b": D}, DISAGGREGATED, prefill_only="--prefill-pipeline-size")
    workers.assignments.inherit(DISAGGREGATED, {"a": P, "b": D}, drained=["b"])
    assert workers.assignments.wanted("a").role is P
    await workers.stop()


def test_roles_that_are_needed_are_kept() -> None:
    roles = {"a": D, "b": BOTH, "c": P, "d": D}
    assigned = {name: assignment.role for name, assignment in assign(Topology(Mode.DISAGGREGATED, 2), roles).items()}
    assert assigned == {"a": D, "b": P, "c": P, "d": D}


@pytest.mark.parametrize(
    ("change", "workers", "field"),
    [
        ({"mode": "both"}, 2, "mode"),
        ({"mode": "disaggregated"}, 1, "mode"),
        ({"mode": "disaggregated", "prefill": 2}, 2, "--prefill"),
        ({"mode": "disaggregated", "prefill": 1, "decode": 1}, 3, "--prefill"),
        ({"mode": "colocated", "decode": 1}, 2, "--decode"),
        ({"mode": "colocated", "step_policy": "greedy"}, 2, "--step-policy"),
        ({"mode": "colocated", "step_budget": 5}, 2, "--step-budget"),
    ],
)
def test_what_cannot_be_is_named(change: dict[str, Any], workers: int, field: str) -> None:
    with pytest.raises(InvalidArgument) as failure:
        ModeChange(**change).over(DISAGGREGATED, workers)
    assert failure.value.field == field


@pytest.mark.parametrize(("given", "prefill"), [({}, 2), ({"prefill": 3}, 3), ({"decode": 3}, 2)])
def test_half_of_the_workers_prefill_by_default(given: dict[str, int], prefill: int) -> None:
    assert ModeChange("disaggregated", **given).over(Topology(Mode.COLOCATED), 5).prefill == prefill  # type: ignore[arg-type]


async def test_another_worker_stands_in_for_the_last_of_its_kind() -> None:
    workers = Workers({"a": P, "b": D}, DISAGGREGATED)
    await until(lambda: workers.seen)
    stage = await Crew.of(workers)
    await stage.operator.drain_worker("b", 1.0, restart=False, force=False)
    assert workers.roles == {"a": BOTH}
    with pytest.raises(FailedPrecondition, match="a is the only worker that serves"):
        await stage.operator.drain_worker("a", 1.0, restart=False, force=False)
    with pytest.raises(FailedPrecondition, match="b was drained before; add --restart"):
        await stage.operator.drain_worker("b", 1.0, restart=False, force=False)
    with pytest.raises(NotFound, match="there are a, b"):
        await stage.operator.drain_worker("c", 1.0, restart=False, force=False)
    await stage.operator.drain_worker("b", 1.0, restart=True, force=False)
    assert workers.roles == {"a": P, "b": D}
    assert stage.drained == ["b"]
    workers.check()
    await stage.stop()


async def test_a_worker_comes_back_once_its_node_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tandem.cluster.operations.operator, "NODE_LOOK_S", 0.001)
    workers = Workers({"a": P, "b": D}, DISAGGREGATED)
    await until(lambda: workers.seen)
    stage = await Crew.of(workers)
    await stage.operator.drain_worker("b", 1.0, restart=False, force=True, node_leaves=True)
    assert workers.roles == {"a": BOTH}
    await asyncio.sleep(0.02)
    assert stage.supervisors["b"].phase is Phase.DRAINED, "its node is still there"
    stage.nodes_up = False
    await until(lambda: stage.supervisors["b"].phase is Phase.SERVING)
    await until(lambda: workers.roles == {"a": P, "b": D})
    workers.check()
    await stage.stop()


async def test_a_worker_without_a_substitute_is_not_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers({"a": P, "b": D}, DISAGGREGATED)
    stage = await Crew.of(workers)
    workers.deaf.add("a")
    with monkeypatch.context() as patch:
        patch.setattr(tandem.cluster.operations.assignments, "OPEN_S", 0.05)
        with pytest.raises(DeadlineExceeded, match="a did not open"):
            await stage.operator.drain_worker("b", 1.0, restart=False, force=False)
    assert stage.supervisors["b"].phase is Phase.SERVING
    assert not stage.drained
    workers.deaf.clear()
    await stage.operator.set_mode(ModeChange("colocated"))
    assert workers.roles == {"a": BOTH, "b": BOTH}
    await stage.stop()


async def test_who_leaves_does_not_wait_for_answers_elsewhere() -> None:
    """A draining pod cannot wait for the requests of workers that change roles."""
    workers = Workers({"prefill-0": P, "decode-0": D, "decode-1": D}, DISAGGREGATED)
    crew = await Crew.of(workers)
    workers.busy.add("decode-0")
    change = asyncio.ensure_future(crew.operator.set_mode(ModeChange("disaggregated", prefill=2, grace_s=600)))
    await until(lambda: workers.infos["decode-0"].closing is D)
    await asyncio.wait_for(crew.operator.drain_worker("prefill-0", 1.0, restart=False, force=False), 10)
    assert crew.drained == ["prefill-0"]
    assert not change.done()
    workers.finish("decode-0")
    await change
    assert workers.roles == {"decode-0": P, "decode-1": D}
    workers.check()
    await crew.stop()


async def test_a_worker_that_is_away_has_the_mode_of_now_when_it_is_back() -> None:
    workers = Workers({"a": P, "b": D, "c": D}, DISAGGREGATED)
    stage = await Crew.of(workers)
    await stage.operator.drain_worker("c", 1.0, restart=False, force=False)
    assert workers.roles == {"a": P, "b": D}
    await stage.operator.set_mode(ModeChange("adaptive"))
    assert workers.assignments.wanted("c") == Assignment(BOTH)
    await stage.operator.set_mode(ModeChange("disaggregated", prefill=1, decode=1))
    await stage.operator.drain_worker("c", 1.0, restart=True, force=False)
    assert workers.roles == {"a": P, "b": D, "c": D}
    await stage.stop()


async def test_it_begins_anew_with_workers_as_they_are() -> None:
    workers = Workers({"a": P, "b": D, "c": D}, DISAGGREGATED)
    workers.assignments.inherit(DISAGGREGATED, {"a": D, "b": P, "c": D})
    assert workers.assignments.wanted("b").role is P
    await until(lambda: workers.roles == {"a": D, "b": P, "c": D})
    assert workers.assignments.topology.prefill == 1
    workers.assignments.inherit(Topology(Mode.DISAGGREGATED, 1), {"a": D, "b": P, "c": D}, drained=["b"])
    await until(lambda: workers.roles == {"a": BOTH, "b": P, "c": BOTH})
    assert workers.assignments.topology.prefill == 0
    await workers.assignments.restore_worker("b")
    assert workers.roles == {"a": D, "b": P, "c": D}
    workers.assignments.inherit(Topology(Mode.COLOCATED), {"a": D, "b": P, "c": D})
    await until(lambda: workers.roles == {"a": BOTH, "b": BOTH, "c": BOTH})
    await workers.stop()
