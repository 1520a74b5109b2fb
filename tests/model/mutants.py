"""Mutants of the cluster, each without one of its fences; the model must detect every mutant.

A mutant is a function that patches the code under test. Its docstring says how the patched cluster behaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

import kv_transfer.in_memory
from decode_worker.admission import DecodeAdmission
from decode_worker.drafting_batch import DraftingBatch
from decode_worker.drafts import RowDrafts, StepDrafts
from decode_worker.request import DecodeRequest, Stage
from decode_worker.requests import DecodeRequests
from decode_worker.running_batch import RunningBatch
from kv_transfer.fence import OutstandingWrites
from kv_transfer.in_memory import InMemoryTransport
from kv_transfer.lease import LeaseTable
from kv_transfer.lease_change import LeaseChange, PageAction
from prefill_worker.handoff import Handoff
from prefill_worker.page_writes import OutgoingWrites
from prefill_worker.prompt_pages import PromptPages
from prefill_worker.request import PrefillRequest
from prefill_worker.scheduler import PrefillScheduler
from tandem.engine.cache.prefix_cache import Prefix, PrefixCache
from tandem.protocol.errors import TransferFailed
from tandem.protocol.messages import Lease, PeerRef, TransferNotice
from tandem.worker.peers.deliveries import Deliveries

Mutant = Callable[[pytest.MonkeyPatch], None]


def revoked_pages_are_free(patch: pytest.MonkeyPatch) -> None:
    """An abort or an expiry frees the pages of a lease instead of quarantining them."""

    def revoke(self: LeaseTable, entry: Any) -> LeaseChange:
        return self._end(entry, PageAction.NONE if entry.page_ids is None else PageAction.FREE)

    patch.setattr(LeaseTable, "_revoke", revoke)


def a_notice_counts_for_every_epoch(patch: pytest.MonkeyPatch) -> None:
    """A notice of an earlier attempt completes the lease that the request has now."""
    notice = DecodeAdmission.notice

    def take(self: DecodeAdmission, late: TransferNotice, pages: Sequence[int] = ()) -> None:
        for request in self._leased:
            if request.lease.request_id == late.lease.request_id and request.pages:
                late = replace(late, lease=request.lease, prefill=request.reservation.prefill)
                break
        notice(self, late, pages)

    patch.setattr(DecodeAdmission, "notice", take)


def an_aborted_request_is_admitted(patch: pytest.MonkeyPatch) -> None:
    """An abort that arrives while pages are being written is ignored."""
    abort = DecodeAdmission._abort

    def forget(self: DecodeAdmission, request: DecodeRequest) -> None:
        if request.stage is not Stage.LEASED or not request.pages:
            abort(self, request)

    patch.setattr(DecodeAdmission, "_abort", forget)


def dead_writers_are_quiescent_at_once(patch: pytest.MonkeyPatch) -> None:
    """Pages written by a dead process are free when its write window ends, without the additional grace period."""

    def is_safe(self: OutstandingWrites, now: float, _lives: object) -> bool:
        return self._grace_s is not None and now >= self._permitted_at + self._fence.window_s

    patch.setattr(OutstandingWrites, "is_safe", is_safe)


def writes_to_removed_peers_fail_at_once(patch: pytest.MonkeyPatch) -> None:
    """A write is reported as failed to its sender while its bytes are still in flight."""
    remove = InMemoryTransport.remove_peer

    def hasty(self: InMemoryTransport, peer: PeerRef) -> None:
        remove(self, peer)
        for posted in list(self._posted):
            if posted.peer_removed:
                posted.future.set_exception(TransferFailed("the peer was removed"))
                posted.future = Future()

    patch.setattr(InMemoryTransport, "remove_peer", hasty)


def deliveries_are_never_reported(patch: pytest.MonkeyPatch) -> None:
    """The prefill worker never reports delivered notices, so that lost notices are never recovered."""
    patch.setattr(Deliveries, "add", lambda *_: None)


def leases_are_released_before_writes_are_quiescent(patch: pytest.MonkeyPatch) -> None:
    """The prefill worker releases a lease, as if nothing were in flight, without waiting for its writes."""
    complete_writes = Handoff._complete_writes
    patch.setattr(OutgoingWrites, "in_doubt", False)

    async def hasty(self: Handoff) -> None:
        destination = self._request.task.destination
        if destination is not None and not self._delivered:
            await self._return_lease(destination)
        await complete_writes(self)

    patch.setattr(Handoff, "_complete_writes", hasty)


def a_release_is_never_in_doubt(patch: pytest.MonkeyPatch) -> None:
    """The decode worker frees the pages of a released lease although a write to them failed."""
    release = LeaseTable.release

    def trusting(self: LeaseTable, lease: Lease, prefill: PeerRef, *, in_doubt: bool) -> tuple[LeaseChange, ...]:
        return release(self, lease, prefill)

    patch.setattr(LeaseTable, "release", trusting)


def a_notice_overtakes_pages(patch: pytest.MonkeyPatch) -> None:
    """The last page, and with it the notice, does not wait for earlier writes."""
    patch.setattr(kv_transfer.in_memory, "hold", lambda _order, begin: begin(""))


def pages_are_freed_under_their_writes(patch: pytest.MonkeyPatch) -> None:
    """The prefill worker reuses its pages while writes still read from them."""

    async def complete_writes(self: Handoff) -> None:
        self._scheduler.withdraw(self._request)
        await self._request.progress.until_released()
        self._scheduler.free(self._request)
        await self._writes.quiescent()

    patch.setattr(Handoff, "_complete_writes", complete_writes)


def pages_are_freed_under_a_prefill_step(patch: pytest.MonkeyPatch) -> None:
    """A withdrawn prompt counts as released while a step is computing it."""
    withdraw = PrefillScheduler.withdraw

    def hasty(self: PrefillScheduler, request: PrefillRequest) -> None:
        withdraw(self, request)
        request.progress.release()

    patch.setattr(PrefillScheduler, "withdraw", hasty)


def pages_are_freed_under_a_decode_step(patch: pytest.MonkeyPatch) -> None:
    """A cancelled request leaves the batch, and its pages are freed, while a step writes to them."""

    def drained(self: RunningBatch) -> list[DecodeRequest]:
        return [slot.request for slot in self._stopped]

    patch.setattr(RunningBatch, "drained", drained)


def cached_pages_of_prefill_are_released_at_once(patch: pytest.MonkeyPatch) -> None:
    """Cached pages are released as soon as a prompt has found them."""
    take = PromptPages.take

    def hasty(self: PromptPages, request: PrefillRequest) -> bool:
        taken = take(self, request)
        self._cache.release(request.prefix)
        request.prefix.digests.clear()
        return taken

    patch.setattr(PromptPages, "take", hasty)


def pages_are_known_before_they_are_computed(patch: pytest.MonkeyPatch) -> None:
    """A prompt's pages are published in the prefix cache when they are allocated, before they are computed."""
    take = PromptPages.take

    def hasty(self: PromptPages, request: PrefillRequest) -> bool:
        taken = take(self, request)
        if taken:
            self.publish(request)
        return taken

    patch.setattr(PromptPages, "take", hasty)


