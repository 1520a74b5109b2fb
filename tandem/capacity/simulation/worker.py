"""A simulated worker: both halves, their scheduler and their cache over a simulated device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np

from decode_worker.admission import DecodeAdmission
from decode_worker.batch_snapshot import CompletedStep
from prefill_worker.half import PrefillHalf
from prefill_worker.request import PrefillRequest
from tandem.capacity.simulation.assignment import VirtualAssignment
from tandem.capacity.simulation.clock import VirtualClock
from tandem.capacity.simulation.loop import VirtualStepLoop
from tandem.capacity.simulation.network import Network, Wire
from tandem.capacity.simulation.prompt import PageNames
from tandem.capacity.simulation.spec import WorkerSpec
from tandem.capacity.simulation.steady import SteadyDecodeHalf
from tandem.capacity.simulation.step_log import StepLog
from tandem.capacity.simulation.transfer.handover import DecodeEnd
from tandem.capacity.simulation.transfer.handovers import VirtualHandovers
from tandem.cost_model.step_cost import StepCost
from tandem.cost_model.step_work import StepWork
from tandem.engine.cache.page_pool import PagePool
from tandem.engine.cache.prefix_cache import PrefixCache
from tandem.protocol.messages import (
    GrantedLease,
    Lease,
    PeerRef,
    PrefillTask,
    RequestEvent,
    RequestRef,
    Reservation,
    RoutedEvent,
    TransferNotice,
    WorkerInfo,
    WorkerLoad,
)
from tandem.protocol.prefixes import PrefixChanges
from tandem.worker.halves import Halves
from tandem.worker.reporting.report import load_of
from tandem.worker.scheduler import StepOutput, StepScheduler


@dataclass(frozen=True, slots=True)
class WorkerStepOutput:
    """The output of a step for the router; `number` is the step's number in the worker's log."""

    number: int
    events: Sequence[RequestEvent]
    load: WorkerLoad
    prefixes: PrefixChanges | None


Publish = Callable[["VirtualWorker", WorkerStepOutput], None]


class VirtualWorker:
    """A worker. `publish` receives each completed step that did more than decode, at its end."""

    def __init__(
        self,
        spec: WorkerSpec,
        clock: VirtualClock,
        network: Network,
        peers: dict[PeerRef, VirtualWorker],
        publish: Publish,
        *,
        jumps: bool = True,
    ) -> None:
        """Sets the worker up; `peers` has all workers, this one included.

        Without `jumps` every step is taken by itself.
        """
        self.spec, self.peer = spec, spec.peer
        self.page_bytes, self.kv = spec.device.page_bytes, spec.kv
        self.wire = Wire(network)
        self._clock, self._peers, self._publish = clock, peers, publish
        self._reported = StepCost(spec.device.reported)
        self.pool = PagePool(spec.device.pages)
        self.cache = PrefixCache(self.pool, spec.kv, enabled=spec.config.prefix_cache, names=PageNames())
        self.admission = self._make_admission()
        self._decode = SteadyDecodeHalf(
            requests=self.admission.requests,
            lock=self.admission.lock,
            model=spec.model,
            kv=spec.kv,
            max_batch_requests=spec.info.max_batch_requests,
            drafts=spec.drafts,
        )
        self._token_logs: dict[RequestRef, StepLog] = {}
        handovers = VirtualHandovers(self, clock, network)
        self._prefill = PrefillHalf(
            config=spec.config,
            me=self.peer,
            cache=self.cache,
            model=spec.model,
            local=self.admission,
            hand_over=handovers.begin,
            wake=self._wake,
            events=handovers,
        )
        self._halves = Halves(
            spec.config, self.cache, spec.model, prefill=self._prefill, decode=self._decode, admission=self.admission
        )
        self._loop = VirtualStepLoop(
            clock,
            self._make_scheduler(),
            StepCost(spec.device.truth),
            decode=self._decode,
            prefill=self._prefill,
            spare_pages=lambda: min(self.pool.room, self.admission.pages_left),
            publish=self._step_ended,
            on_progress=handovers.look,
            jumps=jumps,
        )
        self.log = self._loop.log
        self.assignment = VirtualAssignment(spec.config.role, self._halves, clock, self.visit)

    # ---- calls from other processes ----

    def reserve(self, reservation: Reservation) -> GrantedLease:
        """Reserves KV pages like `DecodeAdmission.reserve`."""
        with self.visit():
            return self.admission.reserve(reservation)

    def prefill(self, task: PrefillTask) -> None:
        """Queues a prompt like `PrefillHalf.submit`."""
        with self.visit():
            self._prefill.submit(task)

    def abort(self, router_id: str, refs: Sequence[RequestRef]) -> None:
        """Ends these requests of a router."""
        with self.visit():
            self._halves.abort(router_id, refs)

    def allot(self, lease: Lease, pages: int, prefill: PeerRef) -> int:
        """Allots a lease's pages; returns how many of them are to be sent."""
        with self.visit():
            return len(self.admission.allot(lease, pages, prefill))

    def notice(self, notice: TransferNotice) -> None:
        """Takes the notice that a lease's KV has arrived."""
        with self.visit():
            self.admission.notice(notice)

    def release(self, lease: Lease, prefill: PeerRef) -> None:
        """Releases a lease whose hand-over was cancelled."""
        with self.visit():
            self.admission.release(lease, prefill)

    def visit(self) -> AbstractContextManager[None]:
        """Returns a context for changes of the worker from outside of a step."""
        return self._loop.visit()

    def decode_end(self, peer: PeerRef) -> DecodeEnd:
        """Returns a peer as a destination of hand-overs."""
        return self._peers[peer]

    def tell(self, request: PrefillRequest, event: RequestEvent) -> None:
        """Publishes an event of a hand-over."""
        self._tell(len(self.log), (event,))

    def token_log(self, ref: RequestRef) -> StepLog | None:
        """Returns the times of the tokens that an attempt decoded here; None where each step has one token of it."""
        return None if self._decode.speculation is None else self._token_logs.get(ref, StepLog())

    def load(self) -> WorkerLoad:
        """Returns the load report of a real worker in this state."""
        return load_of(self._halves, self.cache, self._loop.decoding, self._reported.parameters)

    @property
    def info(self) -> WorkerInfo:
        """The worker's present registration."""
        role, info = self.assignment.role, self.spec.info
        assignment = replace(self.spec.config.assignment, role=self.assignment.wanted)
        limit = self._halves.batch_limit(role)
        return replace(
            info, role=role, assignment=assignment, closing=self.assignment.closing, max_batch_requests=limit
        )

    @property
    def idle(self) -> bool:
        """True if no step is in flight."""
        return self._loop.idle

    @property
    def busy_s(self) -> float:
        """Seconds that the device has computed so far."""
        return self._loop.busy_s

    # ---- steps ----

    def _wake(self) -> None:
        self._loop.wake()

    def _step_ended(self, number: int, work: StepWork, output: StepOutput) -> None:
        if self._decode.speculation is not None and output.completed is not None:
            self._log_tokens(output.completed)
        if output.events or work.prefill_tokens:
            self._tell(number, [routed.event for routed in output.events])

    def _log_tokens(self, step: CompletedStep) -> None:
        over = step.excluded_rows.difference(step.event_rows)
        for row in range(len(step.snapshot)):
            if row not in over:
                request, _, token_ids = step.tokens(row)
                log = self._token_logs.setdefault(request.reservation.ref, StepLog())
                log.extend(np.full(len(token_ids), self._clock.now))

    def _emit(self, routed: RoutedEvent) -> None:
        self._tell(len(self.log), (routed.event,))

    def _tell(self, number: int, events: Sequence[RequestEvent]) -> None:
        self._publish(self, WorkerStepOutput(number, events, self.load(), self.cache.changes()))

    # ---- parts ----

    def _make_admission(self) -> DecodeAdmission:
        return DecodeAdmission(
            config=self.spec.config,
            me=self.peer,
            cache=self.cache,
            model=self.spec.model,
            clock=self._clock,
            expect=lambda _leases: None,
            emit=self._emit,
            wake=self._wake,
            listened_s=self._clock,
            is_near=lambda _peer: True,
        )

    def _make_scheduler(self) -> StepScheduler:
        return StepScheduler(
            decode=self._decode,
            prefill=self._prefill,
            max_step_tokens=self.spec.config.engine.max_step_tokens,
            cost=lambda: self._reported,
            assignment=self.spec.config.assignment,
        )
