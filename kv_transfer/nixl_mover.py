"""What both directions of a NIXL transport share: the write that was asked for, and the seam behind which either is."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from kv_transfer.base import PageWrite, WriteDone
from kv_transfer.nixl_peers import Link
from wire.errors import TransferFailed
from wire.messages import PeerDescription, PeerRef, TransferNotice

Deliver = Callable[[str, TransferNotice], None]
"""(agent name of the sender, its notice): hands it to the worker, or drops one that is not that sender's."""


@dataclass(slots=True, eq=False)
class Flight:
    """A write from the call that asked for it to the end of its future. Times are monotonic seconds."""

    write: PageWrite
    begun_at: float
    """When it was asked for, until it begins."""
    deadline: float
    future: "Future[WriteDone]"
    doomed: str = ""
    """Why it will fail, however it comes to rest: its peer was removed."""

    @property
    def told(self) -> bool:
        """Whether the caller knows how it ended."""
        return self.future.done()

    @property
    def late(self) -> bool:
        return time.monotonic() >= self.deadline

    @property
    def forbidden(self) -> bool:
        """Whether it may not begin any more."""
        return time.monotonic() >= self.write.begin_by()

    def fail(self, why: str) -> None:
        if not self.told:
            error = TransferFailed(f"write to {self.write.peer.worker_id}: {self.doomed or why}; prefill again")
            self.future.set_exception(error)

    def land(self, moved: int) -> None:
        """All `moved` bytes are there; too late all the same, unless a notice has left; and in vain if it is doomed.

        A notice cannot be called back: the peer goes on with the request, so the write was a success.
        """
        if self.doomed:
            self.fail(self.doomed)
        elif self.late and self.write.notice is None:
            self.fail("it came to rest after its deadline")
        elif not self.told:
            took_s = time.monotonic() - self.begun_at
            self.future.set_result(WriteDone(moved, int(took_s * 1e9), time.time_ns()))

    def wrong(self, link: Link | None, pages_here: int) -> str:
        """Why it cannot begin, over the link to its peer from a pool of so many pages; "" = it can."""
        write = self.write
        if link is None:
            return "that peer is not known here; introduce it first"
        if self.late:
            return "it was past its deadline before it began"
        if self.forbidden:
            return "the peer gave its pages for a time that was over before it began"
        if not write.local_pages and not write.remote_pages and write.notice is None:
            return "it has neither pages nor a notice"
        return misfit(write.local_pages, pages_here, write.remote_pages, link.description.pages)


def misfit(local: Sequence[int], pages_here: int, remote: Sequence[int], pages_there: int) -> str:
    """Why pages of this pool and of a peer's cannot pair one to one; "" = they can."""
    if len(local) != len(remote):
        return f"{len(local)} pages do not go onto {len(remote)}"
    for side, pages, total in (("local", local, pages_here), ("remote", remote, pages_there)):
        outside = [page for page in pages if not 0 <= page < total]
        if outside:
            return f"{side} page {outside[0]} is outside a pool of {total}"
    return ""


class Mover(ABC):
    """Carries writes out, in one direction. For the transport's thread alone."""

    @property
    @abstractmethod
    def unfinished(self) -> bool:
        """Whether anything has not come to rest, or is not known to."""

    @property
    @abstractmethod
    def waited_for(self) -> bool:
        """Whether somebody waits for any of that."""

    @property
    @abstractmethod
    def handles(self) -> list[Any]:
        """NIXL's handles of all that has not come to rest."""

    @property
    @abstractmethod
    def next_look_s(self) -> float:
        """How long to wait before the next `poll`."""

    @property
    @abstractmethod
    def reached(self) -> list[PeerDescription]:
        """Peers of connections whose first transfer has ended well, for whoever takes them off."""

    @abstractmethod
    def post(self, flight: Flight) -> None:
        """Begin a write, or fail it when it is late, impossible or its peer is out of reach: nothing moved then."""

    @abstractmethod
    def poll(self) -> None:
        """Make progress and end what has come to rest."""

    @abstractmethod
    def hear(self, sender: str, data: bytes) -> None:
        """A notification from the agent `sender`. google.protobuf.message.DecodeError when it cannot be read."""

    def act(self, since: float) -> None:  # noqa: B027 - where the peer moves the pages there is nothing to do
        """All that had come is heard; it may have lain here `since` then (`time.monotonic`)."""

    @abstractmethod
    def announce(self, peer: PeerRef) -> None:
        """A notice for this peer waits for writes in flight: let it listen closely, if that is of use."""

    @property
    @abstractmethod
    def notice_due(self) -> bool:
        """Whether a peer has said that its notice comes soon."""

    @abstractmethod
    def abandon(self, link: Link, why: str) -> None:
        """Fail every write to a peer that is taken for dead, each when it is quiet; tell that peer nothing."""

    @property
    @abstractmethod
    def reads_in_vain(self) -> bool:
        """Whether this agent still moves bytes into its own pages for a peer that is taken for dead."""

    @abstractmethod
    def abandon_all(self, why: str) -> None:
        """Fail every write: the transport ends."""

    @abstractmethod
    def leave(self) -> None:
        """Begin nothing any more: the transport is about to end."""
