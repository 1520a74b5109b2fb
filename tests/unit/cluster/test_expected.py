"""The membership names the workers that do not serve and will, so that routers let requests wait for them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from tandem.cluster.supervision.health import Phase
from tandem.cluster.supervision.registry import Registry
from tandem.cluster.supervision.size import SizeChange
from tandem.protocol import conversion
from tandem.protocol.generated.tandem.v1 import cluster_pb2
from tandem.protocol.messages import ExpectedWorker, Membership, Role

from .crew import DISAGGREGATED, Crew, D, P, Workers, until

ROLES = {"prefill-0": P, "decode-0": D}


def expected(registry: Registry) -> dict[str, Role]:
    return {worker.worker_id: worker.role for worker in registry.membership().expected}


async def test_a_worker_that_dies_is_expected_from_its_death_to_its_return() -> None:
    crew = await Crew.of(Workers(ROLES, DISAGGREGATED))
    registry = crew.workers.registry
    seen: list[tuple[bool, bool]] = []

    async def watch() -> None:
        async for membership in registry.watch():
            serves = any(info.peer.worker_id == "decode-0" for info in membership.workers)
            seen.append((serves, ExpectedWorker("decode-0", D) in membership.expected))

    watching = asyncio.create_task(watch())
    await until(lambda: seen)
    before = crew.supervisors["decode-0"].health().incarnation
    crew.processes["decode-0"].over.set()
    await until(lambda: crew.supervisors["decode-0"].health().incarnation > before and seen[-1] == (True, False))
    assert (False, True) in seen
    assert all(serves is not waits for serves, waits in seen), "at every moment one of both is so"
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await crew.stop()


async def test_a_drained_worker_is_not_expected_until_it_is_restarted() -> None:
    crew = await Crew.of(Workers({**ROLES, "decode-1": D}, DISAGGREGATED))
    registry = crew.workers.registry
    await crew.operator.drain_worker("decode-0", 1.0, restart=False, force=False)
    assert expected(registry) == {}
    crew.room.clear()
    restart = asyncio.create_task(crew.operator.drain_worker("decode-0", 1.0, restart=True, force=False))
    await until(lambda: expected(registry) == {"decode-0": D})
    crew.room.set()
    await restart
    assert expected(registry) == {}
    await crew.stop()


async def test_a_new_worker_is_expected_until_it_is_given_up() -> None:
    crew = await Crew.of(Workers(ROLES, DISAGGREGATED))
    registry = crew.workers.registry
    watching = registry.watch()
    await anext(watching)
    crew.room.clear()
    growing = asyncio.create_task(crew.operator.resize(SizeChange(decode=2, wait_s=60.0)))
    assert (await anext(watching)).expected == (ExpectedWorker("decode-1", D),)
    await crew.operator.resize(SizeChange(decode=1))
    while (await anext(watching)).expected:
        pass
    await asyncio.gather(growing, return_exceptions=True)
    await crew.stop()


async def test_a_worker_that_drains_to_be_restarted_is_expected() -> None:
    crew = await Crew.of(Workers(ROLES, DISAGGREGATED))
    workers = crew.workers
    crew.drains.clear()
    restart = asyncio.create_task(crew.operator.drain_worker("decode-0", 1.0, restart=True, force=False))
    await until(lambda: crew.supervisors["decode-0"].phase is Phase.DRAINING)
    workers._say(replace(workers.infos["decode-0"], closing=D))
    assert expected(workers.registry) == {"decode-0": D}
    crew.drains.set()
    await restart
    assert expected(workers.registry) == {}
    await crew.stop()


def test_a_mirror_has_the_expected_workers_of_the_leader_until_it_leads() -> None:
    registry = Registry()
    waits = (ExpectedWorker("decode-0", D),)
    registry.mirror(Membership(1, (), "adaptive", None, waits))
    assert registry.membership().expected == waits
    registry.keep(())
    assert registry.membership().expected == ()


def test_expected_workers_survive_the_wire() -> None:
    membership = Membership(
        3, (), "adaptive", None, (ExpectedWorker("decode-0", D), ExpectedWorker("both-1", Role.BOTH))
    )
    assert conversion.from_proto(conversion.to_proto(membership, cluster_pb2.Membership), Membership) == membership
