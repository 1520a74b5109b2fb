"""The assignment of a worker: which phases (prefill, decode) are open, and the settings of its steps.

The controller may change it while the worker runs.
"""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.engine.config import EngineConfig
from tandem.protocol.ending import failure_event
from tandem.protocol.errors import InvalidArgument, RoleClosed, Unavailable
from tandem.protocol.messages import Assignment, PeerRef, RequestRef, Role, RoutedEvent
from tandem.protocol.policy_name import CHUNKED_BUDGET, PolicyName

log = logging.getLogger(__name__)

DRAIN_LOOK_S = 0.02
REST_S = 10.0
"""Seconds after which a warning is logged if a phase still has requests after they were aborted.

Normally the phase is empty once the step in flight and the writes in flight have ended.
"""
OTHER_ROLE, DRAINS = "has another role now", "drains"


@dataclass(frozen=True, slots=True)
class PhaseControl:
    """The calls that open and close one phase of a worker; `role` is PREFILL or DECODE."""

    role: Role
    open: Callable[[], None]
    close: Callable[[str], None]
    """Rejects new requests; called with the reason, which becomes part of their error message."""
    refs: Callable[[], list[tuple[str, RequestRef]]]
    """Returns the requests that have not ended, each with its router."""
    abort: Callable[[str, Sequence[RequestRef]], None]
    """Aborts these requests of a router."""
    requests: Callable[[], int]
    """Returns the number of requests that have not ended."""


class WorkerAssignment:
    """Opens and closes the phases of a worker.

    Used on the event loop; `stop` ends the tasks that wait for phases to close. Owned by the worker.
    """

    def __init__(
        self,
        me: PeerRef,
        assignment: Assignment,
        schedulers: Sequence[PhaseControl],
        *,
        resize: Callable[[Role], None],
        set_steps: Callable[[Assignment], None],
        emit: Callable[[RoutedEvent], None],
    ) -> None:
        """Create the assignment; the limits of the schedulers and the step settings match `assignment` already.

        `resize` adapts the schedulers' limits to the role, `set_steps` applies an assignment to the steps. `emit`
        reports an aborted request to its router.
        """
        self.assignment = assignment
        """The current assignment."""
        self.role = assignment.role
        """The phases that are open, or closing but not empty yet."""
        self.draining = False
        self.on_change: Callable[[], None] = lambda: None
        """Called whenever the facts that the worker registers with the controller have changed."""
        self._me = me
        self._schedulers = schedulers
        self._resize = resize
        self._set_steps = set_steps
        self._emit = emit
        self._closing: dict[Role, asyncio.Task[None]] = {}
        for scheduler in schedulers:
            if assignment.role | scheduler.role is not assignment.role:
                scheduler.close(OTHER_ROLE)

    @property
    def closing(self) -> Role | None:
        """The phases of `role` that reject new requests and finish those that they have; None if there are none."""
        if self.draining:
            return self.role
        closing = list(self._closing)
        return None if not closing else closing[0] if len(closing) == 1 else Role.BOTH

    def assume(self, assignment: Assignment, grace_s: float) -> None:
        """Apply an assignment, which may open and close phases.

        A phase that closes has `grace_s` seconds to finish its requests. Then its remaining requests are aborted, and
        their routers send them to other workers. Raises Unavailable while the worker drains, because a drained worker
        ends.
        """
        if self.draining:
            raise Unavailable(f"worker {self._me.worker_id} drains and takes no other assignment; start it again")
        log.info("%s: from %s to %s, %s", self._me.worker_id, self.role, assignment.role, assignment.steps)
        before = self.role
        self.assignment, self.role = assignment, before | assignment.role
        self._set_steps(assignment)
        self._resize(self.role)
        for scheduler in self._schedulers:
            if assignment.role | scheduler.role is assignment.role:
                self._cancel(scheduler)
                scheduler.open()
            elif before | scheduler.role is before:
                self._cancel(scheduler)
                scheduler.close(OTHER_ROLE)
                self._closing[scheduler.role] = asyncio.ensure_future(self._finish(scheduler, grace_s))
        self.on_change()

    async def drain(self, grace_s: float) -> int:
        """Reject all new requests from now on, and wait up to `grace_s` seconds for running requests.

        The remaining requests are then aborted, and their routers send them to other workers. Returns the number of
        aborted requests.
        """
        self.draining = True
        self.stop()
        for scheduler in self._schedulers:
            scheduler.close(DRAINS)
        self.on_change()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._emptied(self._schedulers)
        return len({ref for scheduler in self._schedulers for ref in self._abort_all(scheduler, DRAINS)})

    def stop(self) -> None:
        """Stop waiting for phases that close."""
        for scheduler in self._schedulers:
            self._cancel(scheduler)

    async def _finish(self, scheduler: PhaseControl, grace_s: float) -> None:
        """Wait until the phase is empty, and remove it from the role; after `grace_s` seconds abort its requests."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._emptied([scheduler])
        if left := self._abort_all(scheduler, OTHER_ROLE):
            log.info("%s aborts %d requests of its %s phase", self._me.worker_id, len(left), scheduler.role)
            await self._drain_phase(scheduler)
        del self._closing[scheduler.role]
        self.role = self.role.without(scheduler.role) or self.assignment.role
        self._resize(self.role)
        self.on_change()

    async def _drain_phase(self, scheduler: PhaseControl) -> None:
        """Wait until no step and no transfer uses the pages of the phase, however long that takes.

        Until then the pages are not given to other requests.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REST_S):
                await self._emptied([scheduler])
        if left := scheduler.requests():
            log.warning(
                "%s still closes its %s phase: transfers of %d ended requests are still in flight; look at the"
                " workers that they were handed over to or came from, or restart those",
                self._me.worker_id,
                scheduler.role,
                left,
            )
            await self._emptied([scheduler])

    def _abort_all(self, scheduler: PhaseControl, why: str) -> list[tuple[str, RequestRef]]:
        left = scheduler.refs()
        by_router: dict[str, list[RequestRef]] = defaultdict(list)
        reason = RoleClosed(f"worker {self._me.worker_id} {why}; others go on with the request")
        for router_id, ref in left:
            by_router[router_id].append(ref)
            self._emit(RoutedEvent(router_id, failure_event(ref, reason)))
        for router_id, refs in by_router.items():
            scheduler.abort(router_id, refs)
        return left

    def _cancel(self, scheduler: PhaseControl) -> None:
        closing = self._closing.pop(scheduler.role, None)
        if closing is not None:
            closing.cancel()

    async def _emptied(self, schedulers: Sequence[PhaseControl]) -> None:
        while any(scheduler.requests() for scheduler in schedulers):  # noqa: ASYNC110 - they empty on other threads
            await asyncio.sleep(DRAIN_LOOK_S)


