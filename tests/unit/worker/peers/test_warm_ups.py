"""Ways to decode workers that fail when they are tried: again, until they are warm, or a warning where none can be."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from kv_transfer.handshake import make_handshake
from kv_transfer.in_memory import InMemoryTransport
from tandem.protocol import conversion
from tandem.protocol.errors import FailedPrecondition, Unavailable
from tandem.protocol.generated.tandem.v1 import worker_pb2
from tandem.protocol.messages import ModelFacts, PeerRef, Role, WorkerInfo
from tandem.worker.peers import warm_ups
from tandem.worker.peers.warm_ups import WarmUps
from tests.unit.worker.peers.test_peers import THERE, Scene
from tests.worker_pair import until

MISFIT = "KV pages do not fit: model_revision is a on prefill-0 but b on decode-0"
MODEL = ModelFacts("fake", 400, 2048, (2,), "float32")


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    monkeypatch.setattr(warm_ups, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(warm_ups, "LAST_RETRY_S", 0.02)
    made = Scene()
    await made.start()
    yield made
    await made.peers.close()
    await made.server.stop(None)
    made.fabric.close()


def seen(scene: Scene, peer: PeerRef = THERE, role: Role = Role.DECODE, *, closing: Role | None = None) -> WorkerInfo:
    return WorkerInfo(peer, role, scene.there.address, MODEL, 8, 16, 4, 512, "cpu", "in-memory", closing=closing)


def let_in(scene: Scene) -> None:
    transport = scene.neighbour()
    scene.decode.reply.description.CopyFrom(conversion.to_proto(transport.describe(), worker_pb2.PeerDescription))
    scene.decode.refusal = None


async def test_a_way_that_failed_is_tried_again_until_it_is_warm(scene: Scene) -> None:
    scene.decode.refusal = Unavailable("not yet")
    ways = WarmUps(scene.peers, lambda: True)
    ways.add(seen(scene))
    await until(lambda: len(scene.decode.calls) > 3)
    let_in(scene)
    await until(lambda: not ways._running)
    tries = len(scene.decode.calls)
    await asyncio.sleep(0.1)
    assert len(scene.decode.calls) == tries
    await ways.close()


@pytest.mark.parametrize("end", ["gone", "replaced", "closes", "own role"])
async def test_only_workers_that_get_kv_from_here_are_warmed_up(scene: Scene, end: str) -> None:
    scene.decode.refusal = Unavailable("not yet")
    prefills = [True]
    ways = WarmUps(scene.peers, lambda: prefills[0])
    ways.add(seen(scene))
    await until(lambda: len(scene.decode.calls) > 2)
    if end == "gone":
        ways.forget(THERE)
    elif end == "replaced":
        ways.add(seen(scene, PeerRef(THERE.worker_id, THERE.incarnation + 1), closing=Role.DECODE))
    elif end == "closes":
        ways.add(seen(scene, closing=Role.DECODE))
    else:
        prefills[0] = False
    await until(lambda: not ways._tasks)
    await ways.close()


async def test_a_decode_worker_warms_up_those_that_pull_prefixes(scene: Scene) -> None:
    ways = WarmUps(scene.peers, lambda: False)
    ways.add(seen(scene))
    assert not ways._tasks
    let_in(scene)
    ways.add(seen(scene, role=Role.PREFILL))
    await until(lambda: not ways._tasks)
    assert len(scene.decode.calls) == 1
    await ways.close()


async def test_one_that_is_back_is_tried_anew(scene: Scene) -> None:
    scene.decode.refusal = Unavailable("not yet")
    ways = WarmUps(scene.peers, lambda: True)
    ways.add(seen(scene))
    ways.forget(THERE)
    ways.add(seen(scene))
    await until(lambda: len(scene.decode.calls) > 2)
    await ways.close()
    assert not ways._tasks


async def test_a_decode_worker_that_does_not_fit_is_a_warning(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.decode.refusal = FailedPrecondition(MISFIT)
    for _ in range(3):
        assert not await scene.peers.warm_up(THERE, scene.there.address)
    warned = [record for record in caplog.records if MISFIT in record.getMessage()]
    assert [record.levelno for record in warned] == [logging.WARNING], "once"
    assert scene.peers.warnings() == (f"shares no request with decode-0: {MISFIT}",)
    let_in(scene)
    assert await scene.peers.warm_up(THERE, scene.there.address)
    assert scene.peers.warnings() == ()


async def test_so_is_a_prefill_worker_until_it_is_gone(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    layout = scene.engine.layout
    other = InMemoryTransport(scene.fabric, layout, PeerRef("prefill-9", 4), lambda _: None)
    theirs: Any = replace(make_handshake(other.describe(), (), layout), protocol_version=1)
    with pytest.raises(FailedPrecondition):
        scene.peers.accept(theirs)
    assert "no KV passes between this worker and prefill-9: transfer protocol" in caplog.text
    (warning,) = scene.peers.warnings()
    assert warning.startswith("shares no request with prefill-9: transfer protocol: prefill-0 speaks version")
    scene.peers.forget(PeerRef("prefill-9", 3))
    assert scene.peers.warnings() == (warning,)
    scene.peers.forget(PeerRef("prefill-9", 5))
    assert scene.peers.warnings() == ()
