"""The controller's listener: it requires the secret, registers workers, and pushes changes to watchers."""

from collections.abc import AsyncIterator

import grpc
import pytest

from tandem.cli.connection.controller_client import ControllerClient
from tandem.cluster.operations.adapters import Adapters
from tandem.cluster.operations.operator import Operator
from tandem.cluster.service import ClusterServicer
from tandem.cluster.supervision.modes import ModeChange
from tandem.cluster.supervision.registry import Registry
from tandem.cluster.supervision.size import SizeChange
from tandem.net.rpc import is_refused_peer, listen, open_channel, open_server
from tandem.protocol.errors import InvalidArgument, NotFound, Unauthenticated, Unavailable
from tandem.protocol.generated.tandem.v1 import cluster_pb2, cluster_pb2_grpc, types_pb2
from tandem.protocol.messages import Absence, AdapterFacts, PeerRef, WorkerInfo

ABSENT = Absence("decode-1", "waiting for a node", coming=True)


class Asked(Operator):
    """An operator that returns its arguments to the caller as an error."""

    def __init__(self) -> None:
        """Creates an operator without workers."""

    def absent(self) -> tuple[Absence, ...]:
        return (ABSENT,)

    async def set_mode(self, change: ModeChange) -> tuple[WorkerInfo, ...]:
        raise InvalidArgument("mode", repr(change))

    async def resize(self, change: SizeChange) -> tuple[WorkerInfo, ...]:
        raise InvalidArgument("--workers", repr(change))

    async def drain_worker(
        self, worker_id: str, grace_s: float, *, restart: bool, force: bool, node_leaves: bool
    ) -> None:
        raise NotFound(f"{worker_id} {grace_s} {restart} {force} {node_leaves}")


class AskedAdapters(Adapters):
    """Adapters that return their arguments to the caller as an error."""

    def __init__(self) -> None:
        """Creates a list without workers."""

    async def load(self, name: str, path: str) -> AdapterFacts:
        raise InvalidArgument("lora_path", f"{name} {path}")

    async def unload(self, name: str) -> None:
        raise NotFound(name)


async def asked_metrics() -> str:
    return "the metrics"


@pytest.fixture
async def listener() -> AsyncIterator[tuple[str, Registry]]:
    registry = Registry()
    server = open_server()
    cluster_pb2_grpc.add_ClusterServicer_to_server(
        ClusterServicer(registry, Asked(), AskedAdapters(), asked_metrics), server
    )
    port = listen(server, "127.0.0.1:0", "secret")
    await server.start()
    yield f"127.0.0.1:{port}", registry
    await server.stop(None)


def registration(worker_id: str, incarnation: int) -> cluster_pb2.RegisterRequest:
    return cluster_pb2.RegisterRequest(
        worker=cluster_pb2.WorkerInfo(
            peer=types_pb2.PeerRef(worker_id=worker_id, incarnation=incarnation), role="decode", address="127.0.0.1:1"
        )
    )


async def test_a_watcher_sees_workers_come_and_go(listener: tuple[str, Registry]) -> None:
    address, registry = listener
    async with open_channel(address, "secret") as channel:
        stub = cluster_pb2_grpc.ClusterStub(channel)
        watch = stub.Watch(cluster_pb2.WatchRequest())
        assert not (await watch.read()).workers
        await stub.Register(registration("decode-0", 7))
        assert [w.peer.incarnation for w in (await watch.read()).workers] == [7]
        registry.unregister(PeerRef("decode-0", 7))
        assert not (await watch.read()).workers
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stub.Register(registration("decode-0", 7))
        assert failure.value.code() is grpc.StatusCode.ABORTED
        watch.cancel()


async def test_unregister_is_for_good(listener: tuple[str, Registry]) -> None:
    address, registry = listener
    async with open_channel(address, "secret") as channel:
        stub = cluster_pb2_grpc.ClusterStub(channel)
        await stub.Register(registration("decode-0", 7))
        await stub.Unregister(
            cluster_pb2.UnregisterRequest(peer=types_pb2.PeerRef(worker_id="decode-0", incarnation=7))
        )
        assert registry.membership().workers == ()


async def test_absent_workers_are_listed_for_callers_with_the_secret(listener: tuple[str, Registry]) -> None:
    address, _ = listener
    assert await ControllerClient(address, "secret").absent() == (ABSENT,)
    with pytest.raises(Unauthenticated, match=r"the TLS handshake .* failed: is --token .* the token of that cluster"):
        await ControllerClient(address, "wrong").absent()
    with pytest.raises(Unavailable, match="cannot reach the controller"):
        await ControllerClient("127.0.0.1:1", "secret").absent()


async def test_strangers_stay_outside(listener: tuple[str, Registry]) -> None:
    address, registry = listener
    async with open_channel(address, "wrong") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await cluster_pb2_grpc.ClusterStub(channel).Register(registration("decode-0", 7))
    assert is_refused_peer(failure.value)
    assert registry.membership().workers == ()


async def test_what_an_operator_asks_arrives_as_it_was_asked(listener: tuple[str, Registry]) -> None:
    address, _ = listener
    async with open_channel(address, "secret") as channel:
        stub = cluster_pb2_grpc.ClusterStub(channel)
        ask = cluster_pb2.SetModeRequest(
            mode="disaggregated", prefill=1, decode=2, step_policy="chunked", step_budget=3, itl_target_s=4, grace_s=5
        )
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stub.SetMode(ask)
        assert repr(ModeChange("disaggregated", 1, 2, "chunked", 3, 4.0, 5.0)) in str(failure.value.details())
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stub.DrainWorker(
                cluster_pb2.DrainWorkerRequest(worker_id="w", grace_s=2, restart=True, node_leaves=True)
            )
        assert failure.value.details() == "w 2.0 True False True"
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stub.Resize(cluster_pb2.ResizeRequest(prefill=1, decode=2, workers=3, grace_s=4, wait_s=5))
        assert repr(SizeChange(1, 2, 3, 4.0, 5.0)) in str(failure.value.details())
    async with open_channel(address, "wrong") as channel:
        for call in (
            cluster_pb2_grpc.ClusterStub(channel).Resize(cluster_pb2.ResizeRequest()),
            cluster_pb2_grpc.ClusterStub(channel).SetMode(cluster_pb2.SetModeRequest()),
            cluster_pb2_grpc.ClusterStub(channel).DrainWorker(cluster_pb2.DrainWorkerRequest()),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await call
            assert is_refused_peer(failure.value)
