"""Changes of the number of workers: few changes, all kinds of work always possible, and no name lost."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tandem.cluster.operations.operator
import tandem.cluster.supervision.process_supervisor
from tandem.cluster.supervision.health import Phase
from tandem.cluster.supervision.modes import ModeChange, Topology
from tandem.cluster.supervision.process_supervisor import WAITS_FOR_NODE
from tandem.cluster.supervision.roles import another, plan
from tandem.cluster.supervision.size import SizeChange, Steps
from tandem.cluster.supervision.takeover import Takeover
from tandem.protocol.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, Unavailable
from tandem.protocol.messages import Role, WorkerInfo
from tandem.protocol.mode import Mode
from tandem.settings.cluster import ClusterSettings

from .crew import BOTH, DISAGGREGATED, Crew, D, P, Workers, until

COUNTS = st.fixed_dictionaries({P: st.integers(1, 5), D: st.integers(1, 5)})


def named(roles: list[Role], begin: str) -> dict[str, Role]:
    return {f"{begin}{number}": role for number, role in enumerate(roles)}


@given(COUNTS, st.lists(st.sampled_from([P, D]), max_size=8), st.lists(st.sampled_from([P, D]), max_size=3))
def test_steps_reach_the_wanted_roles_and_no_serving_worker_leaves_for_a_new_one(
    wanted: dict[Role, int], here: list[Role], awaited: list[Role]
) -> None:
    old, new = named(here, "h"), named(awaited, "a")
    steps = Steps.to(Counter(wanted), old, new)
    left = Counter(role for name, role in (old | new).items() if name not in steps.leave) + Counter(steps.add)
    assert left[P] + steps.into_prefill == wanted[P]
    assert left[D] - steps.into_prefill == wanted[D]
    if steps.add or any(name not in steps.leave for name in new):
        assert not any(name in old for name in steps.leave), "one that serves leaves, and another has to start"


def test_the_worker_of_least_value_leaves() -> None:
    steps = Steps.to(Counter({P: 1, D: 2}), {"c": D, "b": D, "a": P}, {"z": P, "y": D, "x": D})
    assert steps == Steps(leave=("z", "y", "x"))
    assert Steps.to(Counter({P: 1, D: 3}), {"c": D, "b": D, "a": P}, {"y": D, "x": D}) == Steps(leave=("y",))
    assert Steps.to(Counter({P: 1, D: 1}), {"c": D, "b": D, "a": P}, {}) == Steps(leave=("c",))
    assert Steps.to(Counter({P: 1, D: 4}), {"c": D, "b": P, "a": P}, {"z": D}) == Steps((D,), (), -1)


@pytest.mark.parametrize(
    ("change", "mode", "field"),
    [
        ({"workers": 2}, Mode.DISAGGREGATED, "--workers"),
        ({"prefill": 2}, Mode.ADAPTIVE, "--prefill"),
        ({"decode": 65}, Mode.DISAGGREGATED, "--decode"),
        ({}, Mode.COLOCATED, "--workers"),
    ],
)
def test_what_cannot_be_is_named(change: dict[str, Any], mode: Mode, field: str) -> None:
    with pytest.raises(InvalidArgument) as failure:
        SizeChange(**change).over(mode, {P: 1, D: 1})
    assert failure.value.field == field


def test_what_is_not_said_stays() -> None:
    assert SizeChange(decode=3).over(Mode.DISAGGREGATED, {P: 2, D: 1}) == Counter({P: 2, D: 3})


def test_a_new_worker_takes_a_free_name_and_a_free_gpu() -> None:
    config = ClusterSettings.of(Path("m"), prefill=1, decode=2, device="cuda")
    slots = [slot for slot in plan(config, gpus=4) if slot.worker_id != "decode-0"]
    slot = another(config, D, slots, gpus=4)
    assert (slot.worker_id, slot.device, slot.memory_fraction) == ("decode-0", "cuda:1", 0.9)
    with pytest.raises(FailedPrecondition, match="no GPU of this host has 90% of its memory left"):
        another(config, D, plan(config, gpus=3), gpus=3)
    half = ClusterSettings.of(Path("m"), device="cuda:0", memory_fraction=0.3)
    assert another(half, P, plan(half, gpus=1), gpus=1).device == "cuda:0"
    joined = ClusterSettings.of(Path("m"), device="cuda", ray_address="auto")
    assert another(joined, P, plan(joined, gpus=0), gpus=0).device == "cuda"


async def test_it_grows_and_shrinks_while_all_work_is_taken() -> None:
    workers = Workers({"prefill-0": P, "decode-0": D}, DISAGGREGATED)
    await until(lambda: workers.seen)
    crew = await Crew.of(workers)
    await crew.operator.resize(SizeChange(prefill=2, decode=2, wait_s=60))
    four = {"prefill-0": P, "prefill-1": P, "decode-0": D, "decode-1": D}
    assert workers.roles == four
    assert workers.assignments.topology.prefill == 2
    infos = await crew.operator.resize(SizeChange(prefill=3, decode=1, wait_s=60))
    assert {info.peer.worker_id for info in infos} == set(four)
    assert list(workers.roles.values()).count(P) == 3
    assert not crew.drained, "roles flip, nobody leaves for that"
    await crew.operator.resize(SizeChange(prefill=1, wait_s=60))
    assert sorted(workers.roles.values()) == [D, P]
    assert len(crew.drained) == 2
    await crew.operator.set_mode(ModeChange("adaptive"))
    await crew.operator.resize(SizeChange(workers=3, wait_s=60))
    assert sorted(workers.roles.values()) == [BOTH] * 3
    assert "both-0" in workers.roles
    await crew.operator.resize(SizeChange(workers=1))
    assert list(workers.roles) == ["prefill-0"], "the newest leave"
    assert list(crew.supervisors) == list(await workers.assignments.roles()) == ["prefill-0"]
    assert sorted(crew.released) == ["both-0", "decode-0", "decode-1", "prefill-1"]
    workers.check()
    await crew.stop()


async def test_who_finds_no_room_is_awaited_and_counts() -> None:
    workers = Workers({"prefill-0": P, "decode-0": D}, DISAGGREGATED)
    crew = await Crew.of(workers)
    crew.room.clear()
    with pytest.raises(DeadlineExceeded, match="decode-1 is waiting for a node"):
        await crew.operator.resize(SizeChange(prefill=2, decode=2, wait_s=0.1))
    assert workers.roles == {"prefill-0": P, "decode-0": D}
    with pytest.raises(DeadlineExceeded):
        await crew.operator.resize(SizeChange(prefill=2, decode=2))
    assert len(crew.supervisors) == 4
    assert crew.operator.coming == 2
    assert [worker.worker_id for worker in crew.operator.absent()] == ["prefill-1", "decode-1"]
    assert {(worker.reason, worker.coming) for worker in crew.operator.absent()} == {(WAITS_FOR_NODE, True)}
    await crew.operator.set_mode(ModeChange("disaggregated", prefill=1, decode=1))
    with pytest.raises(DeadlineExceeded, match="prefill-1"):
        await crew.operator.resize(SizeChange(prefill=2, decode=1))
    assert list(crew.supervisors) == ["prefill-0", "decode-0", "prefill-1"], "who never served is given up first"
    crew.room.set()
    await until(lambda: workers.roles == {"prefill-0": P, "decode-0": D, "prefill-1": P})
    await until(lambda: workers.assignments.topology.prefill == 2)
    await until(lambda: crew.operator.coming == 0)
    assert not crew.operator.absent()
    await crew.stop()


async def test_a_new_worker_ends_the_standing_in_for_one_that_stays_away() -> None:
    workers = Workers({"prefill-0": P, "decode-0": D}, DISAGGREGATED)
    crew = await Crew.of(workers)
    await crew.operator.drain_worker("prefill-0", 1.0, restart=False, force=False)
    assert workers.roles == {"decode-0": BOTH}
    await crew.operator.resize(SizeChange(prefill=1, decode=1, wait_s=60))
    await until(lambda: workers.roles == {"prefill-1": P, "decode-0": D})
    assert crew.supervisors["prefill-0"].phase is Phase.DRAINED, "an operator wanted that"
    assert [(worker.worker_id, worker.coming) for worker in crew.operator.absent()] == [("prefill-0", False)]
    await crew.operator.drain_worker("prefill-0", 1.0, restart=True, force=False)
    assert workers.roles == {"prefill-0": P, "prefill-1": P, "decode-0": D}
    await crew.stop()


async def test_one_that_moves_counts_and_can_be_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tandem.cluster.operations.operator, "NODE_LOOK_S", 0.001)
    workers = Workers({"prefill-0": P, "decode-0": D, "decode-1": D}, DISAGGREGATED)
    crew = await Crew.of(workers)
    await crew.operator.drain_worker("decode-1", 1.0, restart=False, force=True, node_leaves=True)
    with pytest.raises(DeadlineExceeded, match="decode-1 is drained"):
        await crew.operator.resize(SizeChange(prefill=1, decode=2))
    assert len(crew.supervisors) == 3, "nobody takes its place, for it comes back"
    await crew.operator.resize(SizeChange(prefill=1, decode=1))
    assert list(crew.supervisors) == ["prefill-0", "decode-0"]
    crew.nodes_up = False
    await asyncio.sleep(0.02)
    assert workers.roles == {"prefill-0": P, "decode-0": D}
    await crew.stop()


async def test_one_that_moves_comes_back_although_ray_did_not_answer_for_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tandem.cluster.operations.operator, "NODE_LOOK_S", 0.0)
    workers = Workers({"prefill-0": P, "decode-0": D, "decode-1": D}, DISAGGREGATED)
    crew = await Crew.of(workers)
    answers = [OSError("Ray is away"), True, OSError("Ray is away"), False]

    async def node_is_up(_node: str) -> bool:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    crew.operator._node_is_up = node_is_up
    await crew.operator.drain_worker("decode-1", 1.0, restart=False, force=True, node_leaves=True)
    await until(lambda: "decode-1" in workers.roles)
    assert not answers
    assert caplog.text.count("cannot determine if a has left") == 2
    await crew.stop()


async def test_a_worker_that_is_abandoned_during_its_restart_is_reported() -> None:
    workers = Workers({"both-0": BOTH, "both-1": BOTH}, Topology(Mode.ADAPTIVE))
    crew = await Crew.of(workers)
    crew.room.clear()
    restarting = asyncio.ensure_future(crew.operator.drain_worker("both-1", 1.0, restart=True, force=False))
    await until(lambda: crew.supervisors["both-1"].phase is Phase.STARTING)
    await crew.operator.resize(SizeChange(workers=1))
    with pytest.raises(FailedPrecondition, match="both-1 was taken out"):
        await restarting
    assert list(crew.supervisors) == ["both-0"]
    await crew.stop()


async def test_finishing_ends_operations_under_way_and_names_drained_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tandem.cluster.operations.operator, "NODE_LOOK_S", 0.001)
    workers = Workers({"prefill-0": P, "decode-0": D, "decode-1": D, "decode-2": D}, DISAGGREGATED)
    crew = await Crew.of(workers)
    await crew.operator.drain_worker("decode-0", 1.0, restart=False, force=False)
    await crew.operator.drain_worker("decode-1", 1.0, restart=False, force=True, node_leaves=True)
    crew.room.clear()
    restarting = asyncio.ensure_future(crew.operator.drain_worker("decode-2", 1.0, restart=True, force=True))
    await until(lambda: crew.supervisors["decode-2"].phase is Phase.STARTING)
    takeover = await crew.operator.finish()
    assert takeover == Takeover(("decode-0",), (("decode-1", "a"),))
    with pytest.raises(Unavailable, match="another controller has taken over"):
        await restarting
    assert crew.operator.coming == 1, "the one that starts"
    crew.operator.resume(takeover)
    crew.room.set()
    crew.nodes_up = False
    await until(lambda: "decode-1" in workers.roles)
    assert "decode-0" not in workers.roles
    await crew.stop()


async def test_a_drain_that_runs_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tandem.cluster.operations.operator, "LOOK_S", 0.001)
    workers = Workers({"prefill-0": P, "decode-0": D, "decode-1": D}, DISAGGREGATED)
    crew = await Crew.of(workers)
    crew.drains.clear()
    leaving = asyncio.ensure_future(crew.operator.resize(SizeChange(prefill=1, decode=1)))
    await until(lambda: any(supervisor.phase is Phase.DRAINING for supervisor in crew.supervisors.values()))
    letting_go = asyncio.ensure_future(crew.operator.finish())
    await asyncio.sleep(0.02)
    assert not letting_go.done()
    crew.drains.set()
    assert await letting_go == Takeover(), "who leaves for good does not stay away"
    await asyncio.gather(leaving, return_exceptions=True)
    await crew.stop()


async def test_who_drains_since_its_node_leaves_is_handed_over_as_one_that_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The hand-over is right even just after the end of the drain, and the caller of the drain gets its result."""
    workers = Workers({"prefill-0": P, "decode-0": D, "decode-1": D}, DISAGGREGATED)
    crew = await Crew.of(workers)
    crew.drains.clear()
    monkeypatch.setattr(tandem.cluster.operations.operator, "LOOK_S", 0.0)
    monkeypatch.setattr(tandem.cluster.supervision.process_supervisor, "LOOK_S", 0.02)  # it is noticed late
    asking = crew.operator.drain_worker("decode-1", 1.0, restart=False, force=True, node_leaves=True)
    draining = asyncio.ensure_future(asking)
    await until(lambda: crew.supervisors["decode-1"].phase is Phase.DRAINING)
    letting_go = asyncio.ensure_future(crew.operator.finish())
    await asyncio.sleep(0)
    crew.drains.set()
    assert await letting_go == Takeover(rescheduling=(("decode-1", "a"),))
    await draining
    assert await crew.operator.finish() == Takeover(("decode-1",)), "it was given up, and nobody knows of its node"
    await crew.stop()


async def test_a_drain_that_never_ends_does_not_prevent_a_takeover(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tandem.cluster.operations.operator, "END_S", 0.0)
    workers = Workers({"prefill-0": P, "decode-0": D, "decode-1": D}, DISAGGREGATED)
    crew = await Crew.of(workers)

    async def without_end(_info: WorkerInfo, _grace_s: float) -> None:
        return

    monkeypatch.setattr(crew, "drain", without_end)
    with pytest.raises(DeadlineExceeded):
        await crew.operator.drain_worker("decode-1", 0.0, restart=False, force=False)
    assert crew.supervisors["decode-1"].phase is Phase.DRAINING
    async with asyncio.timeout(60):
        assert await crew.operator.finish() == Takeover()
    await crew.stop()