def a_prompt_may_be_cached_to_its_end(patch: pytest.MonkeyPatch) -> None:
    """A prompt may be found in the prefix cache completely, so that no token is left to compute."""
    make = PrefixCache.prefix

    def prefix(self: PrefixCache, token_ids: Sequence[int], salt: str, *, reads: bool = True) -> Prefix:
        made = make(self, token_ids, salt, reads=reads)
        made.readable = len(made.digests)
        return made

    patch.setattr(PrefixCache, "prefix", prefix)


def cached_pages_of_decode_are_released_at_the_notice(patch: pytest.MonkeyPatch) -> None:
    """Pages found in the prefix cache are held only until the transferred pages have arrived."""
    adopt = DecodeRequests.adopt

    def hasty(self: DecodeRequests, request: DecodeRequest, check_until: float, pages: Sequence[int] = ()) -> None:
        adopt(self, request, check_until, pages)
        self._cache.release(request.prefix)
        request.prefix.digests.clear()

    patch.setattr(DecodeRequests, "adopt", hasty)


def wrong_drafts_count(patch: pytest.MonkeyPatch) -> None:
    """Tokens sampled after a rejected draft token are accepted as well."""

    def runs(self: StepDrafts, token_ids: Sequence[int]) -> list[tuple[RowDrafts, list[int]]]:
        runs_of = []
        for draft in self.drafts:
            rows = range(draft.first, draft.first + len(draft.token_ids))
            runs_of.append((draft, [token_ids[draft.row], *(token_ids[row] for row in rows)]))
        return runs_of

    patch.setattr(StepDrafts, "runs", runs)


def drafts_are_written_beyond_their_pages(patch: pytest.MonkeyPatch) -> None:
    """Draft tokens are written beyond the pages of their request."""
    patch.setattr(DraftingBatch, "positions_left", lambda _batch, _request: 7)


MUTANTS: dict[Mutant, str] = {
    wrong_drafts_count: "instead of|is inconsistent|a step",
    drafts_are_written_beyond_their_pages: "values to unpack|out of range|a step",
    revoked_pages_are_free: "lands in a page|a step",
    a_notice_counts_for_every_epoch: "lands in a page|a step|left for ever",
    an_aborted_request_is_admitted: "after it was aborted",
    dead_writers_are_quiescent_at_once: "lands in a page",
    writes_to_removed_peers_fail_at_once: "reads a page|a step",
    deliveries_are_never_reported: "left for ever",
    leases_are_released_before_writes_are_quiescent: "lands in a page|a step",
    a_release_is_never_in_doubt: "lands in a page",
    a_notice_overtakes_pages: "lands in a page|is not what was sent",
    pages_are_freed_under_their_writes: "reads a page|a step",
    pages_are_freed_under_a_prefill_step: "a step",
    pages_are_freed_under_a_decode_step: "a step",
    cached_pages_of_prefill_are_released_at_once: "a step|reads a page|left for ever",
    pages_are_known_before_they_are_computed: "a step",
    a_prompt_may_be_cached_to_its_end: "left for ever|allotted 0 pages|was not followed",
    cached_pages_of_decode_are_released_at_the_notice: "a step|inconsistent|does not own",
}
"""Each mutant, with a pattern of the error message that the model must report."""
