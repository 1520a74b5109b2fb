"""Leader election, with controllers that come and go as the test says."""

from __future__ import annotations

import asyncio
import random

import pytest

from tandem.cluster.leadership import election
from tandem.cluster.leadership.election import LeaderElection
from tandem.cluster.ray_processes.controllers import Controllers, OtherController
from tandem.cluster.supervision.takeover import Takeover
from tandem.protocol.errors import Unavailable
from tests.soak import seeds
from tests.unit.cluster.crew import until


class SupervisedWorkers:
    """Records the calls of the election."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.did: list[str] = []
        self.takeover = Takeover((f"drained-{number}",))
        self.got: list[Takeover] = []
        self.failures = 0
        self.may_take_over = asyncio.Event()
        self.may_take_over.set()
        self.follows = ""

    async def take_over(self, takeover: Takeover) -> None:
        await self.may_take_over.wait()
        if self.failures:
            self.failures -= 1
            raise OSError("Ray is slow")
        self.got.append(takeover)
        self.did.append("take over")

    async def release_workers(self) -> Takeover:
        self.did.append("let go")
        return self.takeover

    async def mirror_membership(self, address: str) -> None:
        self.follows = address
        try:
            await asyncio.Event().wait()
        finally:
            self.follows = ""


class Seen(OtherController):
    """One controller as another sees it."""

    def __init__(self, one: One) -> None:
        super().__init__(one.number)
        self._one = one

    async def release_workers(self) -> Takeover:
        return await self._answer(self._one.election.release_workers())

    async def wait_until_decided(self) -> str:
        await self._answer(self._one.election.wait_until_decided())
        return f"listener-{self.number}"

    async def ended(self) -> None:
        await self._one.over.wait()

    async def _answer(self, call):  # type: ignore[no-untyped-def]
        asked, over = asyncio.ensure_future(call), asyncio.ensure_future(self._one.over.wait())
        try:
            await asyncio.wait({asked, over}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
            raise Unavailable("it is gone")
        finally:
            for task in (asked, over):
                task.cancel()
            await asyncio.gather(asked, over, return_exceptions=True)


class One:
    """A controller of a group of them."""

    def __init__(self, all_of_them: list[One], number: int) -> None:
        self.number = number
        self.workers = SupervisedWorkers(number)
        self.over = asyncio.Event()
        self.election = LeaderElection(number, Others(all_of_them), self.workers)
        all_of_them.append(self)

    async def start(self) -> One:
        await self.election.begin()
        self.election.started()
        return self

    def die(self) -> None:
        self.over.set()

    async def perish(self, starts: dict[int, asyncio.Future[One]]) -> None:
        """Kills the controller, whatever its state."""
        self.die()
        for task in filter(None, (starts[self.number], self.election._leader_task)):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class Others(Controllers):
    def __init__(self, all_of_them: list[One]) -> None:
        self._all = all_of_them

    async def others(self, than: int) -> list[OtherController]:
        living = sorted((one.number, one) for one in self._all if not one.over.is_set() and one.number != than)
        return [Seen(one) for _, one in living]


async def some_turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def supervisors(group: list[One]) -> list[int]:
    return [one.number for one in group if one.election.keeps and not one.over.is_set()]


async def test_the_first_one_keeps_them() -> None:
    group: list[One] = []
    one = await One(group, 1).start()
    assert supervisors(group) == [1]
    assert one.workers.got == [Takeover()]
    assert await one.election.decided() == ""
    assert await one.election.alone()


async def test_a_younger_one_takes_over_when_the_olders_start_is_over() -> None:
    group: list[One] = []
    first = One(group, 1)
    await first.election.begin()
    second = One(group, 2)
    taking = asyncio.ensure_future(second.start())
    await asyncio.sleep(0.01)
    assert not taking.done()
    assert first.workers.did == ["take over"]
    first.election.started()
    await taking
    assert supervisors(group) == [2]
    assert second.workers.got == [Takeover(("drained-1",))]
    await until(lambda: first.workers.follows == "listener-2")
    assert await first.election.decided() == "listener-2"
    assert first.election.successor == "listener-2"
    assert not await second.election.alone()


async def test_who_finds_a_younger_one_when_it_begins_follows_it() -> None:
    """Its number was given out before, but it was slow."""
    group: list[One] = []
    young = await One(group, 5).start()
    old = await One(group, 3).start()
    assert (young.workers.did, old.workers.did) == (["take over"], [])
    assert (old.election.successor, old.workers.follows) == ("listener-5", "listener-5")
    young.die()
    await until(lambda: old.election.keeps)
    assert old.workers.got == [Takeover()]


async def test_who_follows_from_the_beginning_is_no_obstacle_between_two_others() -> None:
    group: list[One] = []
    oldest, young = await One(group, 1).start(), One(group, 5)
    between = One(group, 3)
    starting = asyncio.ensure_future(between.start())
    await until(lambda: between.election._leader_task)
    await young.start()
    assert oldest.workers.did == ["take over", "let go"]
    assert young.workers.got == [Takeover(("drained-1",))]
    await starting
    assert between.workers.follows == "listener-5"
    assert supervisors(group) == [5]


async def test_a_chain_of_controllers_ends_at_the_youngest() -> None:
    group: list[One] = []
    young, first = One(group, 5), One(group, 1)
    following = asyncio.ensure_future(first.start())
    await some_turns(20)
    youngest = One(group, 7)
    await asyncio.gather(young.start(), youngest.start(), following)
    assert first.workers.follows == "listener-5"
    assert young.workers.follows == "listener-7"
    assert supervisors(group) == [7]


async def test_an_outdated_poll_makes_no_controller_a_second_supervisor() -> None:
    """A third controller begins between the look and the action that follows from it."""
    group: list[One] = []
    first = await One(group, 1).start()
    second = await One(group, 2).start()
    looked, released = asyncio.Event(), asyncio.Event()
    poll = first.election._controllers.others

    async def slowly(than: int) -> list[OtherController]:
        controllers = await poll(than)
        looked.set()
        await released.wait()
        return controllers

    first.election._controllers.others = slowly  # type: ignore[method-assign]
    second.die()
    await looked.wait()
    starting = asyncio.ensure_future(One(group, 3).start())
    await some_turns(20)
    released.set()
    await starting
    await until(lambda: first.workers.follows == "listener-3")
    assert supervisors(group) == [3]
    assert first.workers.did == ["take over", "let go"] * 2


async def test_a_controller_that_follows_from_the_beginning_takes_over_from_older_ones() -> None:
    """The younger controller died before it asked them."""
    group: list[One] = []
    await One(group, 1).start()
    young, between = One(group, 5), One(group, 3)
    starting = asyncio.ensure_future(between.start())
    await until(lambda: between.election._leader_task)
    young.die()
    await starting
    assert supervisors(group) == [3]
    assert between.workers.got == [Takeover(("drained-1",))]


@seeds(40)
async def test_one_of_many_controllers_supervises_workers_in_any_order_of_starts_and_deaths(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers are given out before controllers can be found, and a look may be outdated when it returns."""
    monkeypatch.setattr(election, "AGAIN_S", 0.0)
    chance = random.Random(seed)
    group: list[One] = []
    starts: dict[int, asyncio.Future[One]] = {}

    class Slow(Others):
        async def others(self, than: int) -> list[OtherController]:
            await some_turns(chance.randrange(12))
            controllers = await super().others(than)
            await some_turns(chance.randrange(12))
            return controllers

    class Jealous(SupervisedWorkers):
        async def take_over(self, takeover: Takeover) -> None:
            assert not [one for one in group if has_them(one)], "two keep them"
            await super().take_over(takeover)
            await some_turns(chance.randrange(12))

    def has_them(one: One) -> bool:
        return not one.over.is_set() and one.workers.did[-1:] == ["take over"]

    numbers = chance.sample(range(9), 5)
    for number in numbers:
        one = One(group, number)
        one.workers = Jealous(number)
        one.election = LeaderElection(number, Slow(group), one.workers)
        starts[number] = asyncio.ensure_future(one.start())
        await some_turns(chance.randrange(12))
        if chance.random() < 0.4 and (living := [candidate for candidate in group[:-1] if not candidate.over.is_set()]):
            await chance.choice(living).perish(starts)
    living = [one for one in group if not one.over.is_set()]
    for candidate in await asyncio.wait_for(asyncio.gather(*(starts[one.number] for one in living)), 60):
        assert candidate in living
    await until(lambda: supervisors(group) == [max(one.number for one in living)])
    assert [one.number for one in living if has_them(one)] == supervisors(group)
    for one in living:
        await one.perish(starts)


