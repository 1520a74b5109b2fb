"""A write between two transports of one process."""

import time
from concurrent.futures import Future
from dataclasses import dataclass

from kv_transfer.base import PageWrite, WriteDone
from tandem.protocol.errors import TransferFailed
from tandem.protocol.messages import PeerRef


@dataclass(slots=True, eq=False)
class Flight:
    """A posted write. Times are the fabric's."""

    sender: PeerRef
    write: PageWrite
    begun_at: float
    deadline: float
    future: "Future[WriteDone]"
    doomed: bool = False
    """True if its peer was removed: it fails, no matter how it ends."""

    def land(self, page_bytes: int, now: float, *, notified: bool) -> None:
        """Settles the write after its last byte. Past its deadline it fails, unless the peer was `notified`."""
        if self.doomed:
            self.future.set_exception(TransferFailed("the write ended, but the peer was removed; prefill again"))
        elif now > self.deadline and not notified:
            self.future.set_exception(TransferFailed("the write ended after its deadline; prefill again"))
        else:
            moved = len(self.write.local_pages) * page_bytes
            self.future.set_result(WriteDone(moved, int((now - self.begun_at) * 1e9), time.time_ns()))
