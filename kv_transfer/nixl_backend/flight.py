"""A write that was asked for, from the call to the end of its future."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from kv_transfer.base import PageWrite, WriteDone
from kv_transfer.nixl_backend.peers import Link
from wire.errors import TransferFailed


@dataclass(slots=True, eq=False)
class Flight:
    """A write in flight or about to be. Times are monotonic seconds."""

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
