"""Which of several controllers keeps the workers, with controllers that come and go as the test says."""

from __future__ import annotations

import asyncio

import pytest

from cluster import succession
from cluster.controllers import Controllers, OtherController
from cluster.inheritance import Handover
from cluster.succession import Succession
from tests.unit.cluster.crew import until
from wire.errors import Unavailable


class House:
    """Remembers what was done to it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.did: list[str] = []
        self.handover = Handover((f"away-{number}",))
        self.got: list[Handover] = []
        self.failures = 0
        self.may_take_over = asyncio.Event()
        self.may_take_over.set()
        self.follows = ""

    async def take_over(self, handover: Handover) -> None:
        await self.may_take_over.wait()
        if self.failures:
            self.failures -= 1
            raise OSError("Ray is slow")
        self.got.append(handover)
        self.did.append("take over")

    async def let_go(self) -> Handover:
        self.did.append("let go")
        return self.handover

    async def follow(self, address: str) -> None:
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

    async def let_go(self) -> Handover:
        return await self._answer(self._one.succession.let_go())

    async def settled(self) -> str:
        await self._answer(self._one.succession.settled())
        return f"door-{self.number}"

    async def ended(self) -> None:
        await self._one.over.wait()

    async def _answer(self, call):  # type: ignore[no-untyped-def]
        asked, over = asyncio.ensure_future(call), asyncio.ensure_future(self._one.over.wait())
        await asyncio.wait({asked, over}, return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        if asked.done():
            return asked.result()
        asked.cancel()
        raise Unavailable("it is gone")


class One:
    """A controller of a group of them."""

    def __init__(self, all_of_them: list[One], number: int) -> None:
        self.number = number
        self.house = House(number)
        self.over = asyncio.Event()
        self.succession = Succession(number, Others(all_of_them), self.house)
        all_of_them.append(self)

    async def start(self) -> One:
        await self.succession.begin()
        self.succession.started()
        return self

    def die(self) -> None:
        self.over.set()


class Others(Controllers):
    def __init__(self, all_of_them: list[One]) -> None:
        self._all = all_of_them

    async def others(self, than: int) -> list[OtherController]:
        living = sorted((one.number, one) for one in self._all if not one.over.is_set() and one.number != than)
        return [Seen(one) for _, one in living]


def keepers(group: list[One]) -> list[int]:
    return [one.number for one in group if one.succession.keeps and not one.over.is_set()]


async def test_the_first_one_keeps_them() -> None:
    group: list[One] = []
    one = await One(group, 1).start()
    assert keepers(group) == [1]
    assert one.house.got == [Handover()]
    assert await one.succession.decided() == ""
    assert await one.succession.alone()


async def test_a_younger_one_takes_over_when_the_olders_start_is_over() -> None:
    group: list[One] = []
    first, second = One(group, 1), One(group, 2)
    await first.succession.begin()
    taking = asyncio.ensure_future(second.start())
    await asyncio.sleep(0.01)
    assert not taking.done()
    assert first.house.did == ["take over"]
    first.succession.started()
    await taking
    assert keepers(group) == [2]
    assert second.house.got == [Handover(("away-1",))]
    await until(lambda: first.house.follows == "door-2")
    assert await first.succession.decided() == "door-2"
    assert first.succession.successor == "door-2"
    assert not await second.succession.alone()


async def test_an_older_one_is_not_asked_by_its_elders() -> None:
    """Whatever starts late under a smaller number."""
    group: list[One] = []
    young = await One(group, 5).start()
    old = await One(group, 3).start()
    assert young.house.did == ["take over"]
    assert old.house.got == [Handover()]


async def test_who_let_go_takes_over_again_when_nobody_younger_lives() -> None:
    group: list[One] = []
    first, second = await One(group, 1).start(), await One(group, 2).start()
    second.die()
    await until(lambda: first.succession.keeps)
    assert first.house.did == ["take over", "let go", "take over"]
    assert (first.house.follows, first.succession.successor) == ("", "")
    third = await One(group, 3).start()
    assert keepers(group) == [3]
    assert third.house.got == [Handover(("away-1",))]


async def test_who_let_go_follows_the_youngest_when_one_between_them_ends() -> None:
    group: list[One] = []
    first = await One(group, 1).start()
    second = await One(group, 2).start()
    await One(group, 3).start()
    await until(lambda: first.house.follows == "door-2")
    first_heard = first.succession.kept_at
    second.die()
    await until(lambda: first.house.follows == "door-3" or not first.succession.kept_at)
    assert (first_heard, first.succession.kept_at) == ("door-2", "door-3"), "at no time they were said to be here"
    assert keepers(group) == [3]
    assert first.house.did == ["take over", "let go"]


async def test_one_that_dies_while_it_is_asked_is_no_obstacle() -> None:
    group: list[One] = []
    first, second = One(group, 1), One(group, 2)
    await first.succession.begin()
    taking = asyncio.ensure_future(second.start())
    await asyncio.sleep(0.01)
    first.die()
    await taking
    assert keepers(group) == [2]
    assert second.house.got == [Handover()]


async def test_one_that_dies_while_it_takes_over_gives_them_back() -> None:
    group: list[One] = []
    first, second = await One(group, 1).start(), One(group, 2)
    second.house.may_take_over.clear()
    taking = asyncio.ensure_future(second.start())
    await until(lambda: first.house.did[-1] == "let go")
    waiting = asyncio.ensure_future(first.succession.decided())
    await asyncio.sleep(0.01)
    assert not waiting.done(), "nobody keeps them yet"
    taking.cancel()
    second.die()
    await until(lambda: first.succession.keeps)
    assert await waiting == ""


async def test_one_that_fails_to_let_go_is_no_obstacle_and_heeds_the_younger() -> None:
    group: list[One] = []
    first = await One(group, 1).start()

    async def fail() -> Handover:
        raise Unavailable("it does not work")

    first.house.let_go = fail  # type: ignore[method-assign]
    await One(group, 2).start()
    assert keepers(group) == [2]
    await until(lambda: first.house.follows == "door-2")


async def test_taking_over_again_is_tried_until_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(succession, "AGAIN_S", 0.0)
    group: list[One] = []
    first, second = await One(group, 1).start(), await One(group, 2).start()
    first.house.failures = 2
    second.die()
    await until(lambda: first.succession.keeps)
    assert first.house.failures == 0


async def test_one_that_stops_hands_nothing_over_and_heeds_nobody() -> None:
    group: list[One] = []
    first, second = One(group, 1), One(group, 2)
    await first.succession.begin()
    taking = asyncio.ensure_future(second.start())
    await asyncio.sleep(0.01)
    await first.succession.stop()
    await taking
    assert first.house.did == ["take over"]
    await second.succession.stop()
    for ask in (second.succession.let_go, second.succession.settled):
        with pytest.raises(Unavailable):
            await ask()
