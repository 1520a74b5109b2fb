"""NIXL transfers in flight, and the rules that say when a transfer is quiescent.

A put of UCX cannot be cancelled: `release_xfer_handle` frees NIXL's bookkeeping, and even removing the agent closes the
endpoint with a flush. So a transfer is quiescent only in these two cases:

- NIXL says DONE: every byte is in place (NIXL flushes the endpoint after puts).
- `ERROR_REST_S` have passed on this side since the transfer failed: UCX completes all operations on a failed endpoint
  and posts no more, and a read that a network card or a copy engine had begun ends within microseconds. On the peer's
  side nothing is proven: bytes that TCP has accepted are in the peer's socket buffers and land at its next poll. So
  after a failure the sender may reuse its own pages, and the decode worker quarantines its pages for a grace period
  (`fence.py`).

A deadline therefore ends no transfer in flight; it decides whether the transfer succeeds or fails once it is quiescent.
The removal of its peer, which may be alive, ends no transfer either. A transfer is polled until UCX has finished it,
even if no caller waits for its end: until then UCX follows pointers to its handle, the peer's metadata and the
endpoint, so these must not be freed.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kv_transfer.base import PageWrite
from kv_transfer.nixl_backend.agent import PoolAgent, TransferState
from kv_transfer.nixl_backend.peers import Link, Links
from kv_transfer.poll_backoff import LAST_LOOK_S, PollBackoff
from tandem.protocol.errors import TransferFailed
from tandem.protocol.messages import PeerDescription

ERROR_REST_S = 0.5


@dataclass(slots=True, eq=False)
class _PostedTransfer:
    """A transfer that was posted and is not quiescent.

    `quiescent_at`: the time at which a failed transfer becomes quiescent on this side; None if it has not failed.
    `abandoned`: no caller waits for the transfer's end.
    """

    link: Link
    handle: Any
    bytes: int
    on_end: Callable[[bool], None]
    quiescent_at: float | None = None
    abandoned: bool = False


class PostedTransfers:
    """All transfers that this agent has posted and that are not quiescent.

    Used on the transport's thread only. Owned by `Writes`.
    """

    def __init__(self, agent: PoolAgent, links: Links) -> None:
        self._agent, self._links = agent, links
        self._posted: list[_PostedTransfer] = []
        self._poll_backoff = PollBackoff()
        self._turn = 0
        self.reached: list[PeerDescription] = []
        """Peers whose connection has completed its first transfer; the reader removes them from the list."""

    def __len__(self) -> int:
        return len(self._posted)

    @property
    def waited_for(self) -> bool:
        """True if a caller waits for any of the transfers."""
        return any(not move.abandoned for move in self._posted)

    @property
    def handles(self) -> list[Any]:
        """NIXL handles of the transfers that are not quiescent."""
        return [move.handle for move in self._posted]

    @property
    def next_look_s(self) -> float:
        """The time to wait before the next `poll`, in seconds."""
        return self._poll_backoff.wait_s(self._posted[0].bytes) if self._posted else LAST_LOOK_S

    def begin(self, link: Link, write: PageWrite, notice: bytes, on_end: Callable[[bool], None]) -> None:
        """Post a transfer; `on_end` is called once the transfer is quiescent, perhaps before this method returns.

        The argument of `on_end` is True if every byte has landed. Raises TransferFailed if the peer cannot be reached
        or NIXL refuses; then nothing was moved, and `on_end` is not called.
        """
        connection = self._links.connected(link)
        try:
            handle = self._agent.prepare(connection, write, notice)
        except Exception as error:
            link.broken = True
            peer = link.description.peer.worker_id
            raise TransferFailed(f"pages of {peer}: NIXL refused the transfer: {error!r}; prefill again") from error
        link.in_flight += 1
        self._poll_backoff.began(len(self._posted))
        move = _PostedTransfer(link, handle, link.written_bytes(write), on_end)
        self._posted.append(move)
        self._note(move, self._agent.start(handle))

    def poll(self) -> None:
        """Poll the posted transfers, and complete those that are quiescent.

        A transfer is quiescent if NIXL reports it as done, or if it failed at least `ERROR_REST_S` seconds ago.
        """
        for move in self._due_transfers():
            if move.quiescent_at is None:
                self._note(move, self._agent.state(move.handle))
            elif time.monotonic() >= move.quiescent_at:
                self._end(move, whole=False)

    def _due_transfers(self) -> Iterator[_PostedTransfer]:
        """Yield the transfers to poll: of each link, the oldest ones up to and including the first that is in flight.

        Of the other transfers, each call yields one, in turn. To poll all of them would be slow, because each poll
        costs as much as the copy of a page, and is not needed, because one poll makes progress on all transfers.
        """
        going: set[Link] = set()
        others: list[_PostedTransfer] = []
        for move in list(self._posted):
            if move.link in going:
                others.append(move)
                continue
            yield move
            if move.quiescent_at is None and move in self._posted:
                going.add(move.link)
        if others:
            self._turn += 1
            yield others[self._turn % len(others)]

    def abandon_all(self) -> None:
        """Mark all transfers as abandoned: they are polled until they are quiescent, but `on_end` is not called."""
        for move in self._posted:
            move.abandoned = True

    def _note(self, move: _PostedTransfer, state: TransferState) -> None:
        if state is TransferState.IN_PROGRESS:
            return
        self._agent.release(move.handle)
        if state is TransferState.FAILED:
            move.link.broken = True
            move.quiescent_at = time.monotonic() + ERROR_REST_S
            return
        if not move.abandoned:
            self._poll_backoff.ended(move.bytes)
            if not move.link.reached:
                move.link.reached = True
                self.reached.append(move.link.description)
        self._end(move, whole=True)

    def _end(self, move: _PostedTransfer, *, whole: bool) -> None:
        self._posted.remove(move)
        move.link.in_flight -= 1
        if not move.abandoned:
            move.on_end(whole)
