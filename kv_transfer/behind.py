"""Writes that go behind others: each is held until those are over.

The thread that finds the last of them over begins it, so nobody else has to wake up in between.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from kv_transfer.base import WriteDone

Begin = Callable[[str], None]
"""Called once, with why the write may not begin; empty = it may."""


def hold(behind: "Sequence[Future[WriteDone]]", begin: Begin) -> None:
    """Call `begin` as soon as all those have landed, or one has not: at once, or from the thread that finds it out."""
    if behind:
        _Held(len(behind), begin).watch(behind)
    else:
        begin("")


class _Held:
    """One write that is held."""

    def __init__(self, waits_for: int, begin: Begin) -> None:
        self._waits_for = waits_for
        self._begin: Begin | None = begin
        self._lock = threading.Lock()

    def watch(self, behind: "Sequence[Future[WriteDone]]") -> None:
        for write in behind:
            write.add_done_callback(self._hear)

    def _hear(self, write: "Future[WriteDone]") -> None:
        why = "" if write.exception() is None else "a write that it goes behind has failed"
        with self._lock:
            self._waits_for -= 1
            if self._begin is None or (self._waits_for and not why):
                return
            begin, self._begin = self._begin, None
        begin(why)
