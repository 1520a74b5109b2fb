"""One worker as the requests on it see it, whether it is reached by gRPC or simulated."""

from typing import Protocol

from router.placement.worker_state import WorkerState
from tandem.protocol.messages import GrantedLease, PrefillTask, RequestRef, Reservation, WorkerInfo
from tandem.protocol.prefixes import PrefixRun


class Worker(Protocol):
    """The calls that start and end an attempt on a worker, implemented by `WorkerLink`.

    All calls are on the event loop.
    """

    state: WorkerState
    """The worker's load and costs, for placement."""

    @property
    def info(self) -> WorkerInfo:
        """The worker's latest registration at the controller."""

    @property
    def name(self) -> str:
        """The worker's name in logs and error messages."""

    async def reserve(self, reservation: Reservation) -> GrantedLease:
        """Reserve pages on the worker and return the lease. Raises the worker's `TandemError` if it refuses."""

    async def prefill(self, task: PrefillTask) -> None:
        """Send a prompt to the worker. Raises the worker's `TandemError` if it refuses the prompt."""

    def read_ahead(self, prompt: PrefixRun) -> None:
        """Let the worker load pages of a prompt from its tiers before the prompt is sent; returns at once.

        `prompt` has the digests of the full pages before the last token. Errors are ignored: the worker then loads the
        pages, or computes them, when the prompt comes.
        """

    def abort(self, ref: RequestRef) -> None:
        """Abort the attempt `ref` of a request, and all earlier attempts, on the worker; returns at once."""

    def back_off(self) -> None:
        """Stop placing requests on the worker for `BACK_OFF_S`, because it refused one."""

    def keep_lease(self, granted: GrantedLease) -> None:
        """Renew the lease until `drop_lease` is called; it replaces an earlier lease of the same request."""

    def drop_lease(self, request_id: str) -> None:
        """Stop renewing the lease of a request: the worker has admitted the request, or the request has ended."""
