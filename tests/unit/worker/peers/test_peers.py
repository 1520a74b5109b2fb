"""Calls to other workers over real channels: what a dropped channel and a dead worker look like to the caller."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kv_transfer.handshake import make_handshake
from kv_transfer.in_memory import InMemoryTransport
from kv_transfer.in_memory_fabric import InMemoryFabric
from kv_transfer.nixl_backend.processes import this_process
from tandem.net import rpc
from tandem.protocol import conversion
from tandem.protocol.errors import DeadlineExceeded, StaleEpoch, Unavailable
from tandem.protocol.generated.tandem.v1 import worker_pb2, worker_pb2_grpc
from tandem.protocol.messages import Destination, Lease, PeerRef
from tandem.worker.peers.deliveries import MOST_WAITING
from tandem.worker.peers.peers import Peers
from tests.fake_engine import FakeEngine
from tests.worker_pair import WorkerPair, until

THERE = PeerRef("decode-0", 5)
LEASE = Lease("q", 1, 9)


class Decode(worker_pb2_grpc.WorkerServicer):
    """A decode worker that answers when it is let go."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.meeting = asyncio.Event()
        self.meeting.set()
        self.refusal: Exception | None = None
        self.calls: list[str] = []
        self.reply = worker_pb2.ConnectPeerResponse()

    async def ConnectPeer(self, _request: Any, _context: Any) -> worker_pb2.ConnectPeerResponse:
        self.calls.append("connect")
        await self.meeting.wait()
        if self.refusal is not None:
            raise self.refusal
        return self.reply

    async def AllocatePages(self, _request: Any, _context: Any) -> worker_pb2.AllocatePagesResponse:
        self.calls.append("allocate_pages")
        await self.go.wait()
        return worker_pb2.AllocatePagesResponse(page_ids=[1, 2])

    async def RenewPermissions(self, request: Any, _context: Any) -> worker_pb2.RenewPermissionsResponse:
        self.calls.append(f"renew {len(request.leases)} of {request.prefill.worker_id}/{request.prefill.incarnation}")
        await self.go.wait()
        return worker_pb2.RenewPermissionsResponse(over=request.leases[:1], write_for_s=2.5)

    async def ReleaseLease(self, request: Any, _context: Any) -> worker_pb2.ReleaseLeaseResponse:
        self.calls.append("release in doubt" if request.in_doubt else "release")
        if not self.go.is_set():
            raise StaleEpoch("over")
        return worker_pb2.ReleaseLeaseResponse()


