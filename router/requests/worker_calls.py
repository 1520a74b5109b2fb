"""The two calls that start a placed request on its workers: Reserve on the decode worker, then Prefill."""

from __future__ import annotations

import asyncio
import logging

from router.config import RouterConfig
from router.requests.ends import RequestEnds
from router.requests.request import RoutedRequest
from router.workers.worker import Worker
from tandem.logging.logs import about
from tandem.protocol.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    ResourceExhausted,
    RoleClosed,
    TandemError,
    Unavailable,
)
from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent
from tandem.protocol.messages import Destination, PrefillTask, RequestRef, Reservation

log = logging.getLogger(__name__)

_UNAVAILABLE = (Unavailable, FailedPrecondition, DeadlineExceeded)
"""Errors of a worker that is gone or does not respond, after which another worker may serve the request."""
_BUSY = (ResourceExhausted, RoleClosed)
"""Errors of a worker that is full, changes its role or drains: the request is queued again, which is no failure."""


class DispatchCalls:
    """Calls the workers for each placed request, in one short task per request on the event loop.

    The dispatcher owns it.
    """

    def __init__(self, config: RouterConfig, ends: RequestEnds) -> None:
        self._config = config
        self._ends = ends
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, request: RoutedRequest) -> None:
        """Start the dispatch of the current attempt of `request`, which must have been placed on workers."""
        assert request.prefill is not None
        task = asyncio.create_task(self._dispatch(request, request.ref, request.prefill, request.decode))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Wait until every dispatch has ended and has released its lease if the lease is no longer needed."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _dispatch(self, request: RoutedRequest, ref: RequestRef, prefill: Worker, decode: Worker | None) -> None:
        """Call Reserve, then Prefill.

        The task is never cancelled, because it must release a granted lease even if the request ends meanwhile.
        """
        asked = prefill if decode is None else decode
        admitted, token_ids, prior_output_tokens = request.admitted, request.token_ids, request.prior_output_tokens
        sampling, salt = admitted.sampling, admitted.cache_salt
        waited_s = request.placed_s - request.waiting_since
        adapter = "" if admitted.adapter is None else admitted.adapter.identity
        hinted_tokens = admitted.hinted_tokens or 0
        hinted_s = admitted.cache_retention_s if hinted_tokens else 0.0
        placement = request.prediction
        source = None if placement is None else placement.source
        try:
            destination = None
            if decode is not None:
                reloads = placement is not None and placement.prompt.reloaded_tokens and source is None
                if decode is not prefill and reloads:
                    # The pages are loaded while the decode worker reserves others.
                    request.read_ahead(prefill)
                peer = prefill.info.peer
                reservation = Reservation(
                    self._config.router_id,
                    ref,
                    token_ids,
                    sampling,
                    peer,
                    prior_output_tokens=prior_output_tokens,
                    cache_salt=salt,
                    gap_target_s=decode.state.gap_target(request.queued.slo),
                    adapter=adapter,
                    source=source if decode is prefill else None,
                    tenant=admitted.tenant,
                    retention_s=request.retention_s,
                    hinted_s=hinted_s,
                    hinted_tokens=hinted_tokens,
                )
                destination = await self._reserve(request, reservation, decode)
            asked = prefill
            if _current(request, ref):
                await prefill.prefill(
                    PrefillTask(
                        self._config.router_id,
                        ref,
                        token_ids,
                        sampling,
                        destination,
                        prior_output_tokens=prior_output_tokens,
                        cache_salt=salt,
                        adapter=adapter,
                        waited_s=waited_s,
                        source=source if decode is not prefill else None,
                        tenant=admitted.tenant,
                        retention_s=request.retention_s,
                        hinted_s=hinted_s,
                        hinted_tokens=hinted_tokens,
                    )
                )
                if _current(request, ref):
                    prefill.state.prompt_accepted(request.internal_id)
        except TandemError as error:
            self._refused(request, ref, asked, error)
        except Exception as error:
            log.exception("dispatching request %s failed", ref.request_id, extra=about(ref.request_id))
            self._refused(request, ref, asked, Internal(f"dispatching failed ({type(error).__name__}); see the log"))
        # If the attempt has ended during the calls, it may still hold a lease or a queued prompt: abort it. This is
        # needed even if a later attempt has completed the answer, because each attempt holds separate resources.
        if not _current(request, ref) and not (request.generated and request.attempt == ref.attempt):
            for link in {prefill, decode or prefill}:
                link.abort(ref)

    async def _reserve(self, request: RoutedRequest, reservation: Reservation, decode: Worker) -> Destination:
        granted = await decode.reserve(reservation)
        if _current(request, reservation.ref):
            request.event_times.append(EventTime.now(LifecycleEvent.RESERVED))
            request.lease = granted.lease
            decode.keep_lease(granted)
        return Destination(decode.info.peer, decode.info.address, granted.lease)

    def _refused(self, request: RoutedRequest, ref: RequestRef, asked: Worker, error: TandemError) -> None:
        unavailable = isinstance(error, _UNAVAILABLE)
        if unavailable or isinstance(error, _BUSY):
            asked.back_off()
        if not _current(request, ref):
            return
        if isinstance(error, _BUSY):
            self._ends.requeue(request)
        else:
            self._ends.fail_attempt(request, error, retry=unavailable or None)


def _current(request: RoutedRequest, ref: RequestRef) -> bool:
    """Return True if `ref` is still the current attempt of the request."""
    return not request.ended and request.attempt == ref.attempt
