"""A simulated worker: the real schedulers of both phases and the real prefix cache on a simulated device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np

from decode_worker.admission import DecodeAdmission
from decode_worker.batch_snapshot import DecodedStep
from kv_transfer.in_memory import InMemoryTransport
from prefill_worker.page_writes import WritingTime
from prefill_worker.request import PrefillRequest
from prefill_worker.scheduler import PrefillScheduler
from tandem.capacity.simulation.clock import VirtualLoop
from tandem.capacity.simulation.loop import VirtualStepLoop
from tandem.capacity.simulation.prompt import PageNames
from tandem.capacity.simulation.request import StepLog
from tandem.capacity.simulation.spec import WorkerSpec
from tandem.capacity.simulation.steady import SteadyDecodeScheduler
from tandem.capacity.simulation.tiers import VirtualTiers
from tandem.capacity.simulation.transfer import VirtualFabric, VirtualPeers, layout_of
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
    Role,
    RoutedEvent,
    StepOutput,
    TransferNotice,
    WorkerInfo,
    WorkerLoad,
)
from tandem.protocol.prefixes import PrefixRun
from tandem.worker.assignment import WorkerAssignment
from tandem.worker.handoffs import Handoffs
from tandem.worker.kv_tiers import KvReloads
from tandem.worker.phases import PhaseSchedulers
from tandem.worker.reporting.report import load_of
from tandem.worker.scheduler import StepScheduler


class _SyncedPrefillScheduler(PrefillScheduler):
    """A prefill scheduler whose hand-overs first bring the simulated worker to the current time (`sync`)."""

    sync: Callable[[], AbstractContextManager[None]] = nullcontext

    def withdraw(self, request: PrefillRequest) -> None:
        with self.sync():
            super().withdraw(request)

    def free(self, request: PrefillRequest) -> None:
        with self.sync():
            super().free(request)


Publish = Callable[["VirtualWorker", StepOutput], None]


class VirtualWorker:
    """A simulated worker; `publish` receives the output of each step that has events or computed prompts."""

    def __init__(
        self,
        spec: WorkerSpec,
        clock: VirtualLoop,
        fabric: VirtualFabric,
        peers: dict[PeerRef, VirtualWorker],
        publish: Publish,
        *,
        jumps: bool = True,
    ) -> None:
        """Create the worker; `peers` has all workers, this one included.

        Without `jumps`, steps are simulated one by one.
        """
        self.spec, self.peer, self.links = spec, spec.peer, spec.device.links
        self._clock, self._publish = clock, publish
        self._reported_cost = StepCost(spec.device.reported_cost)
        self.pool = PagePool(spec.device.pages)
        self.cache = PrefixCache(self.pool, spec.kv, enabled=spec.config.prefix_cache, names=PageNames())
        self.admission = self._make_admission()
        self._decode = SteadyDecodeScheduler(
            requests=self.admission.requests,
            lock=self.admission.lock,
            model=spec.model,
            kv=spec.kv,
            max_batch_requests=spec.info.max_batch_requests,
            drafts=spec.drafts,
        )
        self._token_logs: dict[RequestRef, StepLog] = {}
        layout = layout_of(spec.device.pages, spec.device.page_bytes)
        self.transport = InMemoryTransport(fabric.fabric, layout, self.peer, self.notice)
        self.handoffs = self._make_handoffs(VirtualPeers(self.transport, peers, fabric.network))
        self._prefill = _SyncedPrefillScheduler(
            config=spec.config,
            me=self.peer,
            cache=self.cache,
            model=spec.model,
            local=self.admission,
            begin_handoff=self.handoffs.begin,
            wake=self._wake,
            events=clock,
        )
        self._schedulers = PhaseSchedulers(
            spec.config, self.cache, spec.model, prefill=self._prefill, decode=self._decode, admission=self.admission
        )
        scheduler = self._make_scheduler()
        self._loop = VirtualStepLoop(
            clock,
            scheduler,
            StepCost(spec.device.actual_cost),
            decode=self._decode,
            prefill=self._prefill,
            spare_pages=lambda: min(self.pool.unreserved, self.admission.pages_left),
            publish=self._step_ended,
            jumps=jumps,
        )
        self.log = self._loop.log
        self.tiers = self._open_tiers()
        self._reloads = None if self.tiers is None else self._make_reloads(self.tiers)
        self._prefill.sync = self.sync
        self.assignment = WorkerAssignment(
            self.peer,
            spec.config.assignment,
            self._schedulers.phase_controls(),
            resize=self._resize,
            set_steps=scheduler.set_assignment,
            emit=self._emit,
        )

    # ---- calls from other processes ----

    async def reload(self, work: Reservation | PrefillTask) -> None:
        """Load KV pages of a prompt from tiers, if that pays; see `KvReloads.load`."""
        if self._reloads is not None:
            with self.sync():
                phase = self._prefill if isinstance(work, PrefillTask) else self.admission
                phase.check_accepts(work)  # type: ignore[arg-type]
            await self._reloads.load(work)

    async def read_ahead(self, prompt: PrefixRun) -> None:
        """Begin to load KV pages of a prompt that is not sent yet, see `KvReloads.read_ahead`."""
        if self._reloads is not None:
            await self._reloads.read_ahead(prompt)

    def reserve(self, reservation: Reservation) -> GrantedLease:
        """Reserve KV pages, see `DecodeAdmission.reserve`."""
        with self.sync():
            return self.admission.reserve(reservation)

    def prefill(self, task: PrefillTask) -> None:
        """Queue a prompt, see `PrefillScheduler.submit`."""
        with self.sync():
            self._prefill.submit(task)

    def abort(self, router_id: str, refs: Sequence[RequestRef]) -> None:
        """Abort these attempts of a router's requests."""
        with self.sync():
            self._schedulers.abort(router_id, refs)

    def allocate_pages(self, lease: Lease, pages: int, prefill: PeerRef) -> Sequence[int]:
        """Allocate a lease's pages, see `DecodeAdmission.allocate_pages`."""
        with self.sync():
            return self.admission.allocate_pages(lease, pages, prefill)

    def notice(self, notice: TransferNotice) -> None:
        """Process the notice that the KV of a lease has arrived."""
        with self.sync():
            self.admission.notice(notice)

    def release(self, lease: Lease, prefill: PeerRef) -> None:
        """Release a lease whose hand-over was cancelled."""
        with self.sync():
            self.admission.release(lease, prefill)

    def sync(self) -> AbstractContextManager[None]:
        """Return a context in which code outside of a step may change the worker."""
        return self._loop.sync()

    def assume(self, role: Role) -> None:
        """Change the role; a scheduler that closes finishes all its requests, with no time limit."""
        with self.sync():
            self.assignment.assume(replace(self.assignment.assignment, role=role), math.inf)

    def token_log(self, ref: RequestRef) -> StepLog | None:
        """Return the times of the tokens that an attempt decoded on this worker.

        Returns None without speculative decoding: every step decodes one token, so the step log has the times.
        """
        return None if self._decode.speculation is None else self._token_logs.get(ref, StepLog())

    def load(self) -> WorkerLoad:
        """Return the load report that a real worker in this state would send."""
        return load_of(self._schedulers, self.cache, self._loop.decoding, self._reported_cost.parameters, self.tiers)

    @property
    def info(self) -> WorkerInfo:
        """The registration that the worker would send now."""
        now = self.assignment
        return replace(
            self.spec.info,
            role=now.role,
            assignment=now.assignment,
            closing=now.closing,
            max_batch_requests=self._schedulers.batch_limit(now.role),
        )

    @property
    def idle(self) -> bool:
        """True if no step is in flight."""
        return self._loop.idle

    @property
    def busy_s(self) -> float:
        """Total computing time of the device so far, in seconds."""
        return self._loop.busy_s

    # ---- steps ----

    def _wake(self) -> None:
        self._loop.wake()

    def _resize(self, role: Role) -> None:
        with self.sync():
            self._schedulers.resize(role)

    def _step_ended(
        self, number: int, work: StepWork, events: Sequence[RoutedEvent], decoded: DecodedStep | None
    ) -> None:
        if self._decode.speculation is not None and decoded is not None:
            self._log_tokens(decoded)
        if events or work.prefill_tokens:
            self._publish_events(number, [routed.event for routed in events])

    def _log_tokens(self, step: DecodedStep) -> None:
        over = step.excluded_rows.difference(step.event_rows)
        for row in range(len(step.snapshot)):
            if row not in over:
                request, _, token_ids = step.tokens(row)
                log = self._token_logs.setdefault(request.reservation.ref, StepLog())
                log.extend(np.full(len(token_ids), self._clock.now))

    def _emit(self, routed: RoutedEvent) -> None:
        self._publish_events(len(self.log), [routed.event])

    def _publish_events(self, number: int, events: Sequence[RequestEvent]) -> None:
        changes = self.cache.changes()
        prefixes = () if changes is None else (changes,)
        self._publish(self, StepOutput(number, tuple(events), self.load(), prefixes))

    # ---- parts ----

    def _open_tiers(self) -> VirtualTiers | None:
        spec = self.spec
        if not spec.tiers or not spec.config.role.prefills:
            return None
        tiers = VirtualTiers(self.cache, spec.tiers, spec.device.page_bytes, self._clock, self.sync)
        tiers.start()
        return tiers

    def _make_reloads(self, tiers: VirtualTiers) -> KvReloads:
        return KvReloads(
            self.peer,
            self.cache,
            tiers,
            cost=lambda: self._reported_cost,
            chunk=self.spec.info.max_step_tokens,
            most_s=self.spec.config.rpc_timeout_s,
            wake=self._reload_ended,
        )

    def _reload_ended(self) -> None:
        """Let prompts go on that waited for the pages of a reload, and report the pages to the router."""
        self._wake()
        self._publish_events(len(self.log), ())

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
            transport_poll_s=self._clock,
            same_host=lambda _peer: True,
        )

    def _make_handoffs(self, peers: VirtualPeers) -> Handoffs:
        return Handoffs(
            me=self.peer,
            cache=self.cache,
            transport=self.transport,
            peers=peers,
            local=self.admission,
            checks=None,
            emit=self._emit,
            deadline_s=self.spec.config.kv_transfer_deadline_s,
            writing=WritingTime(lambda: round(self._clock() * 1e9)),
        )

    def _make_scheduler(self) -> StepScheduler:
        return StepScheduler(
            decode=self._decode,
            prefill=self._prefill,
            max_step_tokens=self.spec.config.engine.max_step_tokens,
            cost=lambda: self._reported_cost,
            assignment=self.spec.config.assignment,
        )
