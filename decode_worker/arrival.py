"""Whether what arrived is what was reserved: the stamp of a notice, and the bytes of the pages it chose."""

import logging
from collections.abc import Callable

from decode_worker.request import DecodeRequest
from kv_transfer.checksums import PageChecks
from wire.ending import reason_to_end
from wire.logs import about
from wire.messages import ModelFacts, PeerRef, TransferNotice

log = logging.getLogger(__name__)


class ArrivalCheck:
    """Judges notices, and counts. The admission decides what becomes of a request."""

    def __init__(self, me: PeerRef, model: ModelFacts, checks: PageChecks | None) -> None:
        """Without `checks`, notices carry no checksums and pages are taken as they come."""
        self._me = me
        self._model = model
        self._checks = checks
        self.stamps_refused = 0
        self.checksums_equal = 0
        self.checksum_failures = 0

    @property
    def refused(self) -> int:
        """Notices that did not fit, and transfers whose bytes were not those sent."""
        return self.stamps_refused + self.checksum_failures

    def stamp_problem(self, request: DecodeRequest, notice: TransferNotice) -> str:
        """What of a notice does not fit the reservation; empty when all does. At once, under the admission's lock."""
        problem = self._stamp_problem(request, notice)
        self.stamps_refused += bool(problem)
        return problem

    def check_bytes(self, request: DecodeRequest, notice: TransferNotice, on_result: Callable[[str], None]) -> bool:
        """Compare the checksums of a notice without a `stamp_problem` with the request's pages, in the background.

        False when there is nothing to compare. Else `on_result` hears, on another thread, what is wrong with the
        pages, empty = nothing; until then nobody may write to them.
        """
        if self._checks is None or not notice.checksums:
            return False

        def hear(problem: str) -> None:
            self._count(request, notice, problem)
            on_result(problem)

        self._checks.compare(request.pages, notice.checksums, _tokens_of(request), hear)
        return True

    def _stamp_problem(self, request: DecodeRequest, notice: TransferNotice) -> str:
        reservation = request.reservation
        if notice.pages != request.prompt_pages:
            return f"{notice.pages} pages instead of {request.prompt_pages}"
        if notice.skipped != request.skipped:
            return f"{notice.skipped} pages left out instead of {request.skipped}"
        if notice.token_hash != request.token_hash:
            return "the hash of another prompt"
        index = reservation.answered
        if reason_to_end(notice.first_token_id, index, request.prompt_tokens, reservation.sampling, self._model):
            return "a first token that ends the answer"
        if tuple(each.page for each in notice.checksums) != self._chosen(request, notice):
            return f"{len(notice.checksums)} checksums, or those of other pages than were agreed on"
        return ""

    def _chosen(self, request: DecodeRequest, notice: TransferNotice) -> tuple[int, ...]:
        """A prompt that was computed here, in these very pages, travelled nowhere."""
        if self._checks is None or notice.prefill == self._me:
            return ()
        return self._checks.chosen(notice.lease, _tokens_of(request), request.skipped)

    def _count(self, request: DecodeRequest, notice: TransferNotice, problem: str) -> None:
        """On the checks' thread, the only one that counts these."""
        if not problem:
            self.checksums_equal += len(notice.checksums)
            return
        self.checksum_failures += 1
        log.error(
            "KV of request %s, attempt %d, from %s (incarnation %d) is not what was sent: %s",
            request.reservation.ref.request_id,
            request.reservation.ref.attempt,
            notice.prefill.worker_id,
            notice.prefill.incarnation,
            problem,
            extra=about(request.reservation.ref.request_id),
        )


def _tokens_of(request: DecodeRequest) -> int:
    """Token positions that were prefilled."""
    return len(request.reservation.prompt_token_ids)
