"""A worker takes another one for dead if it was replaced or nothing replies at its address."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from tandem.net import rpc
from tandem.protocol import conversion
from tandem.protocol.errors import StaleEpoch, TandemError, Unavailable
from tandem.protocol.generated.tandem.v1 import cluster_pb2, cluster_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc
from tandem.protocol.messages import Membership, ModelFacts, PeerRef, Role, WorkerInfo
from tandem.worker import controller_link
from tandem.worker.controller_link import ControllerLink
from tests.stranger import Stranger
from tests.worker_pair import until

ME = PeerRef("decode-0", 4)
TOKEN = "secret"


def info(peer: PeerRef, address: str = "127.0.0.1:1") -> WorkerInfo:
    return WorkerInfo(peer, Role.PREFILL, address, ModelFacts("m", 10, 10, (), "float32"), 1, 1, 1, 1, "cpu", "fake")


class Controller(cluster_pb2_grpc.ClusterServicer):
    """A membership made by hand."""

    def __init__(self) -> None:
        self.workers: list[WorkerInfo] = []
        self.registered: list[PeerRef] = []
        self.transports: list[str] = []
        self.left: list[PeerRef] = []
        self.over = False
        self.changed = asyncio.Event()
        self.hang_up = asyncio.Event()

    def change(self, *workers: WorkerInfo) -> None:
        self.workers = list(workers)
        self.changed.set()

    async def Register(self, request: Any, _context: Any) -> cluster_pb2.RegisterResponse:
        if self.over:
            raise StaleEpoch("this incarnation is over")
        worker = conversion.from_proto(request.worker, WorkerInfo)
        self.registered.append(worker.peer)
        self.transports.append(worker.transport)
        return cluster_pb2.RegisterResponse()

    async def Unregister(self, request: Any, _context: Any) -> cluster_pb2.UnregisterResponse:
        self.left.append(conversion.from_proto(request.peer, PeerRef))
        return cluster_pb2.UnregisterResponse()

    async def Watch(self, _request: Any, _context: Any) -> AsyncIterator[cluster_pb2.Membership]:
        while not self.hang_up.is_set():
            self.changed.clear()
            yield conversion.to_proto(Membership(1, tuple(self.workers)), cluster_pb2.Membership)
            await self.changed.wait()


class Neighbour(worker_pb2_grpc.WorkerServicer):
    """A worker that only says who it is."""

    def __init__(self, peer: PeerRef) -> None:
        self.peer = peer
        self.answers: list[bool] = []
        """True for each of the next calls that gets a reply; all later calls get one."""
        self.asked = 0
        self.silent = False

    async def Inspect(self, _request: Any, _context: Any) -> worker_pb2.InspectResponse:
        self.asked += 1
        if self.silent:
            await asyncio.sleep(60)
        if self.answers and not self.answers.pop(0):
            raise Unavailable("the connection broke")
        return worker_pb2.InspectResponse(peer=conversion.to_proto(self.peer, types_pb2.PeerRef))


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator["Scene"]:
    monkeypatch.setattr(controller_link, "RECONNECT_S", 0.01)
    monkeypatch.setattr(controller_link, "PROBE_S", 0.01)
    monkeypatch.setattr(controller_link, "REFRESH_S", 0.01)
    made = Scene()
    await made.start()
    yield made
    await made.link.close()
    for server in made.servers:
        await server.stop(None)


class Scene:
    def __init__(self) -> None:
        self.controller = Controller()
        self.gone: list[PeerRef] = []
        self.joined: list[WorkerInfo] = []
        self.defects = 0
        self.transport = "fake"
        self.superseded: list[TandemError] = []
        self.servers: list[Any] = []
        self.neighbours: list[Neighbour] = []

    async def start(self) -> None:
        server = rpc.open_server()
        cluster_pb2_grpc.add_ClusterServicer_to_server(self.controller, server)
        address = await self._serve(server)
        self.link = ControllerLink(
            address,
            TOKEN,
            lambda: replace(info(ME), transport=self.transport),
            2.0,
            on_peer_joined=self.joined.append,
            on_peer_gone=self._mark_dead,
            on_superseded=self.superseded.append,
        )
        await self.link.register()

    def _mark_dead(self, peer: PeerRef) -> None:
        if self.defects:
            self.defects -= 1
            raise KeyError("a defect")
        self.gone.append(peer)

    async def neighbour(self, peer: PeerRef) -> WorkerInfo:
        server = rpc.open_server()
        self.neighbours.append(Neighbour(peer))
        worker_pb2_grpc.add_WorkerServicer_to_server(self.neighbours[-1], server)
        return info(peer, await self._serve(server))

    async def _serve(self, server: Any, token: str = TOKEN) -> str:
        port = rpc.listen(server, "127.0.0.1:0", token)
        await server.start()
        self.servers.append(server)
        return f"127.0.0.1:{port}"

    async def show(self, *workers: WorkerInfo) -> None:
        self.controller.change(*workers)
        peers = {worker.peer for worker in workers} - {ME}
        await until(lambda: peers <= set(self.link._known))


async def test_registers_and_leaves(scene: Scene) -> None:
    assert scene.controller.registered == [ME]
    await scene.link.unregister()
    await scene.link.unregister()
    assert scene.controller.left == [ME]


async def test_a_replaced_incarnation_is_dead(scene: Scene) -> None:
    await scene.show(info(ME), info(PeerRef("prefill-0", 1)), info(PeerRef("prefill-1", 1)))
    await scene.show(info(ME), info(PeerRef("prefill-0", 2)), info(PeerRef("prefill-1", 1)))
    await until(lambda: len(scene.gone) > 2)
    assert scene.gone == [PeerRef("prefill-0", 0), PeerRef("prefill-1", 0), PeerRef("prefill-0", 1)]


async def test_a_new_incarnation_replaces_earlier_ones_never_seen_here(scene: Scene) -> None:
    await scene.show(info(ME), info(PeerRef("prefill-0", 7)))
    assert scene.gone == [PeerRef("prefill-0", 6)]
    scene.controller.change(info(ME), info(PeerRef("prefill-0", 7)))
    await scene.show(info(ME), info(PeerRef("prefill-0", 7)), info(PeerRef("prefill-1", 1)))
    assert scene.gone == [PeerRef("prefill-0", 6), PeerRef("prefill-1", 0)]


async def test_a_run_that_is_being_asked_for_is_over_when_the_next_one_appears(scene: Scene) -> None:
    peer = PeerRef("prefill-0", 3)
    await scene.show(await scene.neighbour(peer))
    scene.controller.change()
    await until(lambda: peer in scene.link._probes)
    await scene.show(info(PeerRef("prefill-0", 5)))
    assert scene.gone[-1] == PeerRef("prefill-0", 4)
    assert not scene.link._probes


async def test_the_membership_is_followed_after_a_defect(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.defects = 1
    await scene.show(info(PeerRef("prefill-0", 2)))
    assert scene.gone == [PeerRef("prefill-0", 1)]
    assert "could not be followed" in caplog.text


async def test_what_a_worker_learns_of_itself_reaches_the_controller(scene: Scene) -> None:
    scene.transport = "fake (wire)"
    await until(lambda: scene.controller.transports[-1] == "fake (wire)")
    assert scene.controller.transports == ["fake", "fake (wire)"]


async def test_one_that_left_and_answers_is_only_draining(scene: Scene) -> None:
    peer = PeerRef("prefill-0", 1)
    await scene.show(await scene.neighbour(peer))
    scene.controller.change()
    await until(lambda: peer in scene.link._probes)
    await asyncio.sleep(0.05)
    assert scene.gone == [PeerRef("prefill-0", 0)]
    await scene.servers[-1].stop(None)
    await until(lambda: len(scene.gone) > 1)
    assert scene.gone[1:] == [peer]


@pytest.mark.parametrize(("answers", "dead"), [("..x..x..x", False), ("..x...", True)])
async def test_it_takes_more_than_one_unanswered_question_to_be_dead(scene: Scene, answers: str, dead: bool) -> None:
    peer = PeerRef("prefill-0", 1)
    await scene.show(await scene.neighbour(peer))
    neighbour = scene.neighbours[-1]
    neighbour.answers = [answer == "x" for answer in answers]
    scene.controller.change()
    await until(lambda: not neighbour.answers)
    await asyncio.sleep(0.05)
    assert (peer in scene.gone) is dead


async def test_one_that_was_taken_for_dead_and_registers_again_has_joined(scene: Scene) -> None:
    peer = PeerRef("prefill-0", 1)
    there = await scene.neighbour(peer)
    await scene.show(there)
    scene.neighbours[-1].answers = [False] * controller_link.DEAD_AFTER_PROBES
    scene.controller.change()
    await until(lambda: peer in scene.gone)
    scene.controller.change(there)
    await until(lambda: len(scene.joined) > 1)
    assert [joined.peer for joined in scene.joined] == [peer, peer]
    assert scene.gone[-1] == PeerRef("prefill-0", 0)


async def test_one_that_comes_back_is_alive(scene: Scene) -> None:
    peer = PeerRef("prefill-0", 1)
    there = await scene.neighbour(peer)
    await scene.show(there)
    scene.controller.change()
    await until(lambda: peer in scene.link._probes)
    scene.controller.change(there)
    await until(lambda: peer not in scene.link._probes)
    assert peer not in scene.gone


async def test_another_incarnation_at_its_address_means_dead(scene: Scene) -> None:
    there = await scene.neighbour(PeerRef("prefill-0", 2))
    await scene.show(info(PeerRef("prefill-0", 1), there.address))
    scene.controller.change()
    await until(lambda: PeerRef("prefill-0", 1) in scene.gone)


@pytest.mark.parametrize(
    ("workers", "token"),
    [(False, TOKEN), (True, ""), (True, "another cluster's")],
    ids=["no worker", "no token", "not ours"],
)
async def test_a_server_of_another_cluster_at_its_address_means_dead(scene: Scene, workers: bool, token: str) -> None:
    stranger, peer = rpc.open_server(), PeerRef("prefill-0", 1)
    if workers:
        worker_pb2_grpc.add_WorkerServicer_to_server(Neighbour(peer), stranger)
    else:
        cluster_pb2_grpc.add_ClusterServicer_to_server(Controller(), stranger)
    await scene.show(info(peer, await scene._serve(stranger, token)))
    scene.controller.change()
    await until(lambda: peer in scene.gone)


async def test_the_server_of_another_cluster_does_not_get_the_token(scene: Scene) -> None:
    stranger, peer = await Stranger().start(), PeerRef("prefill-0", 1)
    await scene.show(info(peer, stranger.address))
    scene.controller.change()
    await until(lambda: peer in scene.gone)
    stranger.assert_learned_nothing(TOKEN)
    await stranger.stop()


async def test_one_that_is_there_and_says_nothing_is_alive(scene: Scene) -> None:
    peer = PeerRef("prefill-0", 1)
    there = await scene.neighbour(peer)
    scene.neighbours[-1].silent = True
    scene.link._timeout_s = 0.02
    await scene.show(there)
    scene.controller.change()
    await until(lambda: scene.neighbours[-1].asked > 2 * controller_link.DEAD_AFTER_PROBES)
    assert peer not in scene.gone


async def test_the_worker_registers_again_when_its_controller_returns(scene: Scene) -> None:
    scene.controller.hang_up.set()
    scene.controller.changed.set()
    await until(lambda: len(scene.controller.registered) > 1)
    scene.controller.over = True
    await until(lambda: scene.superseded)


async def test_no_controller_is_unavailable() -> None:
    calls: list[Any] = []
    link = ControllerLink(
        "127.0.0.1:1",
        "",
        lambda: info(ME),
        1.0,
        on_peer_joined=calls.append,
        on_peer_gone=calls.append,
        on_superseded=calls.append,
    )
    with pytest.raises(Unavailable):
        await link.register()
    await link.close()


async def test_each_incarnation_joins_once_and_this_worker_never(scene: Scene) -> None:
    first, second = info(PeerRef("prefill-0", 7)), info(PeerRef("prefill-0", 8))
    scene.controller.change(first, info(ME))
    await until(lambda: scene.joined == [first])
    scene.controller.change(first, info(ME), info(PeerRef("prefill-1", 1)))
    await until(lambda: len(scene.joined) == 2)
    scene.controller.change(second)
    await until(lambda: scene.joined[2:] == [second])


async def test_it_goes_over_to_another_controller_with_all_it_knows(scene: Scene) -> None:
    peer = PeerRef("prefill-0", 1)
    there = await scene.neighbour(peer)
    await scene.show(there)
    other = Controller()
    server = rpc.open_server()
    cluster_pb2_grpc.add_ClusterServicer_to_server(other, server)
    await scene.link.change_controller(await scene._serve(server))
    assert (other.registered, scene.controller.registered) == ([ME], [ME])
    assert scene.controller.left == [], "its first controller keeps it in mind"
    await until(lambda: peer in scene.link._probes)
    assert peer not in scene.gone, "one that has not come over yet is asked for"
    other.change(there)
    await until(lambda: peer not in scene.link._probes)
    scene.controller.change()
    other.change(there, info(PeerRef("prefill-1", 5)))
    await until(lambda: PeerRef("prefill-1", 5) in scene.link._known)
    scene.transport = "fake (wire)"
    await until(lambda: other.transports[-1] == "fake (wire)")
    await scene.link.unregister()
    assert (other.left, scene.controller.left) == ([ME], [])
    with pytest.raises(Unavailable, match="has left"):
        await scene.link.change_controller("127.0.0.1:1")


async def test_a_controller_that_does_not_answer_changes_nothing(scene: Scene) -> None:
    with pytest.raises(Unavailable):
        await scene.link.change_controller("127.0.0.1:1")
    await scene.show(info(PeerRef("prefill-0", 1)))
    assert scene.controller.registered == [ME]


async def test_the_time_without_a_controller_is_measured(scene: Scene) -> None:
    await scene.show(info(PeerRef("prefill-0", 1)))
    assert scene.link.silent_s == 0.0
    await scene.servers[0].stop(None)
    await until(lambda: scene.link.silent_s > 0)
    await until(lambda: scene.link.silent_s > 0.02)
