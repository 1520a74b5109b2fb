"""The other workers: clients to decode workers, and the answers to prefill workers that connect."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import TypeVar

import grpc.aio

from kv_transfer.base import PageWrite, Sender
from kv_transfer.handshake import check_compatible
from kv_transfer.nixl_backend import processes
from kv_transfer.removed_peers import RemovedPeers
from prefill_worker.decode_peers import AllocatedPages, DecodePeers, Renewal
from tandem.net import rpc
from tandem.protocol import conversion
from tandem.protocol.errors import FailedPrecondition, StaleEpoch, TandemError, Unavailable
from tandem.protocol.generated.tandem.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from tandem.protocol.messages import Destination, Handshake, Lease, PeerDescription, PeerRef, PrefixPull, PrefixSource
from tandem.worker.peers.deliveries import MOST_WAITING, Deliveries

RUNS_KEPT = 16
"""Maximum number of remembered incarnations per worker; the pages that earlier ones wrote have long been free."""


class SameHostPeers:
    """Knows the prefill workers on this host, and tells whether their processes are alive.

    Entries are by incarnation, because an earlier incarnation may still be alive beside its successor. Owned by
    `Peers`.
    """

    def __init__(self, host: str) -> None:
        """Create the set; `host` is the id of this host. If it is empty, no peer counts as being on this host."""
        self._host = host
        self._runs: dict[str, dict[int, tuple[str, ...]]] = {}
        """The processes of each incarnation's ranks; empty if they cannot be observed from here."""

    def add(self, them: PeerDescription) -> None:
        """Record a peer that has just connected and is therefore alive.

        If its process cannot be observed from here, `process_alive` returns None for it.
        """
        if not self._host or them.host != self._host:
            return
        runs, ranks = self._runs.setdefault(them.peer.worker_id, {}), (them, *them.other_ranks)
        if all(processes.process_alive(rank.process) for rank in ranks):
            runs[them.peer.incarnation] = tuple(rank.process for rank in ranks)
        else:
            runs.setdefault(them.peer.incarnation, ())
        if len(runs) > RUNS_KEPT:
            del runs[min(runs)]

    def has(self, peer: PeerRef) -> bool:
        """Return True if this incarnation has reported that it is on this host. Any thread may call it."""
        return peer.incarnation in self._runs.get(peer.worker_id, {})

    def process_alive(self, peer: PeerRef) -> bool | None:
        """Return True if a process of this incarnation's ranks is alive, False if all have ended, None if unknown.

        Any thread may call it.
        """
        ranks = self._runs.get(peer.worker_id, {}).get(peer.incarnation)
        alive = [processes.process_alive(process) for process in ranks or ()]
        if True in alive:
            return True
        return None if not alive or None in alive else False


class IncompatiblePeers:
    """Workers that this worker has refused, or that have refused it: no KV is transferred between them while both run.

    Each is logged once, and reported to the cluster for as long as it is known. Used on the event loop. Owned by
    `Peers`.
    """

    def __init__(self) -> None:
        self._why: dict[PeerRef, str] = {}

    @property
    def warnings(self) -> tuple[str, ...]:
        """One sentence for each incompatible worker, for `tandem status`."""
        return tuple(f"shares no request with {peer.worker_id}: {why}" for peer, why in self._why.items())

    def add(self, peer: PeerRef, why: str) -> None:
        """Record that the peer is incompatible, and why."""
        if self._why.get(peer) != why:
            log.warning("no KV passes between this worker and %s: %s", peer.worker_id, why)
        self._why[peer] = why

    def discard(self, peer: PeerRef) -> None:
        """Record that the peer is compatible."""
        self._why.pop(peer, None)

    def forget(self, peer: PeerRef) -> None:
        """Remove this incarnation, which has ended, and all earlier ones."""
        for known in [known for known in self._why if known.worker_id == peer.worker_id]:
            if known.incarnation <= peer.incarnation:
                del self._why[known]


log = logging.getLogger(__name__)

Reply = TypeVar("Reply")

