"""The worker's registration with the controller, and its list of the other workers, taken from the membership.

A worker that has left the membership may be dead, draining or cut off. It counts as dead once a later incarnation of it
has registered, or once probes of its address find no worker or another worker. Both are assumptions: a worker that
registers again is accepted again. When a worker appears, all its earlier incarnations count as dead, including those
that are unknown here: they may hold leases that were granted while this worker received no membership. After a change
of controller, the known workers stay known.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable

import grpc
import grpc.aio

from tandem.net import rpc
from tandem.protocol import conversion
from tandem.protocol.errors import StaleEpoch, TandemError, Unavailable
from tandem.protocol.generated.tandem.v1 import cluster_pb2, cluster_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc
from tandem.protocol.messages import Membership, PeerRef, Role, WorkerInfo

log = logging.getLogger(__name__)

RECONNECT_S = 0.5
PROBE_S = 0.5
DEAD_AFTER_PROBES = 3
"""Number of unanswered probes in a row, `PROBE_S` apart, after which a worker counts as dead.

One probe may be lost with a connection that breaks.
"""
NOBODY_OF_OURS = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNAUTHENTICATED,
)
"""Status codes of a probe which show that no worker of this cluster listens at the address.

Either nothing listens there, or the process that now has the port is no worker or belongs to another cluster.
"""
REFRESH_S = 1.0
"""The interval at which the worker's facts are compared with those last sent to the controller, in seconds."""


