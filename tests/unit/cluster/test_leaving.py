"""Workers that live on, or end, when their controller stops."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tandem.cluster import controller
from tandem.cluster.controller import Controller
from tandem.cluster.worker_supervisor import ControllerConfig
from tandem.settings.cluster import ClusterSettings

OUTLIVING = ClusterSettings.of(Path("m"), ray_address="auto", token="t", outlive_s=9.0)


class LeaderElection:
    """An election with the outcome that the test says."""

    def __init__(self, keeps: bool, alone: bool) -> None:
        self.keeps = keeps
        self.stopped = False
        self._alone = alone

    async def stop(self) -> None:
        self.stopped = True

    async def alone(self) -> bool:
        assert self.stopped, "whoever takes over meanwhile has to be seen"
        return self._alone


class WorkerSupervisor:
    """Records how it was stopped."""

    def __init__(self, taken_over: bool, started: bool) -> None:
        self.taken_over = frozenset({"prefill-0"} if taken_over else ())
        self.started = asyncio.Event()
        if started:
            self.started.set()
        self.stops: list[bool] = []

    async def stop(self, *, end_workers: bool) -> None:
        self.stops.append(end_workers)


async def leaves(
    config: ClusterSettings = OUTLIVING,
    *,
    asked: bool = False,
    keeps: bool = True,
    alone: bool = True,
    taken_over: bool = False,
    started: bool = True,
) -> bool:
    """Returns True if a controller in this state leaves its workers when it stops."""
    stopped = Controller(ControllerConfig(config, (), 0, "t"))
    supervisor = WorkerSupervisor(taken_over, started)
    stopped._election = LeaderElection(keeps, alone)  # type: ignore[assignment]
    stopped._supervisor = supervisor  # type: ignore[assignment]
    left = await stopped.stop(leave_workers=asked)
    assert supervisor.stops == [not left]
    await asyncio.wait_for(stopped.run(), 60)
    return left


@pytest.fixture(autouse=True)
def _without_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "begin_log", lambda *_: None)


@pytest.mark.parametrize("taken_over", [False, True])
async def test_the_last_one_ends_them_unless_it_is_to_leave_them(taken_over: bool) -> None:
    assert not await leaves(taken_over=taken_over)
    assert await leaves(taken_over=taken_over, asked=True)


@pytest.mark.parametrize("keeps", [False, True])
async def test_another_one_that_lives_has_them_from_then_on(keeps: bool) -> None:
    assert await leaves(alone=False, keeps=keeps)


async def test_a_controller_that_released_workers_ends_them_where_no_other_lives() -> None:
    """Both were stopped: it had no time to take over again."""
    assert not await leaves(keeps=False)
    assert await leaves(keeps=False, asked=True)


async def test_a_start_that_fails_ends_what_it_began_and_no_others() -> None:
    assert not await leaves(started=False)
    assert await leaves(started=False, taken_over=True)
    assert await leaves(started=False, keeps=False), "it had only begun to take over"


async def test_workers_that_cannot_outlive_it_end_with_it() -> None:
    config = OUTLIVING.with_fields(outlive_s=0.0)
    for keeps in (False, True):
        assert not await leaves(config, asked=True, alone=False, keeps=keeps, taken_over=True, started=False)
