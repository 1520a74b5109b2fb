"""The transport of a worker of any number of ranks: each rank writes its part of a page, with its own transport.

A hand-over between groups is one write for each pair of a sending and a receiving rank (`kv_transfer/rank_plan.py`).
Each of them has a notice, and the receiver has the KV once the last notice has arrived (`kv_transfer/lease.py`).
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from kv_transfer.base import NoticeHandler, PageRanges, PageWrite, RankTransport, Transport, WriteDone
from kv_transfer.rank_plan import ByteRange, RankedPages, even_stages, plan_handoff, pool_page_bytes
from kv_transfer.ranks.transport_server import STATUS_S
from tandem.protocol.errors import FailedPrecondition
from tandem.protocol.messages import PeerDescription, PeerRef, TransferNotice

_RANK_MARK = "#"
"""Separates a worker's id from the number of one of its ranks."""
SLACK_S = 2 * STATUS_S


def rank_peer(worker: PeerRef, rank: int) -> PeerRef:
    """Return the reference under which peers know a rank of a worker; that of the first rank is the worker's own."""
    return worker if rank == 0 else PeerRef(f"{worker.worker_id}{_RANK_MARK}{rank}", worker.incarnation)


def _worker_of(rank: PeerRef) -> PeerRef:
    return PeerRef(rank.worker_id.partition(_RANK_MARK)[0], rank.incarnation)


@dataclass(frozen=True, slots=True)
class _Link:
    """A peer, the number of its ranks, and the pairs of an own rank and a rank of the peer to which it writes.

    For each pair, `copied` says of which orders of pages it copies anything.
    """

    peer: PeerRef
    ranks: int
    pairs: tuple[tuple[int, PeerRef], ...]
    copied: tuple[tuple[bool, ...], ...]


