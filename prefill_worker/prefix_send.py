"""The transfer of a cached prefix to a worker that pulls it: a hand-over of pages that are computed already.

The pages are retained in the prefix cache until every write has ended. The other worker has granted a lease; it
allocates the pages, permits the writes, checks the notice and the checksums, and quarantines pages in doubt, all as for
a prompt that is handed over (`prefill_worker/handoff.py`).
"""

import asyncio
import logging
from functools import partial

from kv_transfer.base import Sender
from kv_transfer.checksums import PageChecks
from prefill_worker.decode_peers import DecodePeers
from prefill_worker.handoff import return_lease
from prefill_worker.page_writes import OutgoingChecksums, OutgoingWrites, SentPages, WritingTime
from prefill_worker.write_window import WindowRenewals, WriteWindow
from tandem.engine.cache.prefix_cache import Prefix, PrefixCache
from tandem.protocol.errors import Internal, NotFound, TandemError
from tandem.protocol.messages import PeerRef, PrefixPull, TransferNotice

log = logging.getLogger(__name__)


class PrefixSend:
    """The transfer of one prefix. It begins at once and frees what it holds; runs on the event loop."""

    def __init__(
        self,
        pull: PrefixPull,
        *,
        me: PeerRef,
        cache: PrefixCache,
        sender: Sender,
        peers: DecodePeers,
        renewals: WindowRenewals,
        deadline_s: float,
        writing: WritingTime,
        checks: PageChecks | None,
    ) -> None:
        """Retain the pages and begin. Raises NotFound if this worker has no page that the other one lacks."""
        self._pull = pull
        self._me = me
        self._cache = cache
        self._peers = peers
        self._renewals = renewals
        self._deadline_s = deadline_s
        self._checks = checks
        self._prefix = Prefix(b"", list(pull.digests), len(pull.digests))
        self._writes = OutgoingWrites(sender, deadline_s, writing)
        self.digests = cache.hold(self._prefix)
        """The number of leading digests that are sent, or are held by the other worker."""
        if self.digests <= pull.held:
            cache.release(self._prefix)
            raise NotFound(f"{me.worker_id} has no further pages of this prefix; compute its tokens")
        self.ended = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        destination, delivered = self._pull.destination, False
        try:
            await self._send()
            delivered = True
            self._peers.delivered(destination)
        except TandemError as error:
            log.info("a prefix was not sent to %s: %s", destination.peer.worker_id, error.message)
        except Exception:
            log.exception("a prefix was not sent to %s", destination.peer.worker_id)
        finally:
            await self._writes.quiescent()
            self._cache.release(self._prefix)
            if not delivered:
                release = partial(self._peers.release, destination, in_doubt=self._writes.in_doubt)
                await return_lease(destination.lease.request_id, release)

    async def _send(self) -> None:
        kv, destination, numbers, pages = self._cache.kv, self._pull.destination, self.digests, self._prefix.pages
        tokens = numbers * kv.page_tokens
        await self._peers.connect(destination)
        with WriteWindow(self._peers, self._renewals, destination, numbers) as window:
            remote = await window.pages()
            skipped = kv.skipped(tokens, len(remote))
            if skipped is None:
                raise Internal(f"{destination.peer.worker_id} allotted {len(remote)} pages for {tokens} tokens")
            out = SentPages(self._writes, window, kv, kv.sent(tokens, skipped))
            checksums = OutgoingChecksums(self._checks, destination.lease, tokens, skipped)
            checksums.begin(pages, skipped * kv.groups, numbers * kv.groups)
            if skipped < numbers - 1:
                await out.post(pages, skipped, numbers - 1)
            notice = TransferNotice(
                lease=destination.lease,
                prefill=self._me,
                token_hash=self._prefix.digests[numbers - 1],
                pages=numbers,
                first_token_id=0,
                next_draw=0,
                checksums=await checksums.all(self._deadline_s),
                skipped=skipped,
            )
            await out.post(pages, numbers - 1, numbers, notice)
            await self._writes.completed()
