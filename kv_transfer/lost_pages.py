"""Readiness of a worker that has lost pages of its pool to transfers that do not end."""

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)

READY_AGAIN = 0.8
"""The part of the allowed loss to which it must fall before the worker is ready again."""


class LostPages:
    """The loss of pages, which makes a worker not ready beyond a threshold, and logs each change.

    Such a worker would otherwise look healthy, small and full. Not thread-safe: its owner's lock guards it.
    """

    def __init__(self, worker_id: str, share_max: float) -> None:
        """Takes `share_max`: the part of the pool up to which a loss is normal."""
        self._worker_id = worker_id
        self._share_max = share_max
        self.not_ready = ""
        """The reason why the worker accepts nothing new; empty = it does.

        It is announced to the whole cluster whenever it changes, so it contains no counts and does not flicker.
        """

    def update(self, lost: int, pool: int, why: Callable[[], str]) -> None:
        """Updates `not_ready` for `lost` pages of `pool`; `why` completes "too many of its 16 KV pages"."""
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
