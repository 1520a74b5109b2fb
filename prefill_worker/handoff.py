"""The transfer of a prompt's KV to the decode worker: one coroutine per request, on the event loop.

1. connect      while the request waits for its first chunk
2. allocate     once the first chunk is computed or found in the cache, the decode worker allocates the reserved pages
                of the lease. Its reply says how many of the prompt's leading pages it already has, and for how long the
                others may be written (`write_window.py`). One message renews the windows of several prompts
3. write        the full pages of finished chunks are written while the next chunk is computed; of groups with a
                sliding window, only the pages that the first decode step attends to are written
4. notice       is sent with the last page, and the transport holds it until all other pages have landed. It has the
                first token, the index of the next random number, the hash of the prompt, its page counts, and checksums
                of some pages; computing a checksum begins when its page is final (`page_writes.py`). The notice is sent
                with a page because NIXL reports how a write ends, but not whether a notice on its own has arrived
5. free         in any case, the pages are freed only when the engine has released them and every write has ended
6. release      a lease without a delivered notice is released; this is repeated until the decode worker confirms it.
                The call says whether a write failed: if none did, the lease's pages need no quarantine
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

from kv_transfer.base import Sender
from kv_transfer.checksums import PageChecks
from prefill_worker.decode_peers import DecodePeers, LocalDecode
from prefill_worker.notice import make_notice
from prefill_worker.page_writes import OutgoingChecksums, OutgoingWrites, SentPages, WritingTime
from prefill_worker.request import PrefillRequest
from prefill_worker.write_window import WindowRenewals, WriteWindow
from tandem.logging.logs import about
from tandem.protocol.ending import failure_event
from tandem.protocol.errors import Internal, StaleEpoch, TandemError, TransferFailed
from tandem.protocol.kv_pages import KvPages
from tandem.protocol.lifecycle.events import TransferStats
from tandem.protocol.messages import (
    Destination,
    PageChecksum,
    PeerRef,
    RequestEvent,
    RoutedEvent,
    TransferNotice,
    hash_token_ids,
)

log = logging.getLogger(__name__)

FIRST_RETRY_S, LAST_RETRY_S = 0.1, 5.0
"""The first and the maximum wait between two attempts to release a lease, in seconds; the wait doubles."""


class PrefillSchedulerView(Protocol):
    """The interface of the prefill scheduler that a hand-over uses."""

    def withdraw(self, request: PrefillRequest) -> None:
        """Stop computing chunks of this request."""
        ...

    def transfer_outlives_request(self, request: PrefillRequest) -> None:
        """Record that a request has ended while its writes continue. Its pages count as lost until `free` is called."""
        ...

    def free(self, request: PrefillRequest) -> None:
        """Free the pages of a request. The engine must have released it, and no write may read its pages."""
        ...


class Handoff:
    """The hand-over of one request: delivers the KV or aborts, and frees the pages after their last use.

    Started by the prefill scheduler; runs on the event loop.
    """

    def __init__(
        self,
        *,
        request: PrefillRequest,
        scheduler: PrefillSchedulerView,
        me: PeerRef,
        kv: KvPages,
        sender: Sender,
        backend: str,
        peers: DecodePeers,
        renewals: WindowRenewals,
        local: LocalDecode,
        emit: Callable[[RoutedEvent], None],
        deadline_s: float,
        writing: WritingTime,
        checks: PageChecks | None = None,
    ) -> None:
        self._request = request
        self._scheduler = scheduler
        self._me = me
        self._kv = kv
        self._backend = backend
        self._peers = peers
        self._renewals = renewals
        self._local = local
        self._emit = emit
        self._deadline_s = deadline_s
        self._checks = checks
        self._writes = OutgoingWrites(sender, deadline_s, writing)
        self._skipped = 0
        self._sent: list[int] = []
        """The indices, in the request's page list, of the pages to send (`KvPages.sent`)."""
        self._aborted = False
        self._delivered = False
        self._delivery = asyncio.ensure_future(self._deliver())
        self.ended = asyncio.ensure_future(self._run())

    def abort(self) -> None:
        """Abort the request without an event.

        `ended` completes when its pages and its lease are released. Idempotent.
        """
        self._aborted = True
        self._delivery.cancel()

    async def _run(self) -> None:
        await asyncio.wait([self._delivery])
        error = _failure_of(self._delivery)
        try:
            if error is not None and not self._aborted:
                request_id = self._request.task.ref.request_id
                log.warning("request %s failed: %s", request_id, error.message, extra=about(request_id))
                self._emit_event(failure_event(self._request.task.ref, error))
        finally:
            await self._end()

    async def _end(self) -> None:
        try:
            await self._complete_writes()
        except Exception:
            # This error may lose pages of this worker. It must not lose the pages of the lease, which wait only for the
            # writes.
            await self._writes.quiescent()
            await self._return_undelivered_lease()
            raise
        await self._return_undelivered_lease()

    async def _complete_writes(self) -> None:
        self._scheduler.withdraw(self._request)
        await self._request.progress.until_released()
        if self._writes.in_progress:
            self._scheduler.transfer_outlives_request(self._request)
        await self._writes.quiescent()
        self._scheduler.free(self._request)

    async def _return_undelivered_lease(self) -> None:
        destination = self._request.task.destination
        if destination is not None and not self._delivered:
            await return_lease(self._request.task.ref.request_id, partial(self._release, destination))

    async def _release(self, destination: Destination) -> None:
        if self._request.local:
            self._local.release(destination.lease, self._me)
        else:
            await self._peers.release(destination, in_doubt=self._writes.in_doubt)

    # ---- delivery, if nothing fails ----

    async def _deliver(self) -> None:
        progress, destination = self._request.progress, self._request.task.destination
        if destination is None:
            await progress.until_released()
        elif self._request.local:
            await progress.until_released()
            # The scheduler has notified the decode phase, which owns the pages, unless that failed.
            self._delivered = self._may_continue() and progress.failure is None
        else:
            await self._deliver_there(destination)
        if progress.failure is not None:
            raise progress.failure

    async def _deliver_there(self, destination: Destination) -> None:
        progress = self._request.progress
        await self._peers.connect(destination)
        await progress.beyond(0)
        if progress.released and not self._may_continue():
            return
        needed = self._request.pages_needed
        with WriteWindow(self._peers, self._renewals, destination, needed) as window:
            await self._write(destination, window, needed)
        if self._delivered:
            self._peers.delivered(destination)
            event_times = self._writes.event_times()
            self._emit_event(RequestEvent(self._request.task.ref, event_times=event_times, transfer=self._stats()))

    async def _write(self, destination: Destination, window: WriteWindow, needed: int) -> None:
        """Write all pages, the last one together with the notice, and set `_delivered` when they have landed.

        If there is no first token, or if the answer ends with it, no notice is sent and `_delivered` stays False.
        """
        remote, tokens = await window.pages(), self._request.prompt_tokens
        skipped = self._kv.skipped(tokens, len(remote))
        if skipped is None:
            raise Internal(f"{destination.peer.worker_id} allotted {len(remote)} pages for {tokens} tokens")
        self._skipped, self._sent = skipped, self._kv.sent(tokens, skipped)
        checksums = OutgoingChecksums(self._checks, destination.lease, self._request.prompt_tokens, self._skipped)
        # Hashing takes long, so it is done while chunks are computed.
        token_hash = hash_token_ids(self._request.task.prompt_token_ids)
        out = SentPages(self._writes, window, self._kv, self._sent)
        sent = await self._write_while_computing(out, checksums)
        if not self._may_continue():
            return
        # The last page is written last, because the notice is sent with it.
        last = needed - 1
        self._writes.last_chunk_ended()
        if sent < last:
            await out.post(self._request.pages, sent, last)
        checksums.begin(self._request.pages, sent * self._kv.groups, needed * self._kv.groups)
        notice = self._notice(token_hash, await checksums.all(self._deadline_s))
        await out.post(self._request.pages, last, needed, notice)
        await self._writes.completed()
        self._delivered = True

    async def _write_while_computing(self, out: SentPages, checksums: OutgoingChecksums) -> int:
        """Write full pages as chunks finish, until the engine releases the request.

        Returns the number of leading pages of the prompt that were posted or need not be written.
        """
        progress, sent = self._request.progress, self._skipped
        while not progress.released:
            self._writes.raise_failed()  # a prompt that cannot be delivered need not be computed to its end
            computed = progress.computed_tokens
            full = computed // self._kv.page_tokens
            if full > sent:
                await out.post(self._request.pages, sent, full)
                checksums.begin(self._request.pages, sent * self._kv.groups, full * self._kv.groups)
                sent = full
            await progress.beyond(computed)
        return sent

    def _may_continue(self) -> bool:
        """Return True if there is a first token and the answer does not end with it."""
        progress = self._request.progress
        return progress.first_token_id is not None and progress.finish_reason is None

    def _notice(self, token_hash: bytes, checksums: tuple[PageChecksum, ...]) -> TransferNotice:
        first_token_id = self._request.progress.first_token_id
        if first_token_id is None:
            raise Internal(f"{self._request.task.ref.request_id} has no first token to hand over")
        return make_notice(
            self._request, self._me, first_token_id, token_hash=token_hash, skipped=self._skipped, checksums=checksums
        )

    def _stats(self) -> TransferStats:
        moved, nanos = self._writes.moved()
        return TransferStats(moved, len(self._sent), self._backend, nanos)

    def _emit_event(self, event: RequestEvent) -> None:
        self._emit(RoutedEvent(self._request.task.router_id, event))


