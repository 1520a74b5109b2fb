"""Orphaned workers are ended on command, and only while no controller serves with them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import pytest

from tandem.cluster.leadership import orphan_cleanup as clearing
from tandem.cluster.leadership.orphan_cleanup import Clearing
from tandem.cluster.ray_processes.controllers import Controllers, OtherController
from tandem.cluster.ray_processes.orphaned_workers import OrphanedWorker, OrphanedWorkers
from tandem.cluster.supervision.process_supervisor import Process
from tandem.cluster.supervision.takeover import Takeover
from tandem.protocol.errors import FailedPrecondition, NotFound, Unavailable
from tandem.protocol.messages import PeerRef
from tandem.worker.reporting.description import WorkerDescription


class Other(OtherController):
    """A controller that reports its listener, or an error."""

    def __init__(self, listener: Callable[[], str] | None) -> None:
        super().__init__(1)
        self._listener = listener

    async def release_workers(self) -> Takeover:
        raise AssertionError("nothing is taken from it")

    async def wait_until_decided(self) -> str:
        if self._listener is None:
            await asyncio.Event().wait()
        assert self._listener is not None
        return self._listener()

    async def ended(self) -> None:
        raise AssertionError("nobody waits for it")


class Others(Controllers):
    def __init__(self, *living: OtherController) -> None:
        self._living = list(living)

    async def others(self, than: int) -> list[OtherController]:
        assert than == 9
        return self._living


class One(OrphanedWorker):
    def __init__(self, left: Left, name: str) -> None:
        super().__init__(PeerRef(name, 7))
        self._left = left

    async def describe(self) -> WorkerDescription | None:
        raise AssertionError("nobody asks")

    def process(self, controller_address: str, outlive_s: float, on_start: Callable[[str], None]) -> Process:
        raise AssertionError("nobody keeps it")

    async def end(self, *, keep_group: bool = False) -> None:
        await self._left.may_end.wait()
        self._left.workers.remove(self.peer.worker_id)


class Left(OrphanedWorkers):
    def __init__(self, workers: Collection[str] = (), groups: Collection[str] = ()) -> None:
        self.workers = list(workers)
        self.groups = list(groups)
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def living(self) -> list[OrphanedWorker]:
        return [One(self, name) for name in self.workers]

    async def next_generation(self, above: int) -> int:
        raise AssertionError("nobody is started")

    async def clear(self, kept: Collection[str]) -> Collection[str]:
        assert not kept
        assert not self.workers
        cleared, self.groups = self.groups, []
        return cleared


def failing() -> str:
    raise Unavailable("it stops")


async def test_all_that_was_left_is_ended_and_named() -> None:
    left = Left(["decode-0", "both-1", "both-0"], ["both-1", "both-0", "decode-0", "decode-4"])
    cleared = await Clearing(9, Others(), left).clear()
    assert cleared.workers == ("both-0", "both-1", "decode-0")
    assert cleared.groups == ("both-0", "both-1", "decode-0", "decode-4")
    assert not left.workers
    assert not left.groups


async def test_a_placement_group_without_a_worker_is_released_too() -> None:
    cleared = await Clearing(9, Others(), Left(groups=["decode-0"])).clear()
    assert (cleared.workers, cleared.groups) == ((), ("decode-0",))


async def test_where_nothing_was_left_the_name_is_asked_for() -> None:
    with pytest.raises(NotFound, match="--cluster-name"):
        await Clearing(9, Others(), Left()).clear()


@pytest.mark.parametrize(
    ("listener", "said"),
    [
        (lambda: "10.0.0.1:5", "its controller is at 10.0.0.1:5; stop it there"),
        (failing, "its controller is one that ends"),
        (None, "its controller is one that starts or hangs"),
    ],
)
async def test_workers_of_another_live_start_are_not_cleared(
    listener: Callable[[], str] | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clearing, "ANSWER_S", 0.01)
    left = Left(["decode-0"], ["decode-0"])
    clear = Clearing(9, Others(Other(listener)), left)
    with pytest.raises(FailedPrecondition, match=said):
        await clear.clear()
    assert left.workers == left.groups == ["decode-0"]
    assert await clear.release_workers() == Takeover(), "whoever begins does not wait for what was refused"


async def test_a_start_that_begins_meanwhile_waits_until_all_is_over() -> None:
    left = Left(["decode-0"], ["decode-0"])
    left.may_end.clear()
    clear = Clearing(9, Others(), left)
    clearing_up, asked = asyncio.ensure_future(clear.clear()), asyncio.ensure_future(clear.release_workers())
    with pytest.raises(Unavailable):
        await clear.wait_until_decided()
    for _ in range(9):
        await asyncio.sleep(0)
    assert not asked.done()
    left.may_end.set()
    assert await asked == Takeover()
    assert not left.groups
    await clearing_up
