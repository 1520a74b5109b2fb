"""A simulated worker: both halves, their scheduler and their cache over a device that only takes time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from costs.step_cost import StepCost, StepWork
from decode_worker.admission import DecodeAdmission
from engine.cache.page_pool import PagePool
from engine.cache.prefix_cache import PrefixCache
from prefill_worker.half import PrefillHalf
from prefill_worker.request import PrefillRequest
from simulation.assignment import VirtualAssignment
from simulation.clock import VirtualClock
from simulation.loop import VirtualStepLoop
from simulation.network import Network, Wire
from simulation.prompt import PageNames
from simulation.spec import WorkerSpec
from simulation.steady import SteadyDecodeHalf
from simulation.transfer.handover import DecodeEnd
from simulation.transfer.handovers import VirtualHandovers
from wire.messages import (
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
from wire.prefixes import PrefixChanges
from worker.halves import Halves
from worker.reporting.report import load_of
from worker.scheduler import StepScheduler


@dataclass(frozen=True, slots=True)
class WorkerNews:
    """What the router hears of a step: `number` is its place in the worker's log."""

    number: int
    events: Sequence[RequestEvent]
    load: WorkerLoad
    prefixes: PrefixChanges | None


Publish = Callable[["VirtualWorker", WorkerNews], None]


class VirtualWorker:
    """One worker. `publish` hears of each step in which anything but decoding happened, when it has ended."""

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
        """`peers` are all workers, this one among them. Without `jumps` every step is taken by itself."""
        self.spec, self.peer = spec, spec.peer
        self.page_bytes, self.page_tokens = spec.device.page_bytes, spec.device.page_tokens
        self.wire = Wire(network)
        self._clock, self._peers, self._publish = clock, peers, publish
        self._told = StepCost(spec.device.told)
        self.pool = PagePool(spec.device.pages)
        self.cache = PrefixCache(self.pool, self.page_tokens, enabled=spec.config.prefix_cache, names=PageNames())
        self.admission = self._make_admission()
        self._decode = SteadyDecodeHalf(
            requests=self.admission.running,
            model=spec.model,
            page_tokens=self.page_tokens,
            max_batch_requests=spec.info.max_batch_requests,
        )
        handovers = VirtualHandovers(self, clock, network)
        self._prefill = PrefillHalf(
            config=spec.config.prefill,
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

    # ---- who calls in ----

    def reserve(self, reservation: Reservation) -> GrantedLease:
        """See `DecodeAdmission.reserve`."""
        with self.visit():
            return self.admission.reserve(reservation)

    def prefill(self, task: PrefillTask) -> None:
        """See `PrefillHalf.submit`."""
        with self.visit():
            self._prefill.submit(task)

    def abort(self, router_id: str, refs: Sequence[RequestRef]) -> None:
        with self.visit():
            self._halves.abort(router_id, refs)

    def allot(self, lease: Lease, pages: int, prefill: PeerRef) -> int:
        with self.visit():
            return len(self.admission.allot(lease, pages, prefill))

    def notice(self, notice: TransferNotice) -> None:
        with self.visit():
            self.admission.notice(notice)

    def release(self, lease: Lease, prefill: PeerRef) -> None:
        with self.visit():
            self.admission.release(lease, prefill)

    def visit(self) -> AbstractContextManager[None]:
        """For who acts inside of it, but not from a step."""
        return self._loop.visit()

    def decode_end(self, peer: PeerRef) -> DecodeEnd:
        return self._peers[peer]

    def tell(self, request: PrefillRequest, event: RequestEvent) -> None:
        """A hand-over has news for the router."""
        self._tell(len(self.log), (event,))

    def load(self) -> WorkerLoad:
        """As a real one tells it."""
        return load_of(self._halves, self.cache, self._loop.decoding, self._told.parameters)

    @property
    def info(self) -> WorkerInfo:
        """As it would register now."""
        role, info = self.assignment.role, self.spec.info
        assignment = replace(self.spec.config.assignment, role=self.assignment.wanted)
        limit = self._halves.batch_limit(role)
        return replace(
            info, role=role, assignment=assignment, closing=self.assignment.closing, max_batch_requests=limit
        )

    @property
    def idle(self) -> bool:
        return self._loop.idle

    @property
    def busy_s(self) -> float:
        """Time of the device so far."""
        return self._loop.busy_s

    # ---- steps ----

    def _wake(self) -> None:
        self._loop.wake()

    def _step_ended(self, number: int, work: StepWork, events: Sequence[RoutedEvent]) -> None:
        if events or work.prefill_tokens:
            self._tell(number, [routed.event for routed in events])

    def _emit(self, routed: RoutedEvent) -> None:
        self._tell(len(self.log), (routed.event,))

    def _tell(self, number: int, events: Sequence[RequestEvent]) -> None:
        self._publish(self, WorkerNews(number, events, self.load(), self.cache.changes()))

    # ---- parts ----

    def _make_admission(self) -> DecodeAdmission:
        return DecodeAdmission(
            config=self.spec.config.decode,
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
            cost=lambda: self._told,
            assignment=self.spec.config.assignment,
        )
