"""Checks the KV of a prompt that has arrived on the decode worker.

The notice and the checksums are compared with the reservation; then the request becomes ready or fails.
"""

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial

from decode_worker.request import DecodeRequest, Stage
from decode_worker.requests import DecodeRequests
from kv_transfer.checksums import PageChecks
from tandem.logging.logs import about
from tandem.protocol.ending import reason_to_end
from tandem.protocol.errors import TransferFailed, Unavailable
from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent
from tandem.protocol.messages import ModelFacts, PeerRef, TransferNotice

log = logging.getLogger(__name__)


class ArrivalCheck:
    """Compares a notice and the received pages with the reservation, and counts mismatches.

    It changes no request. Owned by the admission.
    """

    def __init__(self, me: PeerRef, model: ModelFacts, checks: PageChecks | None) -> None:
        """Create the check. Without `checks`, notices carry no checksums and the bytes of pages are not checked."""
        self._me = me
        self._model = model
        self._checks = checks
        self.stamps_refused = 0
        self.checksums_equal = 0
        self.checksum_failures = 0

    @property
    def refused(self) -> int:
        """The number of notices that did not match the reservation, plus the transfers with wrong checksums."""
        return self.stamps_refused + self.checksum_failures

    def stamp_problem(self, request: DecodeRequest, notice: TransferNotice) -> str:
        """Return a description of the first field of the notice that does not match the reservation, or "".

        Returns at once. Called under the admission's lock.
        """
        problem = self._stamp_problem(request, notice)
        self.stamps_refused += bool(problem)
        return problem

    def check_bytes(self, request: DecodeRequest, notice: TransferNotice, on_result: Callable[[str], None]) -> bool:
        """Compare the notice's checksums with the request's pages in the background.

        The caller has checked that the notice matches the reservation. Returns False if there is nothing to compare.
        Otherwise `on_result` is called on another thread with a description of the mismatch, empty if there is none.
        Until then nothing may write to the pages.
        """
        if self._checks is None or not notice.checksums:
            return False

        def compared(problem: str) -> None:
            self._count(request, notice, problem)
            on_result(problem)

        self._checks.compare(request.pages, notice.checksums, _tokens_of(request), compared)
        return True

    def _stamp_problem(self, request: DecodeRequest, notice: TransferNotice) -> str:
        reservation = request.reservation
        if notice.pages != request.prompt_pages:
            return f"{notice.pages} pages instead of {request.prompt_pages}"
        if notice.skipped != request.skipped:
            return f"{notice.skipped} pages left out instead of {request.skipped}"
        if notice.token_hash != request.token_hash:
            return "the hash of another prompt"
        index = reservation.prior_output_tokens
        if reason_to_end(notice.first_token_id, index, request.prompt_tokens, reservation.sampling, self._model):
            return "a first token that ends the answer"
        if tuple(checksum.page for checksum in notice.checksums) != self._chosen(request, notice):
            return f"{len(notice.checksums)} checksums, or those of other pages than were agreed on"
        return ""

    def _chosen(self, request: DecodeRequest, notice: TransferNotice) -> tuple[int, ...]:
        """Return the pages whose checksums the notice must carry: none if this worker computed the prompt itself."""
        if self._checks is None or notice.prefill == self._me:
            return ()
        return self._checks.chosen(notice.lease, _tokens_of(request), request.skipped)

    def _count(self, request: DecodeRequest, notice: TransferNotice, problem: str) -> None:
        """Count and log the result of a comparison.

        Only the checksum thread calls this, so the counters need no lock.
        """
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


class ArrivalHandler:
    """Checks KV that has arrived, immediately or in the background, and then makes its request ready or fails it.

    Shares the admission's lock. Owned by the admission.
    """

    def __init__(
        self,
        requests: DecodeRequests,
        check: ArrivalCheck,
        lock: threading.Lock,
        changed: Callable[[], None],
        deadline_s: float,
    ) -> None:
        """Create the handler.

        `changed` is called without the lock when a background check has finished. `deadline_s`: maximum duration of a
        check in seconds.
        """
        self._requests = requests
        self._check = check
        self._lock = lock
        self._changed = changed
        self._deadline_s = deadline_s

    def handle(
        self,
        request: DecodeRequest,
        notice: TransferNotice,
        pages: Sequence[int],
        states: Collection[int],
        now: float,
    ) -> None:
        """Make the request the owner of its lease's pages and check the KV in them. Called under the lock.

        The lease has ended with the arrival of its notice. `pages` and `states` are those of a local prompt, as in
        `DecodeAdmission.notice`; empty if the prompt was sent by another worker.
        """
        self._requests.adopt(request, now + self._deadline_s, pages, states)
        try:
            self._check_arrival(request, notice)
        except Exception:
            self._fail_unexpectedly(request, notice)

    def _check_arrival(self, request: DecodeRequest, notice: TransferNotice) -> None:
        problem = self._check.stamp_problem(request, notice)
        try:
            if not problem and self._check.check_bytes(request, notice, partial(self._checked, request, notice)):
                return
        except Unavailable as error:
            problem = f"pages that could not be checked ({error.message})"
        self._decide(request, notice, problem)

    def _checked(self, request: DecodeRequest, notice: TransferNotice, problem: str) -> None:
        """Handle the result of the checksum comparison. Called on the checksum thread."""
        checked = EventTime.now(LifecycleEvent.KV_CHECKED)
        with self._lock:
            request.event_times.append(checked)
            try:
                self._decide(request, notice, problem)
            except Exception:
                self._fail_unexpectedly(request, notice)
        self._changed()

    def _fail_unexpectedly(self, request: DecodeRequest, notice: TransferNotice) -> None:
        """Log the current exception and fail only this request; its router starts another attempt."""
        request_id = request.reservation.ref.request_id
        log.exception("request %s could not be admitted", request_id, extra=about(request_id))
        if request.stage is Stage.CHECKING:
            self._decide(request, notice, "pages that could not be taken in")

    def _decide(self, request: DecodeRequest, notice: TransferNotice, problem: str) -> None:
        """Make the request ready; fail it if there is a `problem`, or free it if it was cancelled."""
        if request.cancelled:
            self._requests.free(request)
        elif problem:
            self._requests.free(request, TransferFailed(f"what arrived for the request has {problem}; prefill again"))
        else:
            self._requests.admit(request, notice)


def _tokens_of(request: DecodeRequest) -> int:
    return len(request.reservation.prompt_token_ids)
