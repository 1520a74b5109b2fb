"""The controller's wanted state: modes become duties, workers are told, and at every moment all work is taken."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import cluster.duties
import cluster.operator
from cluster.config import Mode
from cluster.duties import Duties
from cluster.health import Phase
from cluster.keeper import Keeper
from cluster.modes import ModeChange, Sharing, assign
from cluster.operator import Operator
from cluster.registry import Registry
from wire.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, NotFound, Unavailable
from wire.messages import Duty, ModelFacts, PeerRef, Role, WorkerInfo
from wire.policy_name import PolicyName

P, D, BOTH = Role.PREFILL, Role.DECODE, Role.BOTH
FACTS = ModelFacts("m", 10, 10, (), "float32")
DISAGGREGATED = Sharing(Mode.DISAGGREGATED, 1)


class Workers:
    """Workers that do what they are told, as fast as the test says, and a log of what the registry said meanwhile."""

    def __init__(self, roles: dict[str, Role], sharing: Sharing) -> None:
        self.registry = Registry()
        self.busy: set[str] = set()
        """Those whose halves do not get empty."""
        self.deaf: set[str] = set()
        self.seen: list[tuple[str, dict[str, Role | None]]] = []
        self.infos: dict[str, WorkerInfo] = {}
        self.duties = Duties(self.registry, sharing, roles, self._tell)
        for worker_id, role in roles.items():
            self.start(worker_id, 1, sharing.duty(role))
        self._tasks = [asyncio.ensure_future(self._note()), asyncio.ensure_future(self.duties.run())]

    def start(self, worker_id: str, incarnation: int, duty: Duty) -> None:
        peer = PeerRef(worker_id, incarnation)
        self._say(WorkerInfo(peer, duty.role, "a:1", FACTS, 8, 4, 8, 16, "cpu", "fake", duty=duty))

    def die(self, worker_id: str) -> None:
        self.registry.unregister(self.infos.pop(worker_id).peer)

    def finish(self, worker_id: str) -> None:
        """What it had to finish is over."""
        self.busy.discard(worker_id)
        info = self.infos[worker_id]
        assert info.duty is not None
        self._say(replace(info, role=info.duty.role, closing=None))

    @property
    def roles(self) -> dict[str, Role | None]:
        return {info.peer.worker_id: info.open for info in self.registry.membership().workers}

    def check(self) -> None:
        """At every moment somebody took prompts and somebody answers."""
        for mode, roles in self.seen:
            taken = [role for role in roles.values() if role is not None]
            assert any(role.prefills for role in taken), (mode, roles)
            assert any(role.decodes for role in taken), (mode, roles)
            if mode == Mode.COLOCATED:
                assert all(role is BOTH for role in taken), (mode, roles)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _tell(self, info: WorkerInfo, duty: Duty, _grace_s: float) -> None:
        name = info.peer.worker_id
        if name in self.deaf:
            raise Unavailable(f"{name} does not answer")
        now = self.infos[name]
        role = now.role | duty.role
        self._say(replace(now, role=role, closing=role.without(duty.role), duty=duty))
        if name not in self.busy:
            asyncio.get_running_loop().call_soon(self.finish, name)

    def _say(self, info: WorkerInfo) -> None:
        self.infos[info.peer.worker_id] = info
        self.registry.register(info)

    async def _note(self) -> None:
        async for membership in self.registry.watch():
            self.seen.append((membership.mode, {info.peer.worker_id: info.open for info in membership.workers}))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_through_all_modes_somebody_takes_every_kind_of_work() -> None:
    workers = Workers({"a": P, "b": D}, DISAGGREGATED)
    await until(lambda: workers.seen)
    for change, roles in (
        (ModeChange("colocated", step_policy="chunked", step_budget=7), {"a": BOTH, "b": BOTH}),
        (ModeChange("disaggregated"), {"a": P, "b": D}),
        (ModeChange("adaptive", itl_target_s=0.02), {"a": BOTH, "b": BOTH}),
        (ModeChange("disaggregated", prefill=1, decode=1), {"a": P, "b": D}),
        (ModeChange("colocated", itl_target_s=-1), {"a": BOTH, "b": BOTH}),
    ):
        await workers.duties.set_mode(change)
        assert workers.roles == roles
        assert workers.registry.membership().mode == change.mode
        await until(lambda change=change: workers.seen[-1][0] == change.mode)  # type: ignore[misc]
    workers.check()
    assert workers.infos["b"].duty == Duty(BOTH, PolicyName.CHUNKED, 7, None)
    await workers.stop()


async def test_the_answer_comes_when_the_last_half_is_empty() -> None:
    workers = Workers({"a": BOTH, "b": BOTH}, Sharing(Mode.ADAPTIVE))
    workers.busy |= {"a", "b"}
    changing = asyncio.ensure_future(workers.duties.set_mode(ModeChange("disaggregated")))
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


async def test_who_comes_back_has_the_duty_of_now() -> None:
    workers = Workers({"a": P, "b": D}, DISAGGREGATED)
    await workers.duties.set_mode(ModeChange("colocated", step_policy="decode-priority"))
    workers.die("b")
    assert workers.duties.wanted("b") == Duty(BOTH, PolicyName.DECODE_PRIORITY)
    # Made before the change, registered after it: it is told.
    workers.start("b", 2, Duty(D))
    await until(lambda: workers.infos["b"].duty == workers.duties.wanted("b"))
    assert workers.roles == {"a": BOTH, "b": BOTH}
    await workers.stop()


async def test_who_dies_in_a_change_does_not_hold_it_up() -> None:
    workers = Workers({"a": P, "b": D}, DISAGGREGATED)
    workers.deaf.add("b")
    changing = asyncio.ensure_future(workers.duties.set_mode(ModeChange("adaptive")))
    await until(lambda: workers.infos["a"].open is BOTH)
    await asyncio.sleep(0.01)
    assert not changing.done()
    workers.die("b")
    await changing
    workers.deaf.clear()
    workers.start("b", 2, workers.duties.wanted("b"))
    await until(lambda: workers.roles == {"a": BOTH, "b": BOTH})
    await workers.stop()


async def test_without_what_is_needed_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers({"a": P, "b": D}, DISAGGREGATED)
    workers.deaf.add("b")
    monkeypatch.setattr(cluster.duties, "OPEN_S", 0.05)
    with pytest.raises(DeadlineExceeded, match="b did not open"):
        await workers.duties.set_mode(ModeChange("colocated"))
    await until(lambda: workers.roles == {"a": P, "b": D})
    assert workers.registry.membership().mode == "disaggregated"
    assert workers.duties.sharing == DISAGGREGATED
    await workers.stop()


async def test_who_takes_too_long_follows_later(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers({"a": BOTH, "b": BOTH}, Sharing(Mode.ADAPTIVE))
    workers.busy.add("b")
    monkeypatch.setattr(cluster.duties, "SETTLE_S", 0.05)
    with pytest.raises(DeadlineExceeded, match="b still finishes"):
        await workers.duties.set_mode(ModeChange("disaggregated"))
    workers.finish("b")
    assert workers.roles == {"a": P, "b": D}
    await workers.stop()


def test_roles_that_are_needed_are_kept() -> None:
    roles = {"a": D, "b": BOTH, "c": P, "d": D}
    found = {name: duty.role for name, duty in assign(Sharing(Mode.DISAGGREGATED, 2), roles).items()}
    assert found == {"a": D, "b": P, "c": P, "d": D}


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
def test_half_prefill_unless_told_otherwise(given: dict[str, int], prefill: int) -> None:
    assert ModeChange("disaggregated", **given).over(Sharing(Mode.COLOCATED), 5).prefill == prefill  # type: ignore[arg-type]


class Drained:
    """Keepers without processes, and workers that drain when they are told to."""

    def __init__(self, workers: Workers) -> None:
        self.workers = workers
        self.drained: list[str] = []
        self.keepers = {name: Keeper(name, self._never, lambda _: None) for name in workers.infos}
        for keeper in self.keepers.values():
            keeper._phase = Phase.SERVING
        self.operator = Operator(workers.registry, workers.duties, self.keepers, self, self.node_is_up)
        self.nodes_up = True

    async def node_is_up(self, _address: str) -> bool:
        return self.nodes_up

    async def _never(self, _incarnation: int) -> Any:
        raise AssertionError

    async def drain(self, info: WorkerInfo, _grace_s: float) -> None:
        name = info.peer.worker_id
        assert self.keepers[name].phase is Phase.DRAINING
        self.drained.append(name)
        self.workers.die(name)
        self.keepers[name]._phase = Phase.DRAINED

    async def back(self, name: str) -> None:
        await until(self.keepers[name]._wanted.is_set)
        self.workers.start(name, 2, self.workers.duties.wanted(name))
        self.keepers[name]._phase = Phase.SERVING


async def test_another_worker_stands_in_for_the_last_of_its_kind() -> None:
    workers = Workers({"a": P, "b": D}, DISAGGREGATED)
    await until(lambda: workers.seen)
    stage = Drained(workers)
    await stage.operator.drain_worker("b", 1.0, restart=False, force=False)
    assert workers.roles == {"a": BOTH}
    with pytest.raises(FailedPrecondition, match="a is the only worker that serves"):
        await stage.operator.drain_worker("a", 1.0, restart=False, force=False)
    with pytest.raises(FailedPrecondition, match="b was drained before; add --restart"):
        await stage.operator.drain_worker("b", 1.0, restart=False, force=False)
    with pytest.raises(NotFound, match="there are a, b"):
        await stage.operator.drain_worker("c", 1.0, restart=False, force=False)
    restarting = asyncio.ensure_future(stage.operator.drain_worker("b", 1.0, restart=True, force=False))
    await stage.back("b")
    await restarting
    assert workers.roles == {"a": P, "b": D}
    assert stage.drained == ["b"]
    workers.check()
    await workers.stop()


async def test_a_worker_comes_back_once_its_node_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.operator, "NODE_LOOK_S", 0.001)
    workers = Workers({"a": P, "b": D}, DISAGGREGATED)
    await until(lambda: workers.seen)
    stage = Drained(workers)
    await stage.operator.drain_worker("b", 1.0, restart=False, force=True, node_leaves=True)
    assert workers.roles == {"a": BOTH}
    await asyncio.sleep(0.02)
    assert not stage.keepers["b"]._wanted.is_set(), "its node is still there"
    stage.nodes_up = False
    await stage.back("b")
    await until(lambda: workers.roles == {"a": P, "b": D})
    workers.check()
    await workers.stop()


async def test_nobody_leaves_whom_nobody_stands_in_for(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers({"a": P, "b": D}, DISAGGREGATED)
    stage = Drained(workers)
    workers.deaf.add("a")
    monkeypatch.setattr(cluster.duties, "OPEN_S", 0.05)
    with pytest.raises(DeadlineExceeded, match="a did not open"):
        await stage.operator.drain_worker("b", 1.0, restart=False, force=False)
    assert stage.keepers["b"].phase is Phase.SERVING
    assert not stage.drained
    workers.deaf.clear()
    await stage.operator.set_mode(ModeChange("colocated"))
    assert workers.roles == {"a": BOTH, "b": BOTH}
    await workers.stop()


async def test_a_worker_that_is_away_has_the_mode_of_now_when_it_is_back() -> None:
    workers = Workers({"a": P, "b": D, "c": D}, DISAGGREGATED)
    stage = Drained(workers)
    await stage.operator.drain_worker("c", 1.0, restart=False, force=False)
    assert workers.roles == {"a": P, "b": D}
    await stage.operator.set_mode(ModeChange("adaptive"))
    assert workers.duties.wanted("c") == Duty(BOTH)
    await stage.operator.set_mode(ModeChange("disaggregated", prefill=1, decode=1))
    restarting = asyncio.ensure_future(stage.operator.drain_worker("c", 1.0, restart=True, force=False))
    await stage.back("c")
    await restarting
    assert workers.roles == {"a": P, "b": D, "c": D}
    await workers.stop()