class Scene:
    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.theirs: list[FakeEngine] = []
        self.fabric = InMemoryFabric()
        self.transport = InMemoryTransport(self.fabric, self.engine.layout, PeerRef("prefill-0", 1), lambda _: None)
        mine = make_handshake(self.transport.describe(), (), self.engine.layout)
        self.peers = Peers(mine, self.transport, "", 5.0)
        self.decode = Decode()

    def neighbour(self) -> InMemoryTransport:
        """The decode worker's. Its memory lasts as long as the scene: warm-ups write into it."""
        self.theirs.append(FakeEngine())
        return InMemoryTransport(self.fabric, self.theirs[-1].layout, THERE, lambda _: None)

    async def start(self) -> None:
        self.server = rpc.open_server()
        worker_pb2_grpc.add_WorkerServicer_to_server(self.decode, self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self.there = Destination(THERE, f"127.0.0.1:{port}", LEASE)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    made = Scene()
    await made.start()
    yield made
    await made.peers.close()
    await made.server.stop(None)
    made.fabric.close()


async def test_a_channel_dropped_under_a_call_is_a_peer_that_is_unavailable(scene: Scene) -> None:
    call = asyncio.ensure_future(scene.peers.allocate_pages(scene.there, 2))
    await until(lambda: scene.decode.calls)
    scene.peers.forget(THERE)
    with pytest.raises(Unavailable, match="decode-0"):
        await call


async def test_a_caller_that_is_cancelled_stays_cancelled(scene: Scene) -> None:
    call = asyncio.ensure_future(scene.peers.allocate_pages(scene.there, 2))
    await until(lambda: scene.decode.calls)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_nothing_is_said_to_a_worker_that_is_gone(scene: Scene) -> None:
    """Its address may be somebody else's by now, and the call carries the token."""
    scene.decode.go.set()
    scene.peers.forget(THERE)
    for call in (scene.peers.connect(scene.there), scene.peers.allocate_pages(scene.there, 2)):
        with pytest.raises(Unavailable, match="gone"):
            await call
    await scene.peers.release(scene.there, in_doubt=False)
    assert scene.decode.calls == []
    assert not scene.peers._connections


async def test_the_death_of_a_later_run_is_that_of_the_earlier_ones(scene: Scene) -> None:
    scene.decode.go.set()
    await scene.peers.release(scene.there, in_doubt=False)
    scene.peers.forget(PeerRef("decode-0", 4))
    assert THERE in scene.peers._connections
    scene.peers.forget(PeerRef("decode-0", 6))
    assert not scene.peers._connections


async def test_a_connection_that_failed_without_waiters_is_tried_again(scene: Scene) -> None:
    scene.decode.meeting.clear()
    first = asyncio.ensure_future(scene.peers.connect(scene.there))
    await until(lambda: scene.decode.calls)
    first.cancel()
    scene.decode.refusal = Unavailable("not yet")
    scene.decode.meeting.set()
    await until(lambda: not scene.peers._connections)
    scene.decode.refusal = None
    scene.decode.reply.description.CopyFrom(
        conversion.to_proto(replace(scene.transport.describe(), peer=THERE), worker_pb2.PeerDescription)
    )
    await scene.peers.connect(scene.there)
    assert scene.decode.calls == ["connect", "connect"]


async def test_releasing_an_ended_lease_raises_stale_epoch(scene: Scene) -> None:
    with pytest.raises(StaleEpoch):
        await scene.peers.release(scene.there, in_doubt=False)


@pytest.mark.parametrize(("in_doubt", "message"), [(False, "release"), (True, "release in doubt")])
async def test_a_release_says_whether_a_write_failed(scene: Scene, in_doubt: bool, message: str) -> None:
    scene.decode.go.set()
    await scene.peers.release(scene.there, in_doubt=in_doubt)
    assert scene.decode.calls == [message]


async def test_a_warm_up_writes_only_the_page_after_the_pool(scene: Scene) -> None:
    theirs = FakeEngine()
    transport = InMemoryTransport(scene.fabric, theirs.layout, THERE, lambda _: None)
    scene.decode.reply.description.CopyFrom(conversion.to_proto(transport.describe(), worker_pb2.PeerDescription))
    scene.engine.memory[:], theirs.memory[:] = 7, 0

    await scene.peers.warm_up(THERE, scene.there.address)

    assert (theirs.memory[-1] == 7).all()
    assert not theirs.memory[:-1].any()
    await scene.peers.warm_up(THERE, scene.there.address)
    assert scene.decode.calls == ["connect"]


async def test_a_warm_up_that_fails_leaves_it_to_the_first_request(scene: Scene, caplog: Any) -> None:
    scene.peers.forget(THERE)
    with caplog.at_level("INFO"):
        await scene.peers.warm_up(THERE, scene.there.address)
    assert "not warm yet" in caplog.text
    with pytest.raises(Unavailable):
        await scene.peers.connect(scene.there)


async def test_a_warm_up_that_breaks_is_logged_and_not_raised(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such page")

    transport = scene.neighbour()
    scene.decode.reply.description.CopyFrom(conversion.to_proto(transport.describe(), worker_pb2.PeerDescription))
    monkeypatch.setattr(scene.transport, "write", broken)
    await scene.peers.warm_up(THERE, scene.there.address)
    assert "warming the way to decode-0 failed" in caplog.text
    assert "no such page" in caplog.text


async def test_the_dead_do_not_introduce_themselves(scene: Scene) -> None:
    layout = scene.engine.layout
    old = InMemoryTransport(scene.fabric, layout, PeerRef("prefill-9", 4), lambda _: None)
    new = InMemoryTransport(scene.fabric, layout, PeerRef("prefill-9", 5), lambda _: None)
    scene.peers.accept(make_handshake(old.describe(), (), layout))
    scene.peers.forget(PeerRef("prefill-9", 4))
    with pytest.raises(StaleEpoch, match="prefill-9 is known to be over"):
        scene.peers.accept(make_handshake(old.describe(), (), layout))
    assert "prefill-9" not in scene.transport._peers
    scene.peers.accept(make_handshake(new.describe(), (), layout))
    assert scene.transport._peers["prefill-9"].peer == new.me
    assert scene.peers.same_host(old.me), "what it left is in quarantine as a near worker's, whoever came after it"


async def test_closing_a_worker_ends_its_warm_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def endless(_peer: PeerRef, _address: str) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            ended.set()

    async with WorkerPair() as pair:
        monkeypatch.setattr(pair.prefill.worker.peers, "warm_up", endless)
        info: Any = SimpleNamespace(
            peer=pair.decode.me, address=pair.decode.address, takes_answers=True, takes_prompts=False
        )
        pair.prefill.worker.peer_joined(info)
        await begun.wait()
    assert ended.is_set()


async def test_a_worker_that_is_forgotten_during_its_introduction_stays_unknown(scene: Scene) -> None:
    transport = scene.neighbour()
    reply = worker_pb2.ConnectPeerResponse(
        description=conversion.to_proto(transport.describe(), worker_pb2.PeerDescription)
    )

    async def reply_and_be_forgotten(*_: object, **__: object) -> worker_pb2.ConnectPeerResponse:
        scene.peers.forget(THERE)
        return reply

    late: Any = SimpleNamespace(stub=SimpleNamespace(ConnectPeer=reply_and_be_forgotten))
    with pytest.raises(Unavailable, match="gone"):
        await scene.peers._introduce(late, THERE)
    assert "decode-0" not in scene.transport._peers


async def test_a_warm_up_waits_for_its_page_no_longer_than_its_deadline(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    transport = scene.neighbour()
    scene.decode.reply.description.CopyFrom(conversion.to_proto(transport.describe(), worker_pb2.PeerDescription))
    await scene.peers.connect(scene.there)
    scene.fabric.hold()
    scene.peers._timeout_s = 0.01
    with caplog.at_level("INFO"):
        await scene.peers.warm_up(THERE, scene.there.address)
    assert "takes too long" in caplog.text


async def test_a_restored_worker_gets_the_deliveries_it_missed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    destinations: list[Destination] = []
    monkeypatch.setattr(scene.peers._deliveries, "add", destinations.append)
    scene.peers.forget(THERE)
    await scene.peers.release(scene.there, in_doubt=False)
    assert await scene.peers._name_deliveries(THERE, scene.there.address, [replace(LEASE, epoch=10)])
    scene.peers.restore_peer(PeerRef("decode-0", 4))
    assert destinations == []
    scene.peers.restore_peer(THERE)
    assert [destination.lease.epoch for destination in destinations] == [9, 10]
    scene.decode.go.set()
    await scene.peers.release(scene.there, in_doubt=False)
    assert scene.decode.calls == ["release"]


async def test_what_a_worker_is_owed_that_never_returns_is_bounded(scene: Scene) -> None:
    scene.peers.forget(THERE)
    for epoch in range(MOST_WAITING + 100):
        await scene.peers.release(replace(scene.there, lease=replace(LEASE, epoch=epoch)), in_doubt=False)
    owed = scene.peers._owed[THERE]
    assert len(owed) == MOST_WAITING
    assert owed[-1].lease.epoch == MOST_WAITING + 99, "the newest are kept"


async def test_nothing_is_kept_for_a_run_that_another_has_replaced(scene: Scene) -> None:
    scene.peers.forget(THERE)
    await scene.peers.release(scene.there, in_doubt=False)
    scene.peers.forget(PeerRef("decode-0", 6))
    await scene.peers.release(scene.there, in_doubt=False)
    assert not scene.peers._owed


async def test_a_sender_that_is_back_need_not_introduce_itself_again(scene: Scene) -> None:
    layout = scene.engine.layout
    other = InMemoryTransport(scene.fabric, layout, PeerRef("prefill-9", 4), lambda _: None)
    scene.peers.accept(make_handshake(other.describe(), (), layout))
    assert scene.peers.same_host(other.me)
    assert not scene.peers.same_host(PeerRef("prefill-9", 3))
    scene.peers.forget(other.me)
    assert "prefill-9" not in scene.transport._peers
    scene.peers.restore_peer(other.me)
    assert scene.transport._peers["prefill-9"].peer == other.me


async def test_a_peer_on_another_or_an_unknown_host_is_not_on_the_same_host(scene: Scene) -> None:
    layout = scene.engine.layout
    for host in ("there", ""):
        other = InMemoryTransport(scene.fabric, layout, PeerRef("prefill-9", 4), lambda _: None)
        scene.peers.accept(make_handshake(replace(other.describe(), host=host), (), layout))
        assert not scene.peers.same_host(other.me)


async def test_permissions_of_many_leases_are_renewed_in_one_call(scene: Scene) -> None:
    scene.decode.go.set()
    leases = [LEASE, replace(LEASE, epoch=10)]
    renewed = await scene.peers.renew(THERE, scene.there.address, leases, 5.0)
    assert (renewed.ended, renewed.write_for_s) == ({LEASE}, 2.5)
    assert scene.decode.calls == ["renew 2 of prefill-0/1"]


async def test_a_renewal_is_waited_for_no_longer_than_it_is_good_for(scene: Scene) -> None:
    with pytest.raises(DeadlineExceeded):
        await scene.peers.renew(THERE, scene.there.address, [LEASE], 0.05)


async def test_it_is_seen_whether_a_neighbour_lives(scene: Scene) -> None:
    layout = scene.engine.layout
    other = InMemoryTransport(scene.fabric, layout, PeerRef("prefill-9", 4), lambda _: None)
    scene.peers.accept(make_handshake(other.describe(), (), layout))
    assert scene.peers.process_alive(other.me) is None
    scene.peers.accept(make_handshake(replace(other.describe(), process=this_process()), (), layout))
    assert scene.peers.process_alive(other.me) is True
