"""The transport of a worker of any number of ranks: each rank writes its part of a page, with its own transport.

A hand-over between groups is one write for each pair of a sending and a receiving rank (`kv_transfer/rank_plan.py`).
Each of them has a notice, and the receiver has the KV once the last notice has arrived (`kv_transfer/lease.py`).
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from kv_transfer.base import NoticeHandler, PageWrite, Transport, WriteDone
from kv_transfer.ordered_writes import hold
from kv_transfer.rank_plan import ByteRange, RankedPages, even_stages, plan_handoff, why_not
from tandem.protocol.errors import FailedPrecondition, TransferFailed
from tandem.protocol.messages import PeerDescription, PeerRef, TransferNotice

_RANK_MARK = "#"
"""Separates a worker's id from the number of one of its ranks."""


def rank_peer(worker: PeerRef, rank: int) -> PeerRef:
    """Return the reference under which peers know a rank of a worker; that of the first rank is the worker's own."""
    return worker if rank == 0 else PeerRef(f"{worker.worker_id}{_RANK_MARK}{rank}", worker.incarnation)


def _worker_of(rank: PeerRef) -> PeerRef:
    return PeerRef(rank.worker_id.partition(_RANK_MARK)[0], rank.incarnation)


@dataclass(frozen=True, slots=True)
class _Link:
    """A peer, the number of its ranks, and the pairs of an own rank and a rank of the peer to which it writes."""

    peer: PeerRef
    ranks: int
    pairs: tuple[tuple[int, PeerRef], ...]