def decode_batch(role: Role, engine: EngineConfig) -> int:
    """Return the maximum number of requests in a decode step.

    If both phases are open, at least half of a step's tokens are left to prompts.
    """
    tokens = engine.max_step_tokens
    request_tokens = max(1, tokens // 2) if role is Role.BOTH else tokens
    return min(engine.batch_requests, request_tokens)


def prompt_step_tokens(assignment: Assignment, engine: EngineConfig) -> int:
    """Return the maximum number of prompt tokens in a step, which is the chunk size of long prompts."""
    if assignment.step_policy is not PolicyName.CHUNKED:
        return engine.max_step_tokens
    return min(assignment.step_budget or CHUNKED_BUDGET, engine.max_step_tokens)


def check_role(role: Role, engine: EngineConfig) -> None:
    """Raise InvalidArgument if a worker with several pipeline stages or ranks that divide tokens is to decode.

    The first stage embeds the tokens, but the tokens of a decode step that runs are only known to the last stage.
    """
    if engine.context_parallel_size > 1 and role is not Role.PREFILL:
        raise InvalidArgument(
            "context_parallel_size",
            f"{engine.context_parallel_size} ranks that divide tokens are for prefill workers only, and this worker's"
            f" role is {role.value}; choose 1, or the role {Role.PREFILL.value}.",
        )
    if engine.context_parallel_size > 1 and engine.ranks > engine.context_parallel_size:
        raise InvalidArgument(
            "context_parallel_size",
            "ranks that divide tokens have the whole model; choose 1, or tensor and pipeline sizes of 1.",
        )
    if engine.pipeline_parallel_size > 1 and role is not Role.PREFILL:
        raise InvalidArgument(
            "pipeline_parallel_size",
            f"{engine.pipeline_parallel_size} stages are for prefill workers only, and this worker's role is"
            f" {role.value}; give it 1 stage, or the role {Role.PREFILL.value}.",
        )