async def test_a_controller_that_released_its_workers_takes_over_again_when_no_younger_one_lives() -> None:
    group: list[One] = []
    first, second = await One(group, 1).start(), await One(group, 2).start()
    second.die()
    await until(lambda: first.election.keeps)
    assert first.workers.did == ["take over", "let go", "take over"]
    assert (first.workers.follows, first.election.successor) == ("", "")
    third = await One(group, 3).start()
    assert supervisors(group) == [3]
    assert third.workers.got == [Takeover(("drained-1",))]


async def test_a_controller_that_released_its_workers_follows_the_youngest_when_one_between_them_ends() -> None:
    group: list[One] = []
    first = await One(group, 1).start()
    second = await One(group, 2).start()
    await One(group, 3).start()
    await until(lambda: first.workers.follows == "listener-2")
    first_keeper = first.election.kept_at
    second.die()
    await until(lambda: first.workers.follows == "listener-3" or not first.election.kept_at)
    assert (first_keeper, first.election.kept_at) == ("listener-2", "listener-3"), (
        "at no time they were said to be here"
    )
    assert supervisors(group) == [3]
    assert first.workers.did == ["take over", "let go"]


async def test_one_that_dies_while_it_is_asked_is_no_obstacle() -> None:
    group: list[One] = []
    first = One(group, 1)
    await first.election.begin()
    second = One(group, 2)
    taking = asyncio.ensure_future(second.start())
    await asyncio.sleep(0.01)
    first.die()
    await taking
    assert supervisors(group) == [2]
    assert second.workers.got == [Takeover()]