async def return_lease(request_id: str, release: Callable[[], Awaitable[None]]) -> None:
    """Release a lease on the worker that granted it, repeatedly until that worker confirms.

    As long as this process lives, nothing else ends the quarantine of the pages on that worker.
    """
    wait_s = FIRST_RETRY_S
    while True:
        try:
            await release()
            return
        except StaleEpoch as error:
            log.info("lease of %s was over already: %s", request_id, error.message, extra=about(request_id))
            return
        except TandemError as error:
            again = "lease of %s is given back again in %.1f s: %s"
            log.info(again, request_id, wait_s, error.message, extra=about(request_id))
        except Exception:
            again = "lease of %s is given back again in %.1f s"
            log.exception(again, request_id, wait_s, extra=about(request_id))
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, LAST_RETRY_S)


def _failure_of(delivery: asyncio.Future[None]) -> TandemError | None:
    """Return the error that ended the delivery, for the router; None if the delivery succeeded.

    A TandemError is returned unchanged; any other exception becomes TransferFailed.
    """
    if delivery.cancelled():
        return TransferFailed("the connection to the decode worker was dropped; prefill again elsewhere")
    error = delivery.exception()
    if error is None or isinstance(error, TandemError):
        return error
    log.error("a handoff failed unexpectedly", exc_info=error)
    return TransferFailed(f"the hand-over ended with an unexpected {type(error).__name__}; the worker's log has more")
