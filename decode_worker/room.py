"""How much this worker may still promise, and when it had better promise nothing."""

import logging

from decode_worker.config import DecodeConfig
from engine.cache.prefix_cache import Prefix, PrefixCache
from kv_transfer.lease import LeaseTable
from wire.errors import InvalidArgument, ResourceExhausted, RoleClosed

log = logging.getLogger(__name__)

READY_AGAIN = 0.8
"""Part of `quarantine_share_max` down to which quarantine must fall before promises are made again."""


class Room:
    """Pages promised to requests, prompt and answer, until each is over. Guarded by the admission's lock.

    Quarantined pages are room lost for as long as their writers are silent. A worker that has lost a large part of its
    pool this way says so and promises nothing, until enough of it is back: small and full, it would look healthy.
    """

    def __init__(self, config: DecodeConfig, worker_id: str, cache: PrefixCache, leases: LeaseTable) -> None:
        self._config = config
        self._worker_id = worker_id
        self._cache = cache
        self._pool = cache.pool
        self._leases = leases
        self._limit = cache.pool.counts().total if config.max_pages is None else config.max_pages
        self.committed = 0
        """Pages of all requests that are not over, promised and held."""
        self._closed = ""
        self.not_ready = ""
        """Why nothing is promised for now, in words; empty = promises are made. `look` keeps it up to date."""

    def take(self, pages: int, prefix: Prefix, prompt_tokens: int) -> int:
        """Promise so many pages of the pool, less those of the prefix that are cached, which are read from now on.

        Returns how many are promised; all `pages` count against the limit, whoever else reads some. ResourceExhausted
        with a retry hint when there are none now, InvalidArgument when there never will be, RoleClosed while closed.
        """
        self.look()
        if self._closed:
            raise RoleClosed(f"worker {self._worker_id} takes no answers, as it {self._closed}; ask another one")
        if pages > self._limit:
            raise InvalidArgument(
                "max_tokens",
                f"prompt and answer need {pages} KV pages and worker {self._worker_id} has {self._limit};"
                " ask for fewer tokens",
            )
        if self.not_ready:
            raise self._come_back(f"worker {self._worker_id} promises nothing for now: {self.not_ready}")
        full = f"worker {self._worker_id} has no KV pages left to promise; come back later"
        if self.committed + pages > self._limit:
            raise self._come_back(full)
        try:
            promised = self._cache.promise(prefix, pages, prompt_tokens)
        except ResourceExhausted:
            raise self._come_back(full) from None
        self.committed += pages
        return promised

    def give_back(self, pages: int, promised: int) -> None:
        """A request with so many pages is over; `promised` of them were never taken from the pool. What it reads is
        the caller's to let go.
        """
        self._pool.unpromise(promised)
        self.committed -= pages

    def close(self, why: str) -> None:
        """Promise nothing until `open`."""
        self._closed = why

    def open(self) -> None:
        """Make promises."""
        self._closed = ""

    def limit(self, max_pages: int | None) -> None:
        """Promise so many pages at most from now on, None = the whole pool; what is promised already stays so."""
        self._limit = self._pool.counts().total if max_pages is None else max_pages

    def look(self) -> None:
        """See how much lies in quarantine; what changes is logged once.

        `not_ready` is announced to the whole cluster whenever it changes, so it has no counts and does not flicker.
        """
        quarantined = self._pool.counts().quarantined
        allowed = self._config.quarantine_share_max * self._limit * (READY_AGAIN if self.not_ready else 1.0)
        if quarantined <= allowed:
            if self.not_ready:
                log.warning("%s is ready again: %d KV pages are left in quarantine", self._worker_id, quarantined)
            self.not_ready = ""
            return
        writers = ", ".join(self._leases.silent_writers()) or "prefill workers"
        was_ready = not self.not_ready
        self.not_ready = (
            f"too many of its {self._limit} KV pages are in quarantine, as {writers} may still write to them;"
            " they are free once those workers answer or have ended: look at them, or restart them"
        )
        if was_ready:
            log.error("%s is not ready (%d KV pages lost): %s", self._worker_id, quarantined, self.not_ready)

    def _come_back(self, message: str) -> ResourceExhausted:
        return ResourceExhausted(message, retry_after_s=self._config.retry_after_s)
