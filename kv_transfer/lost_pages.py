"""The readiness of a worker that has lost pages of its pool to transfers that do not end."""

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)

READY_AGAIN = 0.8
"""A worker becomes ready again once its loss is at most this fraction of the allowed loss."""


class LostPages:
    """Decides from the number of lost pages whether a worker is ready, and logs each change.

    A worker that has lost many pages must not be ready: routers would take it for a small worker that is full. Not
    thread-safe; guarded by the lock of its owner.
    """

    def __init__(self, worker_id: str, share_max: float) -> None:
        """Begin in the ready state; `share_max` is the allowed loss as a fraction of the pool."""
        self._worker_id = worker_id
        self._share_max = share_max
        self.not_ready = ""
        """The reason why the worker accepts no new requests; empty if it accepts them.

        The reason is announced to the whole cluster whenever it changes, so it contains no counts that would change
        often.
        """

    def update(self, lost: int, pool: int, why: Callable[[], str]) -> None:
        """Update `not_ready` for a pool of `pool` pages, of which `lost` are lost.

        `why` returns the rest of a sentence that begins, for example, "too many of its 16 KV pages".
        """
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
