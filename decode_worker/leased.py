"""Requests whose KV has not come: from the promise of pages to the end of the lease.

A lease ends with the arrival of the KV, or in any other way that the lease table knows of.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence

from decode_worker.page_budget import PageBudget
from decode_worker.request import DecodeRequest
from decode_worker.requests import DecodeRequests
from engine.cache.prefix_cache import Prefix, PrefixCache
from kv_transfer.lease import LeaseTable
from kv_transfer.lease_change import LeaseChange, PageAction
from wire.ending import pages_for
from wire.errors import InvalidArgument, TandemError
from wire.messages import Lease, PeerRef, Reservation, hash_token_ids

log = logging.getLogger(__name__)


class LeasedRequests:
    """Does with requests and pages what the lease table says.

    Every call under its owner's lock, so that these are exactly the requests whose lease the table holds and has not
    revoked.
    """

    def __init__(self, table: LeaseTable, cache: PrefixCache, budget: PageBudget, requests: DecodeRequests) -> None:
        self._table = table
        self._cache = cache
        self._pool = cache.pool
        self._page_tokens = cache.page_tokens
        self._budget = budget
        self._requests = requests
        self._by_epoch: dict[int, DecodeRequest] = {}

    def __iter__(self) -> Iterator[DecodeRequest]:
        return iter(self._by_epoch.values())

    def grant(self, reservation: Reservation, prefix: Prefix) -> DecodeRequest:
        """Make a request with a lease and a promise of pages beside the cached pages of `prefix`.

        It fails as `PageBudget.promise` and `LeaseTable.grant` do, and has taken nothing then.
        """
        pages, promised = self._budget.promise(reservation, prefix)
        prompt_pages, skipped = pages_for(len(reservation.prompt_token_ids), self._page_tokens), len(prefix.pages)
        try:
            lease = self._table.grant(reservation.ref, reservation.prefill)
        except TandemError:
            self._cache.let_go(prefix)
            self._budget.withdraw(pages, promised, prompt_pages, skipped)
            raise
        token_hash = hash_token_ids(reservation.prompt_token_ids)
        request = DecodeRequest(reservation, lease, prompt_pages, pages, promised, token_hash, prefix, skipped)
        self._by_epoch[lease.epoch] = request
        self._requests.add(request)
        return request

    def allot(self, lease: Lease, pages: int, prefill: PeerRef) -> Sequence[int]:
        """See `DecodeAdmission.allot`."""
        given = self._table.permit(lease, prefill)
        if given is not None:
            return given
        request = self._by_epoch[lease.epoch]
        if pages != request.prompt_pages:
            raise InvalidArgument("pages", f"{pages} asked for, the prompt of this lease fills {request.prompt_pages}")
        missing = self._pool.advertise(lease, pages - request.skipped)
        request.pages = [*request.prefix.pages, *missing]
        self._budget.spend_on_prompt(request, len(missing))
        self._table.advertise(lease, prefill, missing)
        return tuple(missing)

    def settle(self, change: LeaseChange) -> DecodeRequest | None:
        """Whose KV has arrived, by what the table says of a notice; it is leased no more.

        None if it was over before, and its pages only waited for the end of the writes.
        """
        if change.action is PageAction.ADMIT:
            return self._by_epoch.pop(change.lease.epoch)
        self.follow(change, None)
        return None

    def revoke(self, request: DecodeRequest) -> None:
        """End a request whose KV has not come; no event is sent."""
        self.follow(self._table.revoke(request.lease), None)

    def follow_all(self, changes: Iterable[LeaseChange], failure: TandemError) -> None:
        """One that cannot be followed keeps no other from it: the table has forgotten them all."""
        for change in changes:
            try:
                self.follow(change, failure)
            except Exception:
                log.exception("the end of %s was not followed", change.lease)

    def follow(self, change: LeaseChange, failure: TandemError | None) -> None:
        """Do with the pages what the lease table says; a request that was alive is over, its router hears `failure`."""
        request = self._by_epoch.pop(change.lease.epoch, None)
        if change.action is PageAction.QUARANTINE:
            self._pool.quarantine(change.lease)
        elif change.action is PageAction.FREE and request is not None:
            self._pool.free_lease(change.lease)
        elif change.action is PageAction.FREE:
            self._pool.free_quarantined(change.lease)
        if request is not None:
            self._requests.end(request, failure)
