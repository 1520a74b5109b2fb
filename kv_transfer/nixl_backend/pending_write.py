"""The state of a write, from the call that requests it to the end of its future."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from kv_transfer.base import PageWrite, WriteDone
from kv_transfer.nixl_backend.peers import Link
from tandem.protocol.errors import TransferFailed


@dataclass(slots=True, eq=False)
class PendingWrite:
    """A write in flight or about to begin. Times are in seconds by `time.monotonic`."""

    write: PageWrite
    begun_at: float
    """The time at which the write began; before that, the time at which it was requested."""
    deadline: float
    future: "Future[WriteDone]"
    failure: str = ""
    """The reason why the write will fail in any case, because its peer was removed; empty if there is none."""

    @property
    def done(self) -> bool:
        """True if the future is done."""
        return self.future.done()

    @property
    def deadline_passed(self) -> bool:
        """True if the deadline has passed."""
        return time.monotonic() >= self.deadline

    @property
    def permission_expired(self) -> bool:
        """True if the permission to begin the write has expired."""
        return time.monotonic() >= self.write.begin_by()

    def fail(self, why: str) -> None:
        """Fail the future with TransferFailed, unless it is done.

        The error's message gives `failure` as the reason if it is set, else `why`.
        """
        if not self.done:
            error = TransferFailed(f"write to {self.write.peer.worker_id}: {self.failure or why}; prefill again")
            self.future.set_exception(error)

    def complete(self, moved: int) -> None:
        """Complete the write after all its `moved` bytes have landed.

        The write fails if it has a `failure`, or if it is late and has no notice. A late write with a notice succeeds,
        because a notice cannot be recalled: the peer continues the request as soon as it has the notice.
        """
        if self.failure:
            self.fail(self.failure)
        elif self.deadline_passed and self.write.notice is None:
            self.fail("it ended after its deadline")
        elif not self.done:
            took_s = time.monotonic() - self.begun_at
            self.future.set_result(WriteDone(moved, int(took_s * 1e9), time.time_ns()))

    def invalid_reason(self, link: Link | None, pages_here: int) -> str:
        """Return why the write cannot begin over `link` from a pool of `pages_here` pages; "" if it can."""
        write = self.write
        if link is None:
            return "that peer is unknown here; introduce it first"
        if self.deadline_passed:
            return "it was past its deadline before it began"
        if self.permission_expired:
            return "the permission to write the peer's pages had expired before it began"
        if not write.local_pages and not write.remote_pages and write.notice is None:
            return "it has neither pages nor a notice"
        return misfit(write.local_pages, pages_here, write.remote_pages, link.description.pages)


def misfit(local: Sequence[int], pages_here: int, remote: Sequence[int], pages_there: int) -> str:
    """Return why pages of this pool and of a peer's pool cannot be paired one to one; "" if they can."""
    if len(local) != len(remote):
        return f"{len(local)} pages do not go onto {len(remote)}"
    for side, pages, total in (("local", local, pages_here), ("remote", remote, pages_there)):
        outside = [page for page in pages if not 0 <= page < total]
        if outside:
            return f"{side} page {outside[0]} is outside a pool of {total}"
    return ""
