"""A simulated worker: both halves, their scheduler and their cache over a device that only takes time.

As in `worker/loop.py` a step is planned and launched while the one before it runs. Whoever calls in from outside finds
the worker where it is at that moment: steps that were taken at once are caught up with first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from costs.step_cost import StepCost
from decode_worker.admission import DecodeAdmission
from engine.batch import StepResult
from engine.cache.page_pool import PagePool
from engine.cache.prefix_cache import PrefixCache
from prefill_worker.half import PrefillHalf
from prefill_worker.request import PrefillRequest
from simulation.clock import VirtualClock
from simulation.duty import VirtualDuty
from simulation.flights import Flight, Flights
from simulation.handover import DecodeEnd, VirtualHandover
from simulation.network import Network, Wire
from simulation.prompt import PageNames
from simulation.spec import WorkerSpec
from simulation.steady import SteadyDecodeHalf, SteadyRun, later
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
from worker.report import load_of
from worker.scheduler import StepScheduler


@dataclass(frozen=True, slots=True)
class WorkerNews:
    """What the router hears of a step: `number` is its place in the worker's log."""

    number: int
    events: Sequence[RequestEvent]
    load: WorkerLoad
    prefixes: PrefixChanges | None


Publish = Callable[["VirtualWorker", WorkerNews], None]


