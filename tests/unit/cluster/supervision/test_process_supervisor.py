"""A supervisor with processes that live as long as the test says."""

import asyncio

import pytest

from tandem.cluster.supervision.health import Backoff, Health, Phase
from tandem.cluster.supervision.process_supervisor import Process, ProcessSupervisor


class FakeProcess(Process):
    """A process that starts and dies on command."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.may_start = asyncio.Event()
        self.start_error: Exception | None = None
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.ends = 0
        self.hangs = False
        self.knows_the_question = True
        self.kills = 0
        self.asked = 0

    async def pid(self) -> int:
        return 1000 + self.number

    async def works(self) -> None:
        self.asked += 1
        if not self.knows_the_question:
            raise AttributeError("works")
        if self.hangs:
            await asyncio.Event().wait()

    async def kill(self) -> None:
        self.kills += 1

    async def progress(self) -> tuple[str, float]:
        return "loading", 0.5

    async def start(self) -> None:
        await self.may_start.wait()
        if self.start_error is not None:
            raise self.start_error

    async def ended(self) -> str:
        return await asyncio.shield(self.death)

    async def end(self, grace_s: float) -> None:
        self.ends += 1


class Stage:
    """A supervisor, its processes, and the incarnations whose death it reported."""

    def __init__(self, adopted: tuple[int, FakeProcess] | None = None, hang_deadline_s: float = 0.0) -> None:
        self.processes: list[FakeProcess] = []
        self.incarnations: list[int] = []
        self.dead: list[int] = []
        self.spawn_error: Exception | None = None
        self.supervisor = ProcessSupervisor(
            "w", self._spawn, self.dead.append, Backoff(0, 0), hang_deadline_s=hang_deadline_s
        )
        if adopted is not None:
            self.supervisor.adopt(*adopted)
        self.run = asyncio.ensure_future(self.supervisor.run())

    async def _spawn(self, incarnation: int) -> Process:
        self.incarnations.append(incarnation)
        if self.spawn_error is not None:
            error, self.spawn_error = self.spawn_error, None
            raise error
        self.processes.append(FakeProcess(len(self.processes)))
        return self.processes[-1]

    async def until(self, processes: int, phase: Phase) -> FakeProcess:
        async with asyncio.timeout(60):
            while len(self.processes) < processes or self.supervisor.health().phase is not phase:  # noqa: ASYNC110
                await asyncio.sleep(0)
        return self.processes[-1]


async def test_death_is_reported_and_a_new_incarnation_follows() -> None:
    stage = Stage()
    first = await stage.until(1, Phase.STARTING)
    first.may_start.set()
    await stage.until(1, Phase.SERVING)
    assert stage.supervisor.health().pid == 1000
    first.death.set_result("the process died")
    second = await stage.until(2, Phase.STARTING)
    assert stage.dead == stage.incarnations[:1]
    assert stage.incarnations[1] > stage.incarnations[0]
    assert first.ends == 1
    second.may_start.set()
    await stage.until(2, Phase.SERVING)
    health = stage.supervisor.health()
    assert (health.restarts, health.error, health.pid) == (1, "the process died", 1001)
    stage.supervisor.stop()
    await stage.run


async def test_a_process_whose_death_cannot_be_reported_is_restarted_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = Stage()
    first = await stage.until(1, Phase.STARTING)

    def fail(incarnation: int) -> None:
        stage.supervisor._on_death = stage.dead.append
        raise KeyError(incarnation)

    stage.supervisor._on_death = fail
    first.death.set_result("the process died")
    second = await stage.until(2, Phase.STARTING)
    assert first.ends == 1
    assert "supervising w failed" in caplog.text
    second.may_start.set()
    await stage.until(2, Phase.SERVING)
    stage.supervisor.stop()
    await stage.run


async def test_death_during_the_start_is_seen_at_once() -> None:
    stage = Stage()
    (await stage.until(1, Phase.STARTING)).death.set_result("killed while loading")
    await stage.until(2, Phase.STARTING)
    assert stage.supervisor.health().error == "killed while loading"
    stage.supervisor.stop()
    await stage.run


async def test_a_failed_start_is_ended_and_tried_again() -> None:
    stage = Stage()
    first = await stage.until(1, Phase.STARTING)
    first.start_error = ValueError("no room\nsecond line")
    first.may_start.set()
    await stage.until(2, Phase.STARTING)
    assert first.ends == 1
    assert stage.supervisor.health().error == "no room"
    assert stage.dead == stage.incarnations[:1]
    stage.supervisor.stop()
    await stage.run


async def test_a_failed_spawn_is_tried_again() -> None:
    stage = Stage()
    stage.spawn_error = RuntimeError("no node has room")
    await stage.until(1, Phase.STARTING)
    assert stage.supervisor.health().error == "no node has room"
    assert len(stage.incarnations) == 2
    stage.supervisor.stop()
    await stage.run


@pytest.mark.parametrize("serving", [False, True])
async def test_stop_ends_the_process_and_starts_no_other(serving: bool) -> None:
    stage = Stage()
    process = await stage.until(1, Phase.STARTING)
    if serving:
        process.may_start.set()
        await stage.until(1, Phase.SERVING)
    stage.supervisor.stop()
    await stage.run
    assert process.ends == 1
    assert len(stage.processes) == 1
    assert stage.dead == stage.incarnations
    assert stage.supervisor.health().phase is Phase.STOPPED


async def test_progress_of_the_start_is_known() -> None:
    stage = Stage()
    await stage.until(1, Phase.STARTING)
    async with asyncio.timeout(60):
        while stage.supervisor.health().stage != "loading":  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert stage.supervisor.health().fraction == 0.5
    stage.supervisor.stop()
    await stage.run


def test_backoff_doubles_up_to_its_bound_and_forgets_after_a_long_life() -> None:
    backoff = Backoff(first_s=0.5, longest_s=3.0, stable_s=30.0)
    assert [backoff.after_death(1.0) for _ in range(6)] == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]
    assert backoff.after_death(31.0) == 0.0
    assert backoff.after_death(1.0) == 0.5


async def test_a_retired_process_has_no_successor_until_it_is_asked_for() -> None:
    stage = Stage()
    first = await stage.until(1, Phase.STARTING)
    first.may_start.set()
    await stage.until(1, Phase.SERVING)
    stage.supervisor.retire()
    assert stage.supervisor.phase is Phase.DRAINING
    first.death.set_result("the process stopped by itself")
    await stage.until(1, Phase.DRAINED)
    await asyncio.sleep(0.01)
    assert len(stage.processes) == 1
    assert stage.dead == stage.incarnations
    stage.supervisor.restart()
    await stage.until(2, Phase.STARTING)
    assert stage.supervisor.health().restarts == 0
    stage.supervisor.stop()
    await stage.run


async def test_a_retired_process_that_does_not_end_is_ended_and_stays_away() -> None:
    stage = Stage()
    first = await stage.until(1, Phase.STARTING)
    first.may_start.set()
    await stage.until(1, Phase.SERVING)
    stage.supervisor.retire()
    stage.supervisor.end_now()
    await stage.until(1, Phase.DRAINED)
    assert first.ends == 1
    stage.supervisor.stop()
    await stage.run
    assert len(stage.processes) == 1


@pytest.mark.parametrize(
    ("phase", "restarts", "stage", "lack"),
    [
        (Phase.SERVING, 3, "", ""),
        (Phase.DRAINING, 0, "", ""),
        (Phase.DRAINED, 3, "", "drained; `tandem drain w --restart` brings it back"),
        (Phase.STARTING, 0, "", "starting"),
        (Phase.STARTING, 1, "loading weights", "loading weights; last error: no such file"),
        (Phase.WAITING, 2, "loading weights", "waiting to restart; last error: no such file"),
    ],
)
def test_the_reason_why_a_process_does_not_serve_is_a_sentence(
    phase: Phase, restarts: int, stage: str, lack: str
) -> None:
    assert Health("w", phase, 1, 1, restarts, "no such file", stage).lack == lack


async def test_a_detached_process_lives_on_and_another_supervisor_adopts_it() -> None:
    stage = Stage()
    process = await stage.until(1, Phase.STARTING)
    process.may_start.set()
    await stage.until(1, Phase.SERVING)
    stage.supervisor.detach()
    await stage.run
    assert (process.ends, stage.dead) == (0, [])

    process.may_start.clear()
    other = Stage((stage.incarnations[0], process))
    assert other.supervisor.health().phase is Phase.STARTING
    process.may_start.set()
    while other.supervisor.phase is not Phase.SERVING:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert other.supervisor.health().incarnation == stage.incarnations[0]
    assert other.incarnations == []
    process.death.set_result("the process died")
    await other.until(1, Phase.STARTING)
    assert other.dead == stage.incarnations
    assert other.incarnations[0] > stage.incarnations[0]
    other.supervisor.stop()
    await other.run


@pytest.mark.parametrize("dies", [False, True])
async def test_a_process_that_does_not_serve_when_it_is_detached_is_ended(dies: bool) -> None:
    stage = Stage()
    process = await stage.until(1, Phase.STARTING)
    if dies:
        process.may_start.set()
        await stage.until(1, Phase.SERVING)
        process.death.set_result("at that moment")
    stage.supervisor.detach()
    await stage.run
    assert process.ends == 1
    assert stage.dead == stage.incarnations


async def test_an_adopted_process_that_does_not_follow_yet_lives_on_when_it_is_detached() -> None:
    """An interrupted takeover ends no process, because the worker serves other routers."""
    adopted = FakeProcess(0)
    stage = Stage((7, adopted))
    await asyncio.sleep(0.01)
    assert stage.supervisor.phase is Phase.STARTING
    stage.supervisor.detach()
    await stage.run
    assert (adopted.ends, stage.dead, stage.incarnations) == (0, [], [])


OFTEN_S = 0.006
"""A deadline that passes at once; a responsive process replies between any two questions."""


async def serving(stage: Stage) -> FakeProcess:
    process = await stage.until(1, Phase.STARTING)
    process.may_start.set()
    return await stage.until(1, Phase.SERVING)


async def test_one_that_hangs_is_killed_and_a_new_one_takes_its_place() -> None:
    stage = Stage(hang_deadline_s=OFTEN_S)
    first = await serving(stage)
    first.hangs = True
    second = await stage.until(2, Phase.STARTING)
    assert (first.kills, first.ends) == (1, 1)
    assert stage.dead == stage.incarnations[:1]
    health = stage.supervisor.health()
    assert (health.restarts, health.error) == (1, "it gave no sign of life for 0.006 s and was killed")
    second.may_start.set()
    await stage.until(2, Phase.SERVING)
    stage.supervisor.stop()
    await stage.run
    assert second.kills == 0


async def test_one_that_answers_is_left_alone_and_one_question_waits_at_a_time() -> None:
    stage = Stage(hang_deadline_s=OFTEN_S)
    process = await serving(stage)
    asked = process.asked
    while process.asked < asked + 100:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert (process.kills, stage.dead) == (0, [])
    process.hangs = True
    asked = process.asked
    await stage.until(2, Phase.STARTING)
    assert process.asked <= asked + 1
    stage.supervisor.stop()
    await stage.run


async def test_a_start_may_be_silent_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A starting process loads, registers memory and captures graphs: only a far longer silence is a hang."""
    stage = Stage(hang_deadline_s=OFTEN_S)
    first = await stage.until(1, Phase.STARTING)
    first.hangs = True
    await asyncio.sleep(20 * OFTEN_S)
    assert (first.kills, len(stage.processes)) == (0, 1)
    stage.supervisor.stop()
    await stage.run
    monkeypatch.setattr("tandem.cluster.liveness.START_HANG_DEADLINE_S", 2 * OFTEN_S)
    stage = Stage(hang_deadline_s=OFTEN_S)
    first = await stage.until(1, Phase.STARTING)
    first.hangs = True
    await stage.until(2, Phase.STARTING)
    assert first.kills == 1
    assert stage.supervisor.health().error == "it gave no sign of life for 0.012 s and was killed"
    stage.supervisor.stop()
    await stage.run


async def test_an_error_is_a_sign_of_life() -> None:
    """For instance of a worker of an earlier release, which does not know the question."""
    stage = Stage(hang_deadline_s=OFTEN_S)
    process = await serving(stage)
    process.knows_the_question = False
    asked = process.asked
    while process.asked < asked + 50:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert process.kills == 0
    stage.supervisor.stop()
    await stage.run


async def test_without_a_deadline_nothing_is_asked() -> None:
    stage = Stage(hang_deadline_s=0.0)
    process = await serving(stage)
    process.hangs = True
    await asyncio.sleep(0.05)
    assert (process.asked, process.kills) == (0, 0)
    stage.supervisor.stop()
    await stage.run


async def test_one_that_hangs_while_it_drains_is_killed_too() -> None:
    stage = Stage(hang_deadline_s=OFTEN_S)
    process = await serving(stage)
    stage.supervisor.retire()
    process.hangs = True
    await stage.until(1, Phase.DRAINED)
    assert process.kills == 1
    stage.supervisor.stop()
    await stage.run