class ControllerLink:
    """One worker's registration with the controller. Used on the event loop; owned by the process.

    `describe` returns the worker's current facts. `on_peer_joined` is called for each worker that appears, and again
    when a worker opens another phase. `on_peer_gone` is called with each incarnation of another worker that is assumed
    dead; the earlier incarnations of that worker are then dead, too. `on_superseded` is called when the controller
    refuses this incarnation because it has ended or a later one has registered.
    """

    def __init__(
        self,
        address: str,
        token: str,
        describe: Callable[[], WorkerInfo],
        timeout_s: float,
        *,
        on_peer_joined: Callable[[WorkerInfo], None],
        on_peer_gone: Callable[[PeerRef], None],
        on_superseded: Callable[[TandemError], None],
    ) -> None:
        self._describe = describe
        self._announced = describe()
        self._me = self._announced.peer
        self._token = token
        self._timeout_s = timeout_s
        self._on_peer_joined = on_peer_joined
        self._on_peer_gone = on_peer_gone
        self._on_superseded = on_superseded
        self._channel = rpc.open_channel(address, token)
        self._stub = cluster_pb2_grpc.ClusterStub(self._channel)
        self._left = False
        self._changed = asyncio.Event()
        self._known: dict[PeerRef, str] = {}
        self._roles: dict[PeerRef, Role | None] = {}
        self._probes: dict[PeerRef, asyncio.Task[None]] = {}
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        self._silent_since: float | None = time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds since a controller was last connected; 0 while a controller is connected."""
        return 0.0 if self._silent_since is None else time.monotonic() - self._silent_since

    async def register(self) -> None:
        """Register this worker and begin to watch the others. Raises Unavailable if the controller does not answer."""
        await self._announce(self._stub)
        self._begin()

    async def change_controller(self, address: str) -> None:
        """Register with the controller at `address` from now on.

        Raises Unavailable, and changes nothing, if the controller does not answer or if this worker has left the
        membership.
        """
        if self._left:
            raise Unavailable(f"worker {self._me.worker_id} has left; start it again")
        channel = rpc.open_channel(address, self._token)
        stub = cluster_pb2_grpc.ClusterStub(channel)
        try:
            await self._announce(stub)
        except BaseException:
            await channel.close()
            raise
        # Calls on a closed channel end as if their tasks had been cancelled, so the tasks are ended first.
        await _cancel(self._tasks)
        before, self._channel, self._stub = self._channel, channel, stub
        self._begin()
        await before.close()

    def _begin(self) -> None:
        self._tasks = (asyncio.ensure_future(self._watch_forever()), asyncio.ensure_future(self._refresh_forever()))

    def refresh(self) -> None:
        """Send the worker's changed facts to the controller now."""
        self._changed.set()

    async def unregister(self) -> None:
        """Leave the membership; if the controller does not answer, this is only logged."""
        if self._left:
            return
        self._left = True
        request = cluster_pb2.UnregisterRequest(peer=conversion.to_proto(self._me, types_pb2.PeerRef))
        try:
            await self._stub.Unregister(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            log.info("could not unregister: %s", error.details())

    async def close(self) -> None:
        """Stop watching. The membership stays as it is."""
        await _cancel([*self._probes.values(), *self._tasks])
        await self._channel.close()

    async def _announce(self, stub: cluster_pb2_grpc.ClusterStub) -> None:
        info = self._describe()
        request = cluster_pb2.RegisterRequest(worker=conversion.to_proto(info, cluster_pb2.WorkerInfo))
        try:
            await stub.Register(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise rpc.error_of(error, "the controller") from error
        self._announced = info

    async def _watch_forever(self) -> None:
        while True:
            try:
                async for message in self._stub.Watch(cluster_pb2.WatchRequest(), wait_for_ready=True):
                    self._silent_since = None
                    self._see(conversion.from_proto(message, Membership))
            except grpc.aio.AioRpcError as error:
                log.info("the controller's membership stream ended: %s", error.details())
            except Exception:
                log.exception("a membership could not be followed; the next one is")
            if self._silent_since is None:
                self._silent_since = time.monotonic()
            await asyncio.sleep(RECONNECT_S)
            await self._announce_again()

    async def _refresh_forever(self) -> None:
        """Send the worker's facts to the controller at most `REFRESH_S` seconds after they change.

        Some facts become known only while the worker serves, such as the transports to its peers.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_S):
                    await self._changed.wait()
            self._changed.clear()
            try:
                if self._describe() != self._announced:
                    await self._announce_again()
            except Exception:
                log.exception("the costs that this worker measured were not reported; it is tried again")

    async def _announce_again(self) -> None:
        """Register again, because a controller that restarted does not know this worker."""
        if self._left:
            return
        try:
            await self._announce(self._stub)
        except StaleEpoch as error:
            # The call may have crossed this worker's own `unregister`.
            if not self._left:
                self._on_superseded(error)
        except TandemError as error:
            log.info("could not register again: %s", error.message)

    def _see(self, membership: Membership) -> None:
        serving = {info.peer: info.address for info in membership.workers if info.peer.worker_id != self._me.worker_id}
        for peer in [peer for peer in self._probes if peer in serving]:
            self._probes.pop(peer).cancel()
        joined = [info for info in membership.workers if info.peer in serving and info.peer not in self._known]
        for info in joined:
            self._mark_dead(PeerRef(info.peer.worker_id, info.peer.incarnation - 1))
        self._known.update(serving)
        others = {info.peer: info for info in membership.workers if info.peer in serving}
        before, self._roles = self._roles, {peer: info.open for peer, info in others.items()}
        for info in others.values():
            if info in joined or info.open is not before.get(info.peer):
                self._on_peer_joined(info)
        for peer, address in self._known.items():
            if peer not in serving and peer not in self._probes:
                self._probes[peer] = asyncio.ensure_future(self._probe(peer, address))

    def _mark_dead(self, gone: PeerRef) -> None:
        """Remove this incarnation and all earlier ones from the known workers, and report them as dead."""
        for peer in [peer for peer in self._known if _is_same_or_earlier(peer, gone)]:
            del self._known[peer]
            probe = self._probes.pop(peer, None)
            if probe is not None and probe is not asyncio.current_task():
                probe.cancel()
        self._on_peer_gone(gone)

    async def _probe(self, peer: PeerRef, address: str) -> None:
        """Probe the address of a worker that left until the worker counts as dead, and report its death.

        The worker counts as dead once `DEAD_AFTER_PROBES` probes in a row got no answer, or once another worker
        answers.
        """
        async with rpc.open_channel(address, self._token) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            # The lack of an answer is the only sign of a death.
            unanswered = 0
            while unanswered < DEAD_AFTER_PROBES:
                if unanswered:
                    await asyncio.sleep(PROBE_S)
                answerer = await self._answerer(stub, peer)
                if answerer is not None and answerer != peer:
                    break
                unanswered = unanswered + 1 if answerer is None else 0
                if answerer is not None:
                    await asyncio.sleep(PROBE_S)
        self._mark_dead(peer)

    async def _answerer(self, stub: worker_pb2_grpc.WorkerStub, peer: PeerRef) -> PeerRef | None:
        """Return the worker that answers at the address of `peer`; None if no worker of this cluster answers.

        A worker that does not respond in time is assumed to be `peer`.
        """
        try:
            reply = await stub.Inspect(worker_pb2.InspectRequest(), timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            return None if error.code() in NOBODY_OF_OURS else peer
        return conversion.from_proto(reply.peer, PeerRef)


async def _cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    tasks = tuple(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _is_same_or_earlier(peer: PeerRef, than: PeerRef) -> bool:
    return peer.worker_id == than.worker_id and peer.incarnation <= than.incarnation
