"""What becomes of a request whose pages have arrived: ready, failed, or dropped as nobody waits for it any more."""

import logging
import threading
from collections.abc import Callable
from functools import partial

from decode_worker.arrival import ArrivalCheck
from decode_worker.holdings import Holdings
from decode_worker.request import DecodeRequest, Stage
from wire.errors import TransferFailed, Unavailable
from wire.logs import about
from wire.messages import TransferNotice
from wire.timeline import Edge, EdgeStamp

log = logging.getLogger(__name__)


class Intake:
    """Has what arrived judged, at once or in the background, and acts on it. Shares the admission's lock."""

    def __init__(
        self, held: Holdings, check: ArrivalCheck, lock: threading.Lock, changed: Callable[[], None], deadline_s: float
    ) -> None:
        """`changed` is called outside the lock when a check's result has; `deadline_s` is how long one may take."""
        self._held = held
        self._check = check
        self._lock = lock
        self._changed = changed
        self._deadline_s = deadline_s

    def take_in(self, request: DecodeRequest, notice: TransferNotice, now: float) -> None:
        """Under the lock: the lease is settled, and its pages are the request's."""
        self._held.adopt(request, now + self._deadline_s)
        problem = self._check.stamp_problem(request, notice)
        try:
            if not problem and self._check.check_bytes(request, notice, partial(self._checked, request, notice)):
                return
        except Unavailable as error:
            problem = f"pages that could not be checked ({error.message})"
        self._judge(request, notice, problem)

    def _checked(self, request: DecodeRequest, notice: TransferNotice, problem: str) -> None:
        """The checks' thread: whether the bytes of a request's pages are right."""
        checked = EdgeStamp.now(Edge.KV_CHECKED)
        with self._lock:
            request.edges.append(checked)
            try:
                self._judge(request, notice, problem)
            except Exception:
                request_id = request.reservation.ref.request_id
                log.exception("request %s could not be admitted", request_id, extra=about(request_id))
                if request.stage is Stage.CHECKING:
                    self._judge(request, notice, "pages that could not be taken in")
        self._changed()

    def _judge(self, request: DecodeRequest, notice: TransferNotice, problem: str) -> None:
        """What arrived is known to be right, or to have a `problem`."""
        if request.cancelled:
            self._held.free(request)
        elif problem:
            self._held.free(request, TransferFailed(f"what arrived for the request has {problem}; prefill again"))
        else:
            self._held.admit(request, notice)
