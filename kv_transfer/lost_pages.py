"""When a worker has lost too much of its pool to transfers that do not end."""

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)

READY_AGAIN = 0.8
"""Part of the allowed share down to which the loss must fall before the worker is ready again."""


class LostPages:
    """Says so in words, and in the log whenever that changes. Small and full, such a worker would look healthy.

    Not thread-safe: guarded by its owner's lock.
    """

    def __init__(self, worker_id: str, share_max: float) -> None:
        """`share_max`: the part of the pool up to which a loss is daily life."""
        self._worker_id = worker_id
        self._share_max = share_max
        self.not_ready = ""
        """Why the worker takes nothing new, in words; empty = it does. It is announced to the whole cluster whenever
        it changes, so it has no counts and does not flicker.
        """

    def look(self, lost: int, pool: int, why: Callable[[], str]) -> None:
        """So many pages of `pool` are lost now; `why` completes "too many of its 16 KV pages"."""
        allowed = self._share_max * pool * (READY_AGAIN if self.not_ready else 1.0)
        if lost <= allowed:
            if self.not_ready:
                log.warning("%s is ready again: %d KV pages are still lost", self._worker_id, lost)
            self.not_ready = ""
            return
        was_ready = not self.not_ready
        self.not_ready = f"too many of its {pool} KV pages {why()}"
        if was_ready:
            log.error("%s is not ready (%d KV pages lost): %s", self._worker_id, lost, self.not_ready)
