"""Prefixes that other workers send, from the grants of their leases to the indexing of their pages.

A worker that is about to compute a prompt may pull the first pages of it from a worker that has them. The transfer is
a hand-over without a request: the pages are advertised to a lease under which the other worker alone may write, the
notice says that they are complete, and if the lease ends otherwise, the lease table decides whether they are freed or
quarantined. Like a reload from a tier, a pull retains the cached pages of the prefix, owns the pages that have arrived,
indexes them, and leaves (`tandem/engine/cache/prefix_cache.py`).
"""

import itertools
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from kv_transfer.checksums import PageChecks
from kv_transfer.lease import LeaseTable
from kv_transfer.lease_change import LeaseChange, PageAction
from tandem.engine.cache.page_pool import PagePool
from tandem.engine.cache.prefix_cache import Prefix, PrefixCache
from tandem.engine.cache.tiers.tier import TierCounts
from tandem.protocol.errors import InvalidArgument, StaleEpoch, Unavailable
from tandem.protocol.kv_pages import FREED, held_pages
from tandem.protocol.messages import Lease, PeerRef, RequestRef, TransferNotice

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class PulledPrefix:
    """A prefix that `source` may send under `lease`."""

    lease: Lease
    source: PeerRef
    prefix: Prefix
    pages: list[int] = field(default_factory=list)
    """The pages of the prefix as in `KvPages`, with FREED for those that are not sent; empty until advertised."""
    held: int = 0
    """The number of leading digests whose pages are not sent, because they are cached here."""
    done: "Future[int]" = field(default_factory=Future)
    """Completes with the number of pages that have arrived and are indexed; 0 if the lease ends without them."""


class PulledPrefixes:
    """Keeps the leases of prefixes that other workers send, and moves their pages.

    Owned by the admission, which calls every method under its lock, except that checksums are compared on a thread.
    """

    def __init__(self, table: LeaseTable, cache: PrefixCache, checks: PageChecks | None) -> None:
        self._table = table
        self._cache = cache
        self._checks = checks
        self._by_epoch: dict[int, PulledPrefix] = {}
        self._numbers = itertools.count(1)
        self.counts = TierCounts()
        """Pages that were loaded from other workers, those that did not arrive as they were sent, and failed pulls."""

    def __contains__(self, lease: Lease) -> bool:
        return lease.epoch in self._by_epoch

    def grant(self, prefix: Prefix, source: PeerRef) -> PulledPrefix:
        """Grant `source` a lease for the pages of a prefix. Raises the errors of `LeaseTable.grant`."""
        lease = self._table.grant(RequestRef(f"kv-pull-{next(self._numbers)}", 1), source)
        self._by_epoch[lease.epoch] = pull = PulledPrefix(lease, source, prefix)
        return pull

    def allocate_pages(self, lease: Lease, digests: int, source: PeerRef) -> Sequence[int]:
        """Return the pages to which `source` may write the first `digests` digests, without those that are cached here.

        Raises StaleEpoch if the lease has ended or nothing is left to send, InvalidArgument if the prefix has fewer
        digests, ResourceExhausted if too few pages are free.
        """
        given = self._table.permit(lease, source)
        if given is not None:
            return given
        pull = self._by_epoch[lease.epoch]
        if not 1 <= digests <= len(pull.prefix.digests):
            raise InvalidArgument("pages", f"{digests} requested, the prefix has {len(pull.prefix.digests)}")
        pull.pages, pull.held = self._cache.begin_pull(lease, pull.prefix, digests)
        pages = held_pages(pull.pages)
        if not pages:
            self._cache.release(pull.prefix)
            raise StaleEpoch(f"the pages of {lease.request_id} are cached here by now; send none")
        self._table.advertise(lease, source, pages)
        return pages

    def arrive(self, change: LeaseChange, notice: TransferNotice) -> None:
        """Check the pages of a lease whose notice has arrived, on the checksum thread, and index them."""
        pull = self._by_epoch.pop(change.lease.epoch)
        owner = RequestRef(pull.lease.request_id, pull.lease.attempt)
        self._cache.pool.adopt(pull.lease, owner)
        problem = self._notice_problem(pull, notice)
        if not problem and self._checks is not None and notice.checksums:
            try:
                tokens = notice.pages * self._cache.page_tokens
                self._checks.compare(pull.pages, notice.checksums, tokens, partial(self._complete, pull, owner))
                return
            except Unavailable as error:
                problem = f"pages that could not be checked ({error.message})"
        self._complete(pull, owner, problem)

    def end(self, change: LeaseChange) -> None:
        """Free or quarantine the pages of a lease that has ended without its notice."""
        pull = self._by_epoch.pop(change.lease.epoch)
        free_or_quarantine(self._cache.pool, change, quarantined=False)
        self._cache.release(pull.prefix)
        self.counts.failures += 1
        pull.done.set_result(0)

    def _notice_problem(self, pull: PulledPrefix, notice: TransferNotice) -> str:
        digests = len(pull.pages) // self._cache.kv.groups
        if (notice.pages, notice.skipped) != (digests, pull.held):
            return f"pages {notice.skipped} to {notice.pages} instead of {pull.held} to {digests}"
        if notice.token_hash != pull.prefix.digests[digests - 1]:
            return "the digest of another prefix"
        tokens = digests * self._cache.page_tokens
        chosen = () if self._checks is None else self._checks.chosen(notice.lease, tokens, pull.held)
        if tuple(checksum.page for checksum in notice.checksums) != chosen:
            return f"{len(notice.checksums)} checksums, or those of other pages than were agreed on"
        return ""

    def _complete(self, pull: PulledPrefix, owner: RequestRef, problem: str) -> None:
        """Index the pages, or free them if there is a `problem`."""
        entries = [entry for entry, page in enumerate(pull.pages) if page != FREED]
        if problem:
            log.error("the prefix from %s has %s; its tokens are computed", pull.source.worker_id, problem)
            self.counts.corrupt_pages += len(entries)
        else:
            self.counts.loaded_pages += len(entries)
        try:
            self._cache.complete_reload(owner, pull.prefix, pull.pages, entries if problem else ())
        finally:
            pull.done.set_result(0 if problem else len(entries))


def free_or_quarantine(pool: PagePool, change: LeaseChange, *, quarantined: bool) -> None:
    """Free or quarantine the pages of a lease as the lease table has decided; `quarantined`: they are by now."""
    if change.action is PageAction.QUARANTINE:
        pool.quarantine(change.lease)
    elif change.action is PageAction.FREE and quarantined:
        pool.free_quarantined(change.lease)
    elif change.action is PageAction.FREE:
        pool.free_lease(change.lease)