class GroupTransport(Transport):
    """The transports of a worker's ranks as one transport.

    Between two workers of one rank each, every write is a write of the only rank, and nothing is added to it. Calls
    come from any thread; callbacks run on the threads of the ranks' transports.
    """

    def __init__(
        self,
        me: PeerRef,
        groups: Sequence[RankedPages],
        open_ranks: Sequence[Callable[[NoticeHandler], RankTransport]],
        on_notice: NoticeHandler,
    ) -> None:
        """Open the transports of the ranks, in the order of their numbers.

        `groups` is this worker's division of the pages of each group of layers. Raises the errors of opening a
        transport; those that were opened before are then closed.
        """
        self._me, self._on_notice = me, on_notice
        self._orders = tuple(dict.fromkeys(groups))
        """The divisions of the groups, each once: groups with the same division have the same order of elements."""
        self._order_of = [self._orders.index(group) for group in groups]
        self._links: dict[str, _Link] = {}
        self._gate = threading.Lock()
        self._ranks = _open_all(open_ranks, self._receive)
        self.backend = self._ranks[0].backend
        self._polled_s = 0.0
        self._polls = [rank.transport_poll_s() for rank in self._ranks]
        self._uncounted = [0.0] * len(self._ranks)

    def add_peer(self, description: PeerDescription) -> None:
        """Register a worker with all its ranks.

        Raises FailedPrecondition if the peer's pages do not have the size that follows from its layout, or as the
        ranks' transports do.
        """
        peer = description.peer
        known = self._links.get(peer.worker_id)
        if known is not None and known.peer.incarnation > peer.incarnation:
            return
        theirs = [replace(description, other_ranks=()), *description.other_ranks]
        layouts = self._layouts_of(theirs)
        for number, rank in enumerate(theirs):
            if rank.page_bytes != (expected := pool_page_bytes(layouts, number)):
                raise FailedPrecondition(
                    f"pages of {rank.peer.worker_id} have {rank.page_bytes} bytes instead of"
                    f" {expected}; start both workers with the same model and page settings"
                )
        if known is not None and known.peer != peer:
            self.remove_peer(known.peer)
        orders = tuple(zip(self._orders, layouts, strict=True))
        written = _ranges_of_pairs([plan_handoff(mine, layout) for mine, layout in orders])
        # A rank that only receives from a rank knows it too, so that it polls often while they connect.
        received = _ranges_of_pairs([[part.reversed for part in plan_handoff(layout, mine)] for mine, layout in orders])
        for (own, number), ranges in (received | written).items():
            whole = len(self._ranks) == len(theirs) == 1
            self._ranks[own].add_peer(theirs[number], () if whole else ranges)
        pairs = tuple((own, theirs[number].peer) for own, number in written)
        copied = tuple(tuple(map(bool, ranges)) for ranges in written.values())
        self._links[peer.worker_id] = _Link(peer, len(theirs), pairs, copied)

    def remove_peer(self, peer: PeerRef) -> None:
        """Remove this incarnation of a worker, and all earlier ones, from all ranks."""
        link = self._links.get(peer.worker_id)
        if link is not None and link.peer.incarnation <= peer.incarnation:
            del self._links[peer.worker_id]
        for target in range(1 if link is None else link.ranks):
            for rank in self._ranks:
                rank.remove_peer(rank_peer(peer, target))

    def write(self, write: PageWrite, deadline_s: float) -> "Future[WriteDone]":
        """Post the writes of all pairs of ranks, and return a future that ends when the last of them has ended.

        The write of a pair follows the pair's own earlier writes: the receiver waits for the notices of all pairs.
        """
        link = self._links.get(write.peer.worker_id)
        if link is None or link.ranks == len(self._ranks) == 1:
            return self._ranks[0].write(write, deadline_s)
        parts = []
        orders = [self._order_of[group] for group in write.groups or [0] * len(write.local_pages)]
        for number, (own, target) in enumerate(link.pairs):
            some = [index for index, order in enumerate(orders) if link.copied[number][order]]
            notice = write.notice
            if notice is not None:
                sender = rank_peer(self._me, own)
                notice = replace(notice, prefill=sender, part=number, parts=len(link.pairs))
            peer = replace(target, incarnation=write.peer.incarnation)
            after = [earlier.parts[number] for earlier in write.after if isinstance(earlier, _JoinedWrites)]
            part = replace(
                write,
                peer=peer,
                local_pages=[write.local_pages[index] for index in some],
                remote_pages=[write.remote_pages[index] for index in some],
                notice=notice,
                after=after,
                groups=[orders[index] for index in some],
            )
            parts.append(self._ranks[own].write(part, deadline_s))
        return _JoinedWrites(parts)

    def describe(self) -> PeerDescription:
        """Return the descriptions of all ranks: that of the first, which has the others in `other_ranks`."""
        first, *others = (
            replace(rank.describe(), stage=number // self._orders[0].tensor_ranks)
            for number, rank in enumerate(self._ranks)
        )
        return replace(first, other_ranks=tuple(others))

    def expect(self, leases: int) -> None:
        """Set the number of leases for which notices or writes may arrive on all ranks."""
        for rank in self._ranks:
            rank.expect(leases)

    def transport_poll_s(self) -> float:
        """Return a time that grows only while every rank polls; between calls by at most `SLACK_S` more than a rank's.

        The slack is needed because the ranks' reports are of different times.
        """
        with self._gate:
            before, self._polls = self._polls, [rank.transport_poll_s() for rank in self._ranks]
            grown = [rest + now - then for rest, now, then in zip(self._uncounted, self._polls, before, strict=True)]
            step = min(grown)
            self._uncounted = [min(more - step, SLACK_S) for more in grown]
            self._polled_s += step
            return self._polled_s

    def silent_s(self) -> float:
        """Return the seconds of silence of the rank that has been silent the longest; 0 if none is silent."""
        return max(rank.silent_s() for rank in self._ranks)

    def transport_name(self) -> str:
        """Return the name of the first rank's transport, and the number of ranks if there are several."""
        name, ranks = self._ranks[0].transport_name(), len(self._ranks)
        return name if ranks == 1 else f"{name}, {ranks} ranks"

    def transport_kinds(self) -> str:
        """Return the kinds of the first rank's transport."""
        return self._ranks[0].transport_kinds()

    def facts(self) -> tuple[tuple[str, str], ...]:
        """Return the facts of the first rank's transport, which those of the others equal."""
        return self._ranks[0].facts()

    def open_ports(self) -> tuple[str, ...]:
        """Return host:port of each TCP socket on which a rank's transport listens."""
        return tuple(port for rank in self._ranks for port in rank.open_ports())

    def warnings(self) -> tuple[str, ...]:
        """Return the different warnings of the ranks."""
        return tuple(dict.fromkeys(warning for rank in self._ranks for warning in rank.warnings()))

    def close(self) -> None:
        """Close the transports of all ranks, all at once."""
        with ThreadPoolExecutor(len(self._ranks)) as threads:
            list(threads.map(lambda rank: rank.close(), self._ranks))

    def _layouts_of(self, theirs: Sequence[PeerDescription]) -> tuple[RankedPages, ...]:
        """Return a peer's divisions of pages, one for each of this worker's.

        The handshake has checked that pages of both whole models are equal. Raises FailedPrecondition if the stages
        have different numbers of ranks, or more stages than layers.
        """
        stages = 1 + max(rank.stage for rank in theirs)
        depths = [sum(map(len, order.stages)) for order in self._orders]
        if len(theirs) % stages or stages > min(depths):
            raise FailedPrecondition(
                f"{theirs[0].peer.worker_id} has {len(theirs)} ranks in {stages} stages of {min(depths)} layers; run"
                " the same release of Tandem on both"
            )
        tensor_ranks = len(theirs) // stages
        return tuple(
            replace(order, tensor_ranks=tensor_ranks, stages=even_stages(depth, stages))
            for order, depth in zip(self._orders, depths, strict=True)
        )

    def _receive(self, notice: TransferNotice) -> None:
        """Pass on a notice as one from the sender's worker, not from its rank."""
        worker = _worker_of(notice.prefill)
        self._on_notice(notice if worker == notice.prefill else replace(notice, prefill=worker))


class _JoinedWrites(Future[WriteDone]):
    """The writes of all pairs of ranks: it ends when all of them have ended, so that all of them are quiescent."""

    def __init__(self, parts: "Sequence[Future[WriteDone]]") -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self.parts = parts
        self._running = len(parts)
        self._gate = threading.Lock()
        for part in parts:
            part.add_done_callback(self._part_ended)

    def _part_ended(self, _: "Future[WriteDone]") -> None:
        with self._gate:
            self._running -= 1
            if self._running:
                return
        error = next((error for part in self.parts if (error := part.exception()) is not None), None)
        if error is not None:
            self.set_exception(error)
            return
        done = [part.result() for part in self.parts]
        ended = max(part.ended_nanos for part in done)
        begun = min(part.begun_nanos for part in done)
        self.set_result(WriteDone(sum(part.bytes for part in done), ended - begun, ended))


def _open_all(
    openers: "Sequence[Callable[[NoticeHandler], RankTransport]]", on_notice: NoticeHandler
) -> list[RankTransport]:
    """Open the transports of all ranks at once. Raises the error of the first that fails, and closes the others."""
    with ThreadPoolExecutor(len(openers)) as threads:
        opening = [threads.submit(open_rank, on_notice) for open_rank in openers]
    failed = next((error for future in opening if (error := future.exception()) is not None), None)
    if failed is not None:
        for future in opening:
            if future.exception() is None:
                future.result().close()
        raise failed
    return [future.result() for future in opening]


def _ranges_of_pairs(plans: Sequence[Iterable[ByteRange]]) -> dict[tuple[int, int], PageRanges]:
    """Return the ranges that each pair of a source and a target rank copies of the pages of each order."""
    pairs: dict[tuple[int, int], list[list[ByteRange]]] = {}
    for order, plan in enumerate(plans):
        for part in plan:
            pairs.setdefault((part.source_rank, part.target_rank), [[] for _ in plans])[order].append(part)
    return {pair: tuple(map(tuple, orders)) for pair, orders in pairs.items()}
