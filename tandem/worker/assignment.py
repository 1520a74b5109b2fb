"""The assignment of a worker: which phases are open, and how its steps are made.

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
from tandem.protocol.errors import RoleClosed, Unavailable
from tandem.protocol.messages import Assignment, PeerRef, RequestRef, Role, RoutedEvent
from tandem.protocol.policy_name import CHUNKED_BUDGET, PolicyName

log = logging.getLogger(__name__)

DRAIN_LOOK_S = 0.02
REST_S = 10.0
"""Seconds after which an abandoned phase that is not empty logs a warning.

Emptying normally takes one step and the writes in flight."""
OTHER_ROLE, DRAINS = "has another role now", "drains"


@dataclass(frozen=True, slots=True)
class PhaseControl:
    """The calls that open and close one phase of a worker; `role` is PREFILL or DECODE."""

    role: Role
    open: Callable[[], None]
    close: Callable[[str], None]
    """Called with the reason for which requests are refused."""
    refs: Callable[[], list[tuple[str, RequestRef]]]
    """Returns every request, with its router."""
    abort: Callable[[str, Sequence[RequestRef]], None]
    """Aborts requests of a router."""
    requests: Callable[[], int]
    """Returns the number of requests that have not ended."""


class WorkerAssignment:
    """Opens and closes the phases of a worker.

    Used on the event loop; `stop` ends the tasks that wait. Owned by the worker.
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
        """Create the assignment; sizes and steps follow `assignment` already.

        `resize` adapts the schedulers' limits to the role, `set_steps` applies an assignment to the steps. `emit`
        reports to routers which requests are abandoned.
        """
        self.assignment = assignment
        """The newest assignment."""
        self.role = assignment.role
        """The phases that are open or still finish their requests."""
        self.draining = False
        self.on_change: Callable[[], None] = lambda: None
        """Called whenever the facts with which the worker registers have changed."""
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
        """The phases of `role` that accept nothing new, None if there are none."""
        if self.draining:
            return self.role
        closing = list(self._closing)
        return None if not closing else closing[0] if len(closing) == 1 else Role.BOTH

    def assume(self, assignment: Assignment, grace_s: float) -> None:
        """Apply `assignment`. A phase that closes has `grace_s` seconds before other workers get its requests.

        Raises Unavailable while draining, because the worker ends.
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
        """Accept nothing new for good, and wait up to `grace_s` seconds for running requests.

        Returns how many requests other workers get after that.
        """
        self.draining = True
        self.stop()
        for scheduler in self._schedulers:
            scheduler.close(DRAINS)
        self.on_change()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._emptied(self._schedulers)
        return len({ref for scheduler in self._schedulers for ref in self._give_up(scheduler, DRAINS)})

    def stop(self) -> None:
        """Stop waiting for phases that close."""
        for scheduler in self._schedulers:
            self._cancel(scheduler)

    async def _finish(self, scheduler: PhaseControl, grace_s: float) -> None:
        """Wait until the phase is empty, whatever happens to its requests, and remove it from the role."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._emptied([scheduler])
        if left := self._give_up(scheduler, OTHER_ROLE):
            log.info("%s gives up %d requests of its %s phase", self._me.worker_id, len(left), scheduler.role)
            await self._come_to_rest(scheduler)
        del self._closing[scheduler.role]
        self.role = self.role.without(scheduler.role) or self.assignment.role
        self._resize(self.role)
        self.on_change()

    async def _come_to_rest(self, scheduler: PhaseControl) -> None:
        """Wait until nothing reads or writes the pages of the phase any more, however long that takes.

        No other request may have the pages before.
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

    def _give_up(self, scheduler: PhaseControl, why: str) -> list[tuple[str, RequestRef]]:
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
    """Return the most requests of one decode step.

    With both phases open, prompts keep at least half of a step's tokens.
    """
    tokens = engine.max_step_tokens
    room = max(1, tokens // 2) if role is Role.BOTH else tokens
    return min(engine.max_batch_requests, room)


def prompt_step_tokens(assignment: Assignment, engine: EngineConfig) -> int:
    """Return the most prompt tokens of one step, which is the size of a long prompt's chunks."""
    if assignment.step_policy is not PolicyName.CHUNKED:
        return engine.max_step_tokens
    return min(assignment.step_budget or CHUNKED_BUDGET, engine.max_step_tokens)