class GroupTransport(Transport):
    """The transports of a worker's ranks as one transport.

    Between two workers of one rank each, every write is a write of the only rank, and nothing is added to it. Calls
    come from any thread; callbacks run on the threads of the ranks' transports.
    """

    def __init__(
        self,
        me: PeerRef,
        pages: RankedPages,
        open_ranks: Sequence[Callable[[NoticeHandler], Transport]],
        on_notice: NoticeHandler,
    ) -> None:
        """Open the transports of the ranks, in the order of their numbers; `pages` is this worker's division of pages.

        Raises the errors of opening a transport; those that were opened before are then closed.
        """
        self._me, self._pages, self._on_notice = me, pages, on_notice
        self._ranks: list[Transport] = []
        self._links: dict[str, _Link] = {}
        self._gate = threading.Lock()
        self._polled_s = 0.0
        try:
            for open_rank in open_ranks:
                self._ranks.append(open_rank(self._receive))
        except BaseException:
            self.close()
            raise
        self.backend = self._ranks[0].backend
        self._polls = [0.0] * len(self._ranks)

    def add_peer(self, description: PeerDescription, ranges: Sequence[ByteRange] = ()) -> None:
        """Register a worker with all its ranks; `ranges` must be empty, because they follow from both layouts.

        Raises FailedPrecondition if KV cannot be handed over to the peer's layout, or as the ranks' transports do.
        """
        assert not ranges
        peer = description.peer
        targets = [replace(description, other_ranks=()), *description.other_ranks]
        known = self._links.get(peer.worker_id)
        if known is not None and known.peer.incarnation > peer.incarnation:
            return
        layout = _layout_of(self._pages, targets)
        planned = _ranges_of_pairs(self._pages, layout, peer.worker_id)
        for number, target in enumerate(targets):
            if target.page_bytes != layout.page_bytes(number):
                raise FailedPrecondition(
                    f"pages of {target.peer.worker_id} have {target.page_bytes} bytes instead of"
                    f" {layout.page_bytes(number)}; start both workers with the same model and page settings"
                )
        if known is not None and known.peer != peer:
            self.remove_peer(known.peer)
        for (source, number), parts in planned.items():
            whole = len(self._ranks) == len(targets) == 1
            self._ranks[source].add_peer(targets[number], () if whole else parts)
        pairs = tuple((source, targets[number].peer) for source, number in planned)
        self._links[peer.worker_id] = _Link(peer, len(targets), pairs)

    def remove_peer(self, peer: PeerRef) -> None:
        """Remove this incarnation of a worker, and all earlier ones, from all ranks."""
        link = self._links.get(peer.worker_id)
        if link is not None and link.peer.incarnation <= peer.incarnation:
            del self._links[peer.worker_id]
        for target in range(1 if link is None else link.ranks):
            for rank in self._ranks:
                rank.remove_peer(rank_peer(peer, target))

    def write(self, write: PageWrite, deadline_s: float) -> "Future[WriteDone]":
        """Post the writes of all pairs of ranks, and return a future that ends when the last of them has ended."""
        link = self._links.get(write.peer.worker_id)
        if link is None or len(link.pairs) == 1:
            return self._ranks[0].write(write, deadline_s)
        future: Future[WriteDone] = Future()
        future.set_running_or_notify_cancel()
        hold(write.after, partial(self._begin, link, write, time.monotonic() + deadline_s, future))
        return future

    def _begin(self, link: _Link, write: PageWrite, deadline: float, done: "Future[WriteDone]", why_not: str) -> None:
        if why_not:
            done.set_exception(TransferFailed(f"write to {write.peer.worker_id}: {why_not}; prefill again"))
            return
        parts = []
        for number, (source, target) in enumerate(link.pairs):
            notice = write.notice
            if notice is not None:
                sender = rank_peer(self._me, source)
                notice = replace(notice, prefill=sender, part=number, parts=len(link.pairs))
            part = replace(write, peer=replace(target, incarnation=write.peer.incarnation), notice=notice, after=())
            parts.append(self._ranks[source].write(part, deadline - time.monotonic()))
        _JoinedWrites(parts, done)

    def describe(self) -> PeerDescription:
        """Return the descriptions of all ranks: that of the first, which has the others in `other_ranks`."""
        first, *others = (
            replace(rank.describe(), stage=number // self._pages.tensor_ranks)
            for number, rank in enumerate(self._ranks)
        )
        return replace(first, other_ranks=tuple(others))

    def expect(self, leases: int) -> None:
        """Set the number of leases for which notices or writes may arrive on all ranks."""
        for rank in self._ranks:
            rank.expect(leases)

    def transport_poll_s(self) -> float:
        """Return a time that has grown, between any two calls, by at most the polling time of every rank."""
        with self._gate:
            before, self._polls = self._polls, [rank.transport_poll_s() for rank in self._ranks]
            self._polled_s += min(now - then for now, then in zip(self._polls, before, strict=True))
            return self._polled_s

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
        """Close the transports of all ranks."""
        for rank in self._ranks:
            rank.close()

    def _receive(self, notice: TransferNotice) -> None:
        """Pass on a notice as one from the sender's worker, not from its rank."""
        worker = _worker_of(notice.prefill)
        self._on_notice(notice if worker == notice.prefill else replace(notice, prefill=worker))


class _JoinedWrites:
    """Ends a write of a group when the writes of all pairs of ranks have ended, so that all of them are quiescent."""

    def __init__(self, parts: "Sequence[Future[WriteDone]]", done: "Future[WriteDone]") -> None:
        self._parts, self._done = parts, done
        self._running = len(parts)
        self._gate = threading.Lock()
        for part in parts:
            part.add_done_callback(self._part_ended)

    def _part_ended(self, _: "Future[WriteDone]") -> None:
        with self._gate:
            self._running -= 1
            if self._running:
                return
        error = next((error for part in self._parts if (error := part.exception()) is not None), None)
        if error is not None:
            self._done.set_exception(error)
            return
        done = [part.result() for part in self._parts]
        ended = max(part.ended_nanos for part in done)
        begun = min(part.begun_nanos for part in done)
        self._done.set_result(WriteDone(sum(part.bytes for part in done), ended - begun, ended))


def _layout_of(own: RankedPages, ranks: Sequence[PeerDescription]) -> RankedPages:
    """Return the division of a peer's pages. The handshake has checked that pages of both whole models are equal."""
    stages = 1 + max(rank.stage for rank in ranks)
    layers = sum(map(len, own.stages))
    return replace(own, tensor_ranks=len(ranks) // stages, stages=even_stages(layers, stages))


def _ranges_of_pairs(
    source: RankedPages, target: RankedPages, worker_id: str
) -> dict[tuple[int, int], tuple[ByteRange, ...]]:
    """Return the ranges of a page that each pair of ranks copies. Raises FailedPrecondition if there is no plan."""
    if (reason := why_not(source, target)) is not None:
        raise FailedPrecondition(f"no KV can be handed over to {worker_id}: {reason}; start both with equal settings")
    pairs: dict[tuple[int, int], list[ByteRange]] = {}
    for part in plan_handoff(source, target):
        pairs.setdefault((part.source_rank, part.target_rank), []).append(part)
    return {pair: tuple(parts) for pair, parts in pairs.items()}
