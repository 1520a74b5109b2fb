"""NIXL transfers in flight, and when each is known to be quiet.

A put of UCX cannot be taken back: `release_xfer_handle` frees NIXL's bookkeeping, and even removing the agent
closes the endpoint with a flush. So one is quiet only
- when NIXL says DONE: every byte is in its place (NIXL flushes the endpoint after puts);
- here, `ERROR_REST_S` after it failed: UCX ends everything on a failed endpoint and posts no more; what a network card
  or a copy engine had begun to read ends within microseconds. There nothing is proven: what TCP had taken lies in the
  peer's socket buffers and lands when that looks. So whoever hears that one failed may use its own pages again, and
  the decode worker keeps its for a grace (`fence.py`).
A deadline therefore ends none in flight; it decides how it ends when it has come to rest. Nor does the removal of its
peer, which may be alive. Even when nobody wants to hear of its end, it is looked after until UCX is done with it:
before that its handle, the peer's metadata and the endpoint may not be freed (UCX still follows their pointers).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kv_transfer.nixl_backend.agent import PoolAgent, TransferState
from kv_transfer.nixl_backend.peers import Link, Links
from kv_transfer.pace import LAST_LOOK_S, Pace
from wire.errors import TransferFailed
from wire.messages import PeerDescription

ERROR_REST_S = 0.5


@dataclass(slots=True, eq=False)
class _Move:
    """`rests_at`: when it will be quiet here after its failure; `abandoned`: nobody wants to hear of its end."""

    link: Link
    handle: Any
    bytes: int
    on_end: Callable[[bool], None]
    rests_at: float | None = None
    abandoned: bool = False


class Moves:
    """All transfers that this agent has posted. For the transport's thread alone."""

    def __init__(self, agent: PoolAgent, links: Links, page_bytes: int) -> None:
        self._agent, self._links, self._page_bytes = agent, links, page_bytes
        self._moves: list[_Move] = []
        self._pace = Pace()
        self._turn = 0
        self.reached: list[PeerDescription] = []
        """Peers of connections whose first transfer has ended well, for whoever takes them off."""

    def __len__(self) -> int:
        return len(self._moves)

    @property
    def waited_for(self) -> bool:
        return any(not move.abandoned for move in self._moves)

    @property
    def handles(self) -> list[Any]:
        return [move.handle for move in self._moves]

    @property
    def next_look_s(self) -> float:
        return self._pace.wait_s(self._moves[0].bytes) if self._moves else LAST_LOOK_S

    def begin(
        self, link: Link, local: Sequence[int], remote: Sequence[int], notice: bytes, on_end: Callable[[bool], None]
    ) -> None:
        """Post one; `on_end` hears once that it is quiet, and whether every byte is there: perhaps before this returns.

        TransferFailed when the peer is out of reach or NIXL refuses: nothing moved, and `on_end` hears nothing.
        """
        connection = self._links.connected(link)
        try:
            handle = self._agent.prepare(connection, local, remote, notice)
        except Exception as error:
            link.broken = True
            peer = link.description.peer.worker_id
            raise TransferFailed(
                f"pages of {peer}: NIXL does not take the transfer: {error!r}; prefill again"
            ) from error
        link.in_flight += 1
        self._pace.began(len(self._moves))
        move = _Move(link, handle, len(local) * self._page_bytes, on_end)
        self._moves.append(move)
        self._note(move, self._agent.start(handle))

    def poll(self) -> None:
        """Make progress and end what has come to rest."""
        for move in self._worth_a_look():
            if move.rests_at is None:
                self._note(move, self._agent.state(move.handle))
            elif time.monotonic() >= move.rests_at:
                self._end(move, whole=False)

    def _worth_a_look(self) -> Iterator[_Move]:
        """Of each link from the oldest on up to the first that goes on, and then one of all others, in turn: one look
        moves them all on, and each costs as much as a page takes.
        """
        going: set[Link] = set()
        others: list[_Move] = []
        for move in list(self._moves):
            if move.link in going:
                others.append(move)
                continue
            yield move
            if move.rests_at is None and move in self._moves:
                going.add(move.link)
        if others:
            self._turn += 1
            yield others[self._turn % len(others)]

    def abandon_all(self) -> None:
        """Nobody wants to hear of any."""
        for move in self._moves:
            move.abandoned = True

    def _note(self, move: _Move, state: TransferState) -> None:
        if state is TransferState.MOVING:
            return
        self._agent.release(move.handle)
        if state is TransferState.FAILED:
            move.link.broken = True
            move.rests_at = time.monotonic() + ERROR_REST_S
            return
        if not move.abandoned:
            self._pace.ended(move.bytes)
            if not move.link.reached:
                move.link.reached = True
                self.reached.append(move.link.description)
        self._end(move, whole=True)

    def _end(self, move: _Move, *, whole: bool) -> None:
        self._moves.remove(move)
        move.link.in_flight -= 1
        if not move.abandoned:
            move.on_end(whole)