class _Soon:
    """In place of an event loop: what the engine thread hands over is there at once, and looked at soon."""

    def __init__(self) -> None:
        self.called = False

    def call_soon_threadsafe(self, call: Callable[..., object], *args: object) -> None:
        self.called = True
        call(*args)


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
        self._clock, self._network, self._peers, self._publish = clock, network, peers, publish
        self._jumps = jumps
        self._told = StepCost(spec.device.told)
        self._flights = Flights(StepCost(spec.device.truth))
        self.log = self._flights.log
        self.pool = PagePool(spec.device.pages)
        self.cache = PrefixCache(self.pool, self.page_tokens, enabled=spec.config.prefix_cache, names=PageNames())
        self.admission = self._make_admission()
        self._decode = SteadyDecodeHalf(
            requests=self.admission.running,
            model=spec.model,
            page_tokens=self.page_tokens,
            max_batch_requests=spec.info.max_batch_requests,
        )
        self._soon = _Soon()
        self._prefill = PrefillHalf(
            config=spec.config.prefill,
            me=self.peer,
            cache=self.cache,
            model=spec.model,
            local=self.admission,
            hand_over=self._hand_over,
            wake=self._on_wake,
            events=self._soon,
        )
        self._halves = Halves(
            spec.config, self.cache, spec.model, prefill=self._prefill, decode=self._decode, admission=self.admission
        )
        self.duty = VirtualDuty(spec.config.role, self._halves, clock, self.visit)
        self._scheduler = StepScheduler(
            decode=self._decode,
            prefill=self._prefill,
            max_step_tokens=spec.config.engine.max_step_tokens,
            cost=lambda: self._told,
            duty=spec.config.duty,
        )
        self._handovers: dict[PrefillRequest, VirtualHandover] = {}
        self._steady: SteadyRun | None = None
        self._plan_number = 0
        self._awaited = False
        """Whether the clock calls at the end of what runs."""
        self._woken = False
        self._inside = False

    # ---- who calls in ----

    def reserve(self, reservation: Reservation) -> GrantedLease:
        """See `DecodeAdmission.reserve`."""
        with _Visit(self):
            return self.admission.reserve(reservation)

    def prefill(self, task: PrefillTask) -> None:
        """See `PrefillHalf.submit`."""
        with _Visit(self):
            self._prefill.submit(task)

    def abort(self, router_id: str, refs: Sequence[RequestRef]) -> None:
        with _Visit(self):
            self._halves.abort(router_id, refs)

    def allot(self, lease: Lease, pages: int, prefill: PeerRef) -> int:
        with _Visit(self):
            return len(self.admission.allot(lease, pages, prefill))

    def notice(self, notice: TransferNotice) -> None:
        with _Visit(self):
            self.admission.notice(notice)

    def release(self, lease: Lease, prefill: PeerRef) -> None:
        with _Visit(self):
            self.admission.release(lease, prefill)

    def visit(self) -> AbstractContextManager[None]:
        """For who acts inside of it, but not from a step."""
        return _Visit(self)

    def decode_end(self, peer: PeerRef) -> DecodeEnd:
        return self._peers[peer]

    def tell(self, request: PrefillRequest, event: RequestEvent) -> None:
        """A hand-over has news for the router."""
        self._publish(self, WorkerNews(len(self.log), (event,), self.load(), self.cache.changes()))

    def load(self) -> WorkerLoad:
        """As a real one tells it."""
        decoding = self._scheduler.decoding
        if self._steady is not None:
            decoding = later(decoding, self._steady.over(self._clock.now))
        return load_of(self._halves, self.cache, decoding, self._told.parameters)

    @property
    def info(self) -> WorkerInfo:
        """As it would register now."""
        role, info = self.duty.role, self.spec.info
        duty = replace(self.spec.config.duty, role=self.duty.wanted)
        limit = self._halves.batch_limit(role)
        return replace(info, role=role, duty=duty, closing=self.duty.closing, max_batch_requests=limit)

    @property
    def idle(self) -> bool:
        return self._flights.none

    @property
    def busy_s(self) -> float:
        """Time of the device so far."""
        run = self._steady
        return self._flights.busy_s + (0.0 if run is None else run.seconds(run.over(self._clock.now)))

    # ---- steps ----

    def _step(self) -> None:
        """Launch until one step runs and another one waits behind it, or nothing is left to launch."""
        while not self._flights.push(self._launch()):
            pass

    def _launch(self) -> Flight | None:
        planned = self._scheduler.plan()
        if planned is None:
            return None
        chunks = [None if row.draw is None else 0 for row in planned.batch.chunks]
        return self._flights.launch(planned.work, [*[0] * len(planned.batch.tokens), *chunks], self._clock.now)

    def _finish(self, number: int, flight: Flight) -> None:
        """A step has ended, by its number in the log."""
        told = self._scheduler.apply(flight.work, StepResult(flight.drawn))
        self._prefill.announce()
        events = [routed.event for routed in told.events]
        if events or flight.work.prefill_tokens:
            self._publish(self, WorkerNews(number, events, self.load(), self.cache.changes()))

    def _look_at_handovers(self) -> None:
        """If the engine has done something for any of them."""
        if not self._soon.called:
            return
        self._soon.called = False
        for request, handover in list(self._handovers.items()):
            handover.look()
            if handover.over:
                self._handovers.pop(request, None)

    def _on_time(self, plan_number: int) -> None:
        """What was waited for has happened."""
        if plan_number != self._plan_number:
            return
        self._inside = True
        if self._steady is not None:
            self._pass(self._steady, self._steady.ahead.steps)
        landed = self._flights.land()
        if landed is not None:
            self._finish(*landed)
        self._step()
        self._look_at_handovers()
        self._inside = False
        self._wait()

    def _wait(self) -> None:
        """Plan when to look again."""
        self._plan_number += 1
        self._steady = self._woken_steady()
        flight = self._flights.first
        self._awaited = flight is not None
        if flight is None:
            return
        end_s = flight.end_s if self._steady is None else float(self._steady.ends_s[self._steady.ahead.steps])
        self._clock.at(end_s, partial(self._on_time, self._plan_number))

    def _woken_steady(self) -> SteadyRun | None:
        """What can be taken at once from here."""
        self._woken = False
        if not self._jumps or not self._flights.only_decode or self._newcomers:
            return None
        return self._flights.steady(self._decode.look_ahead(self.pool.room))

    @property
    def _newcomers(self) -> bool:
        """Whether somebody waits to be in a step."""
        return bool(self.admission.running.ready or self._prefill.waiting().prompts)

    def catch_up(self) -> None:
        """Who comes finds the pages as they are by now; the rest of the steps that have ended can wait until something
        of it matters.
        """
        if self._steady is not None and self._clock.now >= self._steady.turn_s:
            self._pass(self._steady, self._steady.over(self._clock.now))

    def _pass(self, run: SteadyRun, steps: int) -> None:
        """The next steps of the steady run are over."""
        self._steady, self._awaited = None, False
        newest = self._flights.skip(run, steps)
        if newest is not None:
            self._decode.pass_steps(steps)
            self._scheduler.decoding = newest

    def _on_wake(self) -> None:
        """There may be work."""
        self._woken = True

    def visited(self) -> None:
        """Somebody was here: begin, if there was nothing to do, else see whether the steps to come are still alike."""
        if self._inside:
            return
        if self.idle and self._woken:
            self._inside = True
            self._step()
            self._look_at_handovers()
            self._inside = False
        run = self._steady
        if run is not None and (self._newcomers or self.pool.room <= run.ahead.needed):
            self._pass(run, run.over(self._clock.now))
        if not self._awaited:
            self._wait()

    # ---- parts ----

    def _hand_over(self, request: PrefillRequest, half: PrefillHalf) -> Any:
        handover = VirtualHandover(request, half, self, self._clock, self._network)
        self._handovers[request] = handover
        return handover

    def _make_admission(self) -> DecodeAdmission:
        return DecodeAdmission(
            config=self.spec.config.decode,
            me=self.peer,
            cache=self.cache,
            model=self.spec.model,
            clock=self._clock,
            expect=lambda _leases: None,
            emit=self._emit,
            wake=self._on_wake,
            listened_s=self._clock,
            is_near=lambda _peer: True,
        )

    def _emit(self, routed: RoutedEvent) -> None:
        self._publish(self, WorkerNews(len(self.log), (routed.event,), self.load(), self.cache.changes()))


class _Visit(AbstractContextManager[None]):
    """A call from outside: what has ended by now has, and what comes next is planned anew."""

    def __init__(self, worker: VirtualWorker) -> None:
        self._worker = worker

    def __enter__(self) -> None:
        self._worker.catch_up()

    def __exit__(self, *_: object) -> None:
        self._worker.visited()