async def test_one_that_dies_while_it_takes_over_gives_them_back() -> None:
    group: list[One] = []
    first, second = await One(group, 1).start(), One(group, 2)
    second.workers.may_take_over.clear()
    taking = asyncio.ensure_future(second.start())
    await until(lambda: first.workers.did[-1] == "let go")
    waiting = asyncio.ensure_future(first.election.decided())
    await asyncio.sleep(0.01)
    assert not waiting.done(), "nobody keeps them yet"
    taking.cancel()
    second.die()
    await until(lambda: first.election.keeps)
    assert await waiting == ""


async def test_a_controller_that_fails_to_release_its_workers_follows_the_younger_one() -> None:
    group: list[One] = []
    first = await One(group, 1).start()

    async def fail() -> Takeover:
        raise Unavailable("it does not work")

    first.workers.release_workers = fail  # type: ignore[method-assign]
    await One(group, 2).start()
    assert supervisors(group) == [2]
    await until(lambda: first.workers.follows == "listener-2")


async def test_taking_over_again_is_tried_until_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(election, "AGAIN_S", 0.0)
    group: list[One] = []
    first, second = await One(group, 1).start(), await One(group, 2).start()
    first.workers.failures = 2
    second.die()
    await until(lambda: first.election.keeps)
    assert first.workers.failures == 0


async def test_a_controller_that_stops_releases_nothing_and_follows_none() -> None:
    group: list[One] = []
    first = One(group, 1)
    await first.election.begin()
    second = One(group, 2)
    taking = asyncio.ensure_future(second.start())
    await asyncio.sleep(0.01)
    await first.election.stop()
    await taking
    assert first.workers.did == ["take over"]
    await second.election.stop()
    for ask in (second.election.release_workers, second.election.wait_until_decided):
        with pytest.raises(Unavailable):
            await ask()
