"""A removed slot is not reused until its resources are released."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from tandem.cluster.operations.worker_slots import Fleet
from tandem.cluster.supervision.health import Phase
from tandem.cluster.supervision.process_supervisor import Process, ProcessSupervisor
from tandem.cluster.supervision.roles import Slot
from tandem.protocol.messages import Role

SLOT = Slot("decode-0", Role.DECODE, "cpu")


async def cannot_begin(_incarnation: int) -> Process:
    raise OSError("no process here")


def keeper_of(slot: Slot) -> ProcessSupervisor:
    return ProcessSupervisor(slot.worker_id, cannot_begin, lambda _incarnation: None)


def first_free(role: Role, slots: Sequence[Slot]) -> Slot:
    taken = {slot.worker_id for slot in slots}
    return next(Slot(name, role, "cpu") for name in ("decode-0", "decode-1") if name not in taken)


def fleet_of_one(release: Callable[[Slot], Awaitable[None]]) -> Fleet:
    fleet = Fleet(keeper_of, first_free, release)
    fleet.add(SLOT)
    return fleet


async def test_a_slot_stays_taken_until_its_bundle_is_released() -> None:
    begun, may_end, given_back = asyncio.Event(), asyncio.Event(), []

    async def release(slot: Slot) -> None:
        begun.set()
        await may_end.wait()
        given_back.append(slot.worker_id)

    fleet = fleet_of_one(release)
    removals = [asyncio.ensure_future(fleet.remove("decode-0")) for _ in range(2)]
    await begun.wait()
    assert fleet.supervisors["decode-0"].phase is Phase.STOPPED
    assert fleet.new_slots([Role.DECODE])[0].worker_id == "decode-1"
    removals[0].cancel()
    letting_go = asyncio.ensure_future(fleet.release())
    await asyncio.sleep(0)
    assert not letting_go.done(), "another controller may want the name"
    may_end.set()
    await letting_go
    await removals[1]
    assert given_back == ["decode-0"]
    assert not fleet.supervisors
    assert fleet.new_slots([Role.DECODE])[0].worker_id == "decode-0"


async def test_a_slot_that_cannot_be_released_is_logged_and_delays_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def release(_slot: Slot) -> None:
        raise OSError("Ray is away")

    fleet = fleet_of_one(release)
    await fleet.remove("decode-0")
    assert not fleet.supervisors
    assert not fleet.health()
    assert "decode-0 is removed" in caplog.text
    assert "Ray is away" in caplog.text
