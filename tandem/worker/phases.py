"""The schedulers of both phases of a worker: operations that concern both of them."""

import logging
from collections.abc import Sequence

from decode_worker.admission import DecodeAdmission
from decode_worker.scheduler import DecodeScheduler
from prefill_worker.scheduler import PrefillScheduler
from tandem.engine.cache.prefix_cache import PrefixCache
from tandem.protocol.ending import decode_pages, failure_event
from tandem.protocol.errors import TandemError, Unavailable
from tandem.protocol.messages import ModelFacts, RequestEvent, RequestRef, Role, RoutedEvent
from tandem.worker.assignment import PhaseControl, decode_batch
from tandem.worker.config import WorkerConfig

log = logging.getLogger(__name__)

ENGINE_LOST = "has lost its engine"
"""The reason for which new requests are rejected after the engine was lost."""


class PhaseSchedulers:
    """Both schedulers of a worker; each operation applies to both of them.

    The schedulers own their requests and pages. Owned by the worker and called on the event loop.
    """

    def __init__(
        self,
        config: WorkerConfig,
        cache: PrefixCache,
        model: ModelFacts,
        *,
        prefill: PrefillScheduler,
        decode: DecodeScheduler,
        admission: DecodeAdmission,
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self.admission = admission
        self._engine = config.engine
        self._pool = cache.pool
        self._longest = cache.kv.held(model.max_context)
        self.resize(config.role)

    def phase_controls(self) -> tuple[PhaseControl, PhaseControl]:
        """Return the calls that open and close each phase to new requests."""
        prefill, admission = self.prefill, self.admission
        return (
            PhaseControl(
                Role.PREFILL, prefill.open, prefill.close, prefill.refs, prefill.abort, prefill.known_requests
            ),
            PhaseControl(
                Role.DECODE,
                admission.open,
                admission.close,
                admission.refs,
                admission.abort,
                lambda: admission.open_requests,
            ),
        )

    def batch_limit(self, role: Role) -> int:
        """Return the maximum number of requests in a decode step for this role."""
        return decode_batch(role, self._engine)

    def resize(self, role: Role) -> None:
        """Adapt the limits of decode to a role: if the prefill phase is open, its prompts need pages as well."""
        self.decode.limit(self.batch_limit(role))
        self.admission.limit(decode_pages(role, self._pool.total, self._longest))

    @property
    def kv_usage(self) -> float:
        """The share of the KV pages in use or reserved: of all pages, or of those for answers, if that is larger."""
        return max(1 - self._pool.unreserved / self._pool.total, self.admission.used_share)

    @property
    def not_ready(self) -> str:
        """The reasons why phases accept no requests at present; empty if both accept requests."""
        return "; ".join(why for why in (self.admission.not_ready, self.prefill.not_ready) if why)

    def open_requests(self) -> int:
        """Return the number of requests of both phases. A request that both phases know counts twice."""
        return self.prefill.known_requests() + self.admission.open_requests

    def refs(self) -> list[tuple[str, RequestRef]]:
        """Return the requests of both phases with their routers. A request that both phases know is listed twice."""
        return [*self.prefill.refs(), *self.admission.refs()]

    def adapters(self) -> set[str]:
        """Return the hashes of the adapters that requests of either phase use; "" stands for the base model."""
        return self.prefill.registry.adapters() | self.admission.adapters()

    def close(self, why: str) -> None:
        """Reject new requests in both phases; `why` becomes part of the error message."""
        self.prefill.close(why)
        self.admission.close(why)

    def abort(self, router_id: str, refs: Sequence[RequestRef]) -> None:
        """Abort these requests. Unknown ones are ignored."""
        self.prefill.abort(router_id, refs)
        self.admission.abort(router_id, refs)

    def router_gone(self, router_id: str) -> list[RequestEvent]:
        """Abort every request of a router, and return the events for an event stream that replaces the lost one."""
        refs = {*self.prefill.abort_router(router_id), *self.admission.abort_router(router_id)}
        if refs:
            log.info("router %s is gone: %d requests aborted", router_id, len(refs))
        reason = Unavailable("the event stream was replaced; send the request again")
        return [failure_event(ref, reason) for ref in refs]

    def abort_all(self) -> None:
        """Abort every request."""
        for router_id in {router_id for router_id, _ in self.refs()}:
            self.router_gone(router_id)

    def engine_gone(self, reason: TandemError) -> list[RoutedEvent]:
        """Reject new requests and abandon the launched steps; return failure events for the requests of these steps."""
        self.close(ENGINE_LOST)
        lost = set(self.refs()).intersection(self.abandon())
        return [RoutedEvent(router_id, failure_event(ref, reason)) for router_id, ref in lost]

    def abandon(self) -> list[tuple[str, RequestRef]]:
        """Abandon the launched steps, which will never complete; return their requests with their routers."""
        return [*self.prefill.abandon(), *self.decode.abandon()]
