"""A standby is prepared while its process serves, and replaces it when it dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tandem.cluster.supervision.health import Backoff, Phase
from tandem.cluster.supervision.incarnations import Incarnations
from tandem.cluster.supervision.process_supervisor import Process, ProcessSupervisor
from tandem.cluster.supervision.standby import Standby
from tests.unit.cluster.crew import until
from tests.unit.cluster.supervision.test_process_supervisor import FakeProcess


class Scene:
    """A supervised process with a standby; each process starts on command."""

    def __init__(self) -> None:
        incarnations = Incarnations()
        self.cold: list[FakeProcess] = []
        self.prepared: list[FakeProcess] = []
        self.used: list[FakeProcess] = []
        """The same processes as `prepared`, as they serve."""
        self.supervisor = ProcessSupervisor(
            "router", self._spawn, self._gone, Backoff(0, 0), hang_deadline_s=0, incarnations=incarnations
        )
        self.standby = Standby(self.supervisor, self._prepare, incarnations, hang_deadline_s=0)
        self.runs = [asyncio.ensure_future(self.supervisor.run()), asyncio.ensure_future(self.standby.run())]

    async def _spawn(self, _incarnation: int) -> Process:
        self.cold.append(FakeProcess(len(self.cold)))
        return self.cold[-1]

    async def _prepare(self, _incarnation: int) -> tuple[Process, Process]:
        number = 100 + len(self.prepared)
        self.prepared.append(FakeProcess(number))
        self.used.append(FakeProcess(number))
        return self.prepared[-1], self.used[-1]

    def _gone(self, incarnation: int) -> None:
        standby = self.standby.use(incarnation)
        if standby is not None:
            self.supervisor.adopt(*standby)

    async def serves_cold(self) -> FakeProcess:
        await until(lambda: self.cold)
        self.cold[-1].may_start.set()
        await until(lambda: self.supervisor.phase is Phase.SERVING)
        return self.cold[-1]

    async def is_ready(self, number: int) -> None:
        """Waits until the standby of this number is prepared."""
        await until(lambda: len(self.prepared) > number)
        self.prepared[number].may_start.set()
        await until(lambda: self.standby._own is not None and self.standby._own.phase is Phase.SERVING)

    async def stop(self) -> None:
        self.standby.stop()
        self.supervisor.stop()
        await asyncio.gather(*self.runs)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    made = Scene()
    yield made
    await made.stop()


async def test_a_process_that_dies_is_replaced_by_its_standby(scene: Scene) -> None:
    first = await scene.serves_cold()
    await scene.is_ready(0)
    before = scene.supervisor.health()
    first.death.set_result("the process died")
    await until(lambda: scene.supervisor.health().pid == 1100)
    assert len(scene.cold) == 1
    scene.used[0].may_start.set()
    await until(lambda: scene.supervisor.phase is Phase.SERVING)
    after = scene.supervisor.health()
    assert (after.restarts, after.error) == (1, "the process died")
    assert after.incarnation > before.incarnation
    assert (scene.prepared[0].ends, scene.used[0].ends) == (0, 0), "it lives on"
    await scene.is_ready(1)


async def test_no_standby_is_prepared_before_the_process_serves(scene: Scene) -> None:
    first = await scene.serves_cold()
    await scene.is_ready(0)
    first.death.set_result("the process died")
    await until(lambda: scene.supervisor.health().pid == 1100)
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(scene.prepared) == 1
    scene.used[0].may_start.set()
    await until(lambda: len(scene.prepared) == 2)


async def test_a_standby_that_is_not_ready_is_ended_and_a_new_process_started(scene: Scene) -> None:
    first = await scene.serves_cold()
    await until(lambda: scene.prepared)
    first.death.set_result("the process died")
    await until(lambda: len(scene.cold) == 2)
    await until(lambda: scene.prepared[0].ends)
    await scene.serves_cold()
    await until(lambda: len(scene.prepared) == 2)


async def test_a_standby_that_dies_is_replaced(scene: Scene) -> None:
    await scene.serves_cold()
    await scene.is_ready(0)
    scene.prepared[0].death.set_result("the process died")
    await scene.is_ready(1)


async def test_a_standby_ends_with_the_cluster(scene: Scene) -> None:
    await scene.serves_cold()
    await scene.is_ready(0)
    await scene.stop()
    assert scene.prepared[0].ends == 1
    assert scene.standby.use(1) is None
