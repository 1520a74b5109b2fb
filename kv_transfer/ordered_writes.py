"""Ordering of writes: each write is held until the writes on which it depends have completed.

The thread that sees the last of these writes complete begins the held write, so no other thread has to wake up.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from kv_transfer.base import WriteDone

Begin = Callable[[str], None]
"""Called once, with the reason why the write must not begin, or with "" if it may begin."""


def hold(after: "Sequence[Future[WriteDone]]", begin: Begin) -> None:
    """Call `begin` once all writes in `after` have completed or one of them has failed.

    The call is made immediately if `after` is empty or has ended, else on the thread that sees the deciding write end.
    """
    if after:
        _Held(len(after), begin).watch(after)
    else:
        begin("")


class _Held:
    """A write that waits for other writes."""

    def __init__(self, waits_for: int, begin: Begin) -> None:
        self._waits_for = waits_for
        self._begin: Begin | None = begin
        self._lock = threading.Lock()

    def watch(self, after: "Sequence[Future[WriteDone]]") -> None:
        for write in after:
            write.add_done_callback(self._on_write_done)

    def _on_write_done(self, write: "Future[WriteDone]") -> None:
        why = "" if write.exception() is None else "a write that it depends on has failed"
        with self._lock:
            self._waits_for -= 1
            if self._begin is None or (self._waits_for and not why):
                return
            begin, self._begin = self._begin, None
        begin(why)