DELIVERY_PERIOD_S = 1.0
"""Interval in seconds at which the leases whose transfer notices were sent are reported to a decode worker.

A notice arrives within milliseconds. The requests of lost notices are prefilled again after the report.
"""


class _Connection:
    """A channel to one incarnation of a worker, and the handshake that must precede all other calls."""

    def __init__(self, address: str, token: str) -> None:
        self.channel = rpc.open_channel(address, token)
        self.stub = worker_pb2_grpc.WorkerStub(self.channel)
        self.introduced: asyncio.Task[PeerDescription] | None = None


class Peers(DecodePeers):
    """The connections to the other workers, one for each incarnation, opened when they are needed.

    Used on the event loop. Owned by the worker.
    """

    def __init__(self, handshake: Handshake, sender: Sender, token: str, rpc_timeout_s: float) -> None:
        self._mine = handshake
        self._me = handshake.description.peer
        self._sender = sender
        self._token = token
        self._timeout_s = rpc_timeout_s
        self._connections: dict[PeerRef, _Connection] = {}
        self._gone = RemovedPeers()
        self._accepted: dict[str, PeerDescription] = {}
        self._owed: dict[PeerRef, deque[Destination]] = {}
        self._incompatible = IncompatiblePeers()
        self._same_host = SameHostPeers(handshake.description.host)
        self._deliveries = Deliveries(self._name_deliveries, DELIVERY_PERIOD_S)
        self._closing: set[asyncio.Task[None]] = set()

    # ---- prefill side ----

    async def connect(self, destination: Destination) -> None:
        """Make the handshake with the decode worker, unless it was made before."""
        await self._introduced(destination.peer, destination.address)

    async def warm_up(self, peer: PeerRef, address: str) -> bool:
        """Connect to a decode worker and write a page to it; return True on success.

        The first use of a transport is by far the slowest. Source and destination are the spare pages after the pools,
        which no request owns. Errors are logged and never raised.
        """
        try:
            description = await self._introduced(peer, address)
            write = PageWrite(peer, (self._mine.description.pages - 1,), (description.pages - 1,))
            moved = asyncio.wrap_future(self._sender.write(write, self._timeout_s))
            async with asyncio.timeout(2 * self._timeout_s):
                done = await moved
        except TimeoutError:
            log.info("the way to %s is not warm yet: its first page takes too long", peer.worker_id)
        except FailedPrecondition:
            log.debug("there is no way to %s", peer.worker_id)  # the reason is in the log already
        except TandemError as error:
            log.info("the way to %s is not warm yet: %s", peer.worker_id, error.message)
        except Exception:
            log.exception("warming the way to %s failed", peer.worker_id)
        else:
            log.info("the way to %s is warm: first page in %.1f ms", peer.worker_id, done.duration_nanos / 1e6)
            return True
        return False

    async def allocate_pages(self, destination: Destination, pages: int) -> AllocatedPages:
        """Request pages from the decode worker for the last part of the prompt, which the decode worker has not cached.

        `pages` is the number of pages of the whole prompt.
        """
        request = worker_pb2.AllocatePagesRequest(
            lease=conversion.to_proto(destination.lease, worker_pb2.Lease),
            pages=pages,
            prefill=conversion.to_proto(self._me, types_pb2.PeerRef),
        )
        stub = self._connection(destination.peer, destination.address).stub
        reply = await _call(stub.AllocatePages(request, timeout=self._timeout_s), destination.peer)
        return AllocatedPages(tuple(reply.page_ids), reply.write_for_s)

    async def renew(self, peer: PeerRef, address: str, leases: Sequence[Lease], within_s: float) -> Renewal:
        """Request permission from the decode worker to continue writing under these leases."""
        request = worker_pb2.RenewPermissionsRequest(
            leases=[conversion.to_proto(lease, worker_pb2.Lease) for lease in leases],
            prefill=conversion.to_proto(self._me, types_pb2.PeerRef),
        )
        stub = self._connection(peer, address).stub
        reply = await _call(stub.RenewPermissions(request, timeout=min(self._timeout_s, within_s)), peer)
        over = frozenset(conversion.from_proto(lease, Lease) for lease in reply.over)
        return Renewal(over, reply.write_for_s)

    def delivered(self, destination: Destination) -> None:
        """Queue the lease, whose transfer notice was sent, for a report to the decode worker."""
        self._deliveries.add(destination)

    async def release(self, destination: Destination, *, in_doubt: bool) -> None:
        """Report to the decode worker that no write under the lease is in flight and that none will follow.

        With `in_doubt`, a write has failed and its data may still arrive for a while.
        """
        request = worker_pb2.ReleaseLeaseRequest(
            lease=conversion.to_proto(destination.lease, worker_pb2.Lease),
            prefill=conversion.to_proto(self._me, types_pb2.PeerRef),
            in_doubt=in_doubt,
        )
        if destination.peer in self._gone:
            self._add_pending_release(destination.peer, [destination])
            return
        stub = self._connection(destination.peer, destination.address).stub
        await _call(stub.ReleaseLease(request, timeout=self._timeout_s), destination.peer)

    async def _name_deliveries(self, peer: PeerRef, address: str, leases: Sequence[Lease]) -> bool:
        if peer in self._gone:
            self._add_pending_release(peer, [Destination(peer, address, lease) for lease in leases])
            return True
        request = worker_pb2.NameDeliveriesRequest(
            leases=[conversion.to_proto(lease, worker_pb2.Lease) for lease in leases],
            prefill=conversion.to_proto(self._me, types_pb2.PeerRef),
        )
        await _call(self._connection(peer, address).stub.NameDeliveries(request, timeout=self._timeout_s), peer)
        return True

    async def send_prefix(self, source: PrefixSource, pull: PrefixPull) -> int:
        """Ask another worker to send pages of a prefix; return the number of digests that this worker will then have.

        Returns once the transfer has begun. Raises NotFound if that worker has no page that this one lacks.
        """
        request = conversion.to_proto(pull, worker_pb2.SendPrefixRequest)
        stub = self._connection(source.peer, source.address).stub
        reply = await _call(stub.SendPrefix(request, timeout=min(self._timeout_s, pull.within_s)), source.peer)
        return int(reply.digests)

    # ---- decode side ----

    def accept(self, handshake: Handshake) -> PeerDescription:
        """Accept the handshake of a prefill worker and return this worker's description.

        Raises FailedPrecondition, with the reason, if the two are incompatible, and StaleEpoch if the incarnation is
        known to have ended.
        """
        peer = handshake.description.peer
        if peer in self._gone:
            raise StaleEpoch(f"incarnation {peer.incarnation} of {peer.worker_id} is known to be over; start it anew")
        try:
            check_compatible(self._mine, handshake)
        except FailedPrecondition as error:
            self._incompatible.add(peer, error.message)
            raise
        self._incompatible.discard(peer)
        self._sender.add_peer(handshake.description)
        self._accepted[peer.worker_id] = handshake.description
        self._same_host.add(handshake.description)
        return self._mine.description

    def same_host(self, peer: PeerRef) -> bool:
        """Return True if this incarnation of a prefill worker has reported that it is on this host."""
        return self._same_host.has(peer)

    def process_alive(self, peer: PeerRef) -> bool | None:
        """Return True if this prefill worker's process is alive, False if it has ended, None if that is unknown."""
        return self._same_host.process_alive(peer)

    # ---- both ----

    def warnings(self) -> tuple[str, ...]:
        """Return one sentence for each worker that is incompatible with this one, for `tandem status`."""
        return self._incompatible.warnings

    def forget(self, peer: PeerRef) -> None:
        """Close the connections to this incarnation of a worker and its earlier ones, which have ended.

        No connection to them is opened again, because another process may listen at the address by now; `restore_peer`
        lifts this for one incarnation.
        """
        self._gone.add(peer)
        for known, connection in list(self._connections.items()):
            if known in self._gone:
                self._drop(known, connection)
        for owed in [owed for owed in self._owed if owed.worker_id == peer.worker_id and owed != peer]:
            del self._owed[owed]
        self._incompatible.forget(peer)
        self._sender.remove_peer(peer)

    def restore_peer(self, peer: PeerRef) -> None:
        """Accept an incarnation that serves; if it was assumed dead, restore its state.

        Reports of leases that were held back meanwhile are then sent to it.
        """
        if not self._gone.restore(peer):
            return
        log.info("%s, which was taken for dead, is back", peer.worker_id)
        known = self._accepted.get(peer.worker_id)
        if known is not None and known.peer == peer:
            # The peer considers the handshake complete and will not repeat it.
            self._sender.add_peer(known)
        for destination in self._owed.pop(peer, ()):
            self._deliveries.add(destination)

    async def close(self) -> None:
        """Close every connection; calls in flight fail."""
        await self._deliveries.close()
        for peer, connection in list(self._connections.items()):
            self._drop(peer, connection)
        await asyncio.gather(*self._closing)

    # ---- inside ----

    def _add_pending_release(self, peer: PeerRef, leases: Sequence[Destination]) -> None:
        """Hold back reports for a worker that is assumed dead; they are sent if the worker turns out to be alive."""
        if self._gone.is_last(peer):
            self._owed.setdefault(peer, deque(maxlen=MOST_WAITING)).extend(leases)

    def _connection(self, peer: PeerRef, address: str) -> _Connection:
        if peer in self._gone:
            raise Unavailable(f"worker {peer.worker_id} is gone; choose another")
        connection = self._connections.get(peer)
        if connection is None:
            connection = self._connections[peer] = _Connection(address, self._token)
        return connection

    async def _introduced(self, peer: PeerRef, address: str) -> PeerDescription:
        connection = self._connection(peer, address)
        if connection.introduced is None:
            connection.introduced = asyncio.ensure_future(self._introduce(connection, peer))
            connection.introduced.add_done_callback(partial(self._drop_unless_introduced, peer, connection))
        # Shielded: many requests wait for one handshake, and one of them may be cancelled.
        return await asyncio.shield(connection.introduced)

    async def _introduce(self, connection: _Connection, peer: PeerRef) -> PeerDescription:
        request = conversion.to_proto(self._mine, worker_pb2.ConnectPeerRequest)
        try:
            reply = await _call(connection.stub.ConnectPeer(request, timeout=self._timeout_s), peer)
        except FailedPrecondition as error:
            self._incompatible.add(peer, error.message.removeprefix(f"worker {peer.worker_id}: "))
            raise
        self._incompatible.discard(peer)
        description = conversion.from_proto(reply.description, PeerDescription)
        if description.peer != peer:
            raise StaleEpoch(
                f"{peer.worker_id} has restarted (incarnation {description.peer.incarnation}, not {peer.incarnation});"
                " reserve anew"
            )
        if peer in self._gone:
            raise Unavailable(f"worker {peer.worker_id} is gone; choose another")
        self._sender.add_peer(description)
        log.info("introduced to %s (incarnation %d)", peer.worker_id, peer.incarnation)
        return description

    def _drop_unless_introduced(
        self, peer: PeerRef, connection: _Connection, introduced: "asyncio.Task[PeerDescription]"
    ) -> None:
        """Drop a connection whose handshake failed.

        The next request must not get the error of an old handshake. The requests that wait for the handshake cannot
        drop the connection, because all of them may have been cancelled.
        """
        if introduced.cancelled() or introduced.exception() is not None:
            self._drop(peer, connection)

    def _drop(self, peer: PeerRef, connection: _Connection) -> None:
        if self._connections.get(peer) is connection:
            del self._connections[peer]
            closing = asyncio.ensure_future(connection.channel.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)


async def _call(call: Awaitable[Reply], peer: PeerRef) -> Reply:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise rpc.error_of(error, f"worker {peer.worker_id}") from error
    except asyncio.CancelledError as error:
        # gRPC raises the same error when the caller was cancelled and when the channel was closed during the call.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise Unavailable(f"the connection to worker {peer.worker_id} was dropped; prefill again elsewhere") from error
