"""Requests with a lease whose KV has not arrived, from their reservation to the end of the lease.

The leases of prefixes that are pulled (`pulled_prefixes.py`) are in the same table; this module passes them on.

A lease ends when the KV arrives, or in one of the other ways that the lease table lists (`kv_transfer/lease.py`).
"""

import logging
from collections.abc import Iterable, Iterator, Sequence

from decode_worker.page_budget import PageBudget
from decode_worker.pulled_prefixes import PulledPrefixes, free_or_quarantine
from decode_worker.request import DecodeRequest
from decode_worker.requests import DecodeRequests
from kv_transfer.lease import LeaseTable
from kv_transfer.lease_change import LeaseChange, PageAction
from tandem.engine.cache.prefix_cache import Prefix, PrefixCache
from tandem.protocol.errors import InvalidArgument, TandemError
from tandem.protocol.messages import Lease, PeerRef, Reservation, hash_token_ids

log = logging.getLogger(__name__)


class LeasedRequests:
    """Keeps the requests that have a lease, and applies the lease table's decisions to requests and pages.

    Owned by the admission, which calls every method under its lock. Outside the lock, the requests are exactly those
    whose leases are in the table and not revoked.
    """

    def __init__(
        self,
        me: PeerRef,
        table: LeaseTable,
        cache: PrefixCache,
        budget: PageBudget,
        requests: DecodeRequests,
        *,
        pulled: PulledPrefixes,
    ) -> None:
        self._me = me
        self._table = table
        self._cache = cache
        self._pool = cache.pool
        self._kv = cache.kv
        self._budget = budget
        self._requests = requests
        self._pulled = pulled
        self._by_epoch: dict[int, DecodeRequest] = {}

    def __iter__(self) -> Iterator[DecodeRequest]:
        return iter(self._by_epoch.values())

    def check_accepts(self, reservation: Reservation) -> None:
        """Raise the errors of `PageBudget.check_accepts`."""
        self._budget.check_accepts(reservation, local=reservation.prefill == self._me)

    def grant(self, reservation: Reservation, prefix: Prefix, adapter: int) -> DecodeRequest:
        """Create a request with a lease, the cached pages of `prefix`, and reserved pages for the rest.

        Raises the errors of `PageBudget.reserve` and `LeaseTable.grant`, after which nothing is reserved.
        """
        local, tokens = reservation.prefill == self._me, len(reservation.prompt_token_ids)
        pages, reserved = self._budget.reserve(reservation, prefix, local=local)
        held = prefix.held
        try:
            lease = self._table.grant(reservation.ref, reservation.prefill)
        except TandemError:
            self._cache.release(prefix)
            self._budget.cancel_reservation(pages, reserved)
            raise
        token_hash = hash_token_ids(reservation.prompt_token_ids)
        if local:
            skipped, lease_pages = prefix.known, self._kv.held(tokens) - held
        else:
            sent = self._kv.sent(tokens, prefix.known)
            skipped = sent[0] // self._kv.groups if sent else self._kv.numbers(tokens)
            lease_pages = len(sent)
        request = DecodeRequest(
            reservation,
            lease,
            self._kv.numbers(tokens),
            pages,
            reserved,
            token_hash,
            prefix,
            skipped,
            lease_pages=lease_pages,
            held=lease_pages + held,
            adapter=adapter,
        )
        self._budget.add_lease(request)
        self._by_epoch[lease.epoch] = request
        self._requests.add(request)
        return request

    def allocate_pages(self, lease: Lease, pages: int, prefill: PeerRef) -> Sequence[int]:
        """Return the pages of the lease to which `prefill` may write (`DecodeAdmission.allocate_pages`)."""
        if lease in self._pulled:
            return self._pulled.allocate_pages(lease, pages, prefill)
        given = self._table.permit(lease, prefill)
        if given is not None:
            return given
        request = self._by_epoch[lease.epoch]
        if pages != request.prompt_pages:
            raise InvalidArgument("pages", f"{pages} requested, the prompt of this lease fills {request.prompt_pages}")
        # For a local prompt, pages of groups with a window are taken chunk by chunk.
        here = self._kv.full_groups * (pages - request.skipped)
        count = here if prefill == self._me else request.lease_pages
        return self._advertise(request, self._budget.spend_on_lease(request, count))

    def cached_pages(self, lease: Lease) -> int:
        """Return the number of cached leading pages of a local prompt (`DecodeAdmission.cached_pages`)."""
        self._table.permit(lease, self._me)
        return self._by_epoch[lease.epoch].skipped

    def allocate_chunk_pages(self, lease: Lease, pages: int, position: int, prefill: PeerRef) -> Sequence[int]:
        """Return more pages of a local prompt's lease (`DecodeAdmission.allocate_chunk_pages`)."""
        self._table.permit(lease, prefill)
        request = self._by_epoch[lease.epoch]
        self._budget.retire_read(request, position)
        return self._advertise(request, self._budget.spend_on_chunk(request, pages))

    def _advertise(self, request: DecodeRequest, count: int) -> tuple[int, ...]:
        """Take `count` pages from the pool for the request's lease, and add them to the lease in the lease table."""
        pages, prefill = self._pool.advertise(request.lease, count), request.reservation.prefill
        if pages and self._table.permit(request.lease, prefill) is None:
            self._table.advertise(request.lease, prefill, pages)
        request.pages += pages
        return tuple(pages)

    def complete(self, change: LeaseChange) -> DecodeRequest | None:
        """Return the request whose KV has arrived, given the lease table's decision on a notice.

        The request has no lease afterwards. Returns None if the request had already ended and its quarantined pages
        waited only for the end of the writes.
        """
        if change.action is PageAction.ADMIT:
            return self._by_epoch.pop(change.lease.epoch)
        self.apply(change, None)
        return None

    def revoke(self, request: DecodeRequest) -> None:
        """End a request whose KV has not arrived, and its lease. No event is sent."""
        self.apply(self._table.revoke(request.lease), None)

    def apply_all(self, changes: Iterable[LeaseChange], failure: TandemError) -> None:
        """Apply all changes, even if one of them raises an exception, which is logged.

        The table has already dropped these leases, so a change that is left out would never be made.
        """
        for change in changes:
            try:
                self.apply(change, failure)
            except Exception:
                log.exception("the end of %s was not followed", change.lease)

    def apply(self, change: LeaseChange, failure: TandemError | None) -> None:
        """Apply a decision of the lease table: quarantine or free the pages of the lease.

        A request that still has the lease ends with `failure`.
        """
        if change.lease in self._pulled:
            self._pulled.end(change)
            return
        request = self._by_epoch.pop(change.lease.epoch, None)
        free_or_quarantine(self._pool, change, quarantined=request is None)
        if request is not None:
            self._requests.end(request, failure)
