"""A simulated router: the real scheduler, worker states and prefix index, with calls that take network time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from router.config import RouterConfig
from router.observability.prediction_quality import PlacementRecord, PredictionQuality
from router.observability.request_outcome import rejected
from router.placement.fleet import Fleet
from router.placement.policy import Placement, PlacementPolicy
from router.placement.queue import QueuedRequest
from router.placement.scheduler import RequestScheduler, record
from router.placement.worker_state import BACK_OFF_S, WorkerState
from router.requests.first_token import hold_s
from router.requests.sweeper import SWEEP_S
from router.workers.prefix_feed import PrefixFeed
from tandem.capacity.simulation.clock import VirtualClock
from tandem.capacity.simulation.network import Network
from tandem.capacity.simulation.request import LoadRequest, Outcome, Piece, StepLog
from tandem.capacity.simulation.worker import VirtualWorker
from tandem.protocol.errors import Internal, ResourceExhausted, RoleClosed
from tandem.protocol.messages import (
    Destination,
    FinishReason,
    GrantedLease,
    PeerRef,
    PrefillTask,
    RequestEvent,
    RequestRef,
    Reservation,
    SamplingParams,
    StepOutput,
)
from tandem.protocol.prefixes import PrefixList

ROUTER_ID = "router"
_BUSY = (ResourceExhausted, RoleClosed)


@dataclass(slots=True, eq=False)
class Flow:
    """A request that has not ended, and its current attempt."""

    queued: QueuedRequest
    outcome: Outcome
    sampling: SamplingParams
    pair: Placement | None = None
    attempt: int = 1
    failures: int = 0
    tokens: int = 0
    """Number of answer tokens that the router has received, or that a failed attempt is known to have decoded."""

    @property
    def ref(self) -> RequestRef:
        """The request's id with its attempt."""
        return RequestRef(self.queued.internal_id, self.attempt)

    def close_piece(self, log: StepLog, number: int, event: RequestEvent, tokens: StepLog | None) -> None:
        """Record when the current attempt decoded its tokens up to this event.

        `log` has the worker's steps. The newest token is that of step `number` or, if the request was preempted, that
        of the step before it. One token per step is assumed, unless `tokens` has the time of each token.
        """
        self.tokens = event.first_index + len(event.token_ids)
        decoded = self.tokens - self.queued.prior_output_tokens - 1
        pieces, attempts = self.outcome.pieces, len(self.outcome.firsts_s)
        del pieces[attempts - 1 :]
        first = number + (not event.preempted) - decoded
        pieces.append(Piece(log, first, decoded) if tokens is None else Piece(tokens, 0, decoded))

    def placement_record(self, later_s: float) -> PlacementRecord | None:
        """Return the placement's prediction and the observed latencies.

        Returns None unless the first attempt completed the request. `later_s` is the delay of a token from its worker
        to the client, in seconds.
        """
        outcome = self.outcome
        if outcome.prediction is None or outcome.error or self.attempt > 1:
            return None
        gaps = self.tokens - 1
        return PlacementRecord(
            request_id=self.queued.internal_id,
            prefill_worker=outcome.prefill_worker,
            decode_worker=outcome.decode_worker,
            slo_class=self.queued.slo.name,
            prediction=outcome.prediction,
            ttft_s=outcome.firsts_s[0] + later_s - outcome.placed_s,
            itl_s=(outcome.ended_s - later_s - outcome.firsts_s[0]) / gaps if gaps > 0 else None,
            cached_tokens=outcome.cached_tokens,
        )


@dataclass(frozen=True, slots=True)
class _Link:
    """A worker, and the router's state of that worker."""

    worker: VirtualWorker
    state: WorkerState
    prefixes: PrefixFeed


@dataclass(frozen=True, slots=True)
class _StepOutputSource:
    """The worker that sent a step output, and the number and end time of the step."""

    worker: VirtualWorker
    number: int
    moment_s: float


@dataclass(slots=True)
class VirtualRouter:
    """A simulated router; it calls `on_end` once for each request, with its outcome."""

    config: RouterConfig
    clock: VirtualClock
    network: Network
    on_end: Callable[[Outcome], None]
    fleet: Fleet = field(default_factory=Fleet)
    prediction_quality: PredictionQuality = field(default_factory=PredictionQuality)
    scheduler: RequestScheduler = field(init=False)
    _links: dict[PeerRef, _Link] = field(default_factory=dict)
    _flows: dict[str, Flow] = field(default_factory=dict)
    _arrivals: int = 0
    _pumping: bool = False

    def __post_init__(self) -> None:
        placement = PlacementPolicy(self.config.mode)
        self.scheduler = RequestScheduler(self.config, placement, self.fleet, self.clock)

    def join(self, worker: VirtualWorker) -> None:
        """Add a serving worker."""
        state = WorkerState(worker.info, self.clock)
        self.fleet.join(state)
        feed = PrefixFeed(self.fleet.prefixes, state.slot)
        feed.load(PrefixList(0, ()))
        self._links[worker.peer] = _Link(worker, state, feed)
        state.report(worker.load())
        self.fleet.set_live(state, live=True)

    def apply_assignment(self, worker: VirtualWorker) -> None:
        """Update the router's state of the worker after its assignment has changed."""
        state, info = self._links[worker.peer].state, worker.info
        state.update(info)
        self.fleet.set_live(state, live=info.open is not None)
        self.pump()

    # ---- a request's dispatch ----

    def arrive(self, asked: LoadRequest) -> None:
        """Admit or reject an arriving request."""
        self._arrivals += 1
        prompt, sampling = asked.prompt, SamplingParams(max_tokens=asked.new_tokens, ignore_eos=True)
        queued = QueuedRequest(
            internal_id=f"r{self._arrivals}",
            sequence=self._arrivals,
            arrived_s=self.clock.now,
            prompt_tokens=len(prompt),
            max_tokens=asked.new_tokens,
            to_the_limit=sampling.runs_to_limit,
            digests=prompt.names,
            tenant=asked.tenant,
            slo=asked.slo,
        )
        flow = Flow(queued, Outcome(asked), sampling)
        try:
            self.scheduler.enter(queued)
        except ResourceExhausted as error:
            flow.outcome.rejected = rejected(error)
            self._end(flow, error.code)
            return
        self._flows[queued.internal_id] = flow
        self.pump()

    def pump(self) -> None:
        """Place queued requests on workers as long as the next one fits."""
        if self._pumping:
            return
        self._pumping = True
        while (queued := self.scheduler.head()) is not None:
            flow = self._flows[queued.internal_id]
            queued.prior_output_tokens = flow.tokens
            pair = self.scheduler.bind(queued)
            if pair is not None:
                self._place(flow, pair)
            elif not self.scheduler.may_pass(queued):
                break
        self._pumping = False

    def _place(self, flow: Flow, pair: Placement) -> None:
        flow.pair, outcome = pair, flow.outcome
        if flow.attempt == 1:
            outcome.prediction, outcome.placed_s = pair, self.clock.now
        outcome.prefill_worker = pair.prefill.worker_id
        outcome.decode_worker = pair.decode.worker_id if pair.decode is not None else ""
        decode = None if pair.decode is None else self._links[pair.decode].state
        record(flow.queued, pair, self._links[pair.prefill].state, decode)
        ref, call_s = flow.ref, self.network.call_s
        if pair.decode is None:
            self.clock.after(call_s, lambda: self._prefill(flow, ref, pair, None))
        else:
            self.clock.after(call_s, lambda: self._reserve(flow, ref, pair))

    def _reserve(self, flow: Flow, ref: RequestRef, pair: Placement) -> None:
        assert pair.decode is not None
        prompt = flow.outcome.asked.prompt + (0,) * flow.queued.prior_output_tokens
        reservation = Reservation(
            ROUTER_ID,
            ref,
            prompt,  # type: ignore[arg-type]
            flow.sampling,
            pair.prefill,
            prior_output_tokens=flow.queued.prior_output_tokens,
            gap_target_s=self._links[pair.decode].state.gap_target(flow.queued.slo),
        )
        try:
            granted: GrantedLease = self._links[pair.decode].worker.reserve(reservation)
        except _BUSY:
            self.clock.after(self.network.call_s, lambda: self._on_refusal(flow, ref, self._state_of(pair.decode)))
            return
        destination = Destination(pair.decode, "", granted.lease)
        self.clock.after(2 * self.network.call_s, lambda: self._prefill(flow, ref, pair, destination))

    def _prefill(self, flow: Flow, ref: RequestRef, pair: Placement, destination: Destination | None) -> None:
        prompt = flow.outcome.asked.prompt + (0,) * flow.queued.prior_output_tokens
        task = PrefillTask(
            ROUTER_ID,
            ref,
            prompt,  # type: ignore[arg-type]
            flow.sampling,
            destination,
            prior_output_tokens=flow.queued.prior_output_tokens,
        )
        try:
            self._links[pair.prefill].worker.prefill(task)
        except _BUSY:
            self.clock.after(self.network.call_s, lambda: self._on_refusal(flow, ref, self._state_of(pair.prefill)))
        else:
            self.clock.after(self.network.call_s, lambda: self._on_accepted(flow, ref, pair))

    def _on_accepted(self, flow: Flow, ref: RequestRef, pair: Placement) -> None:
        if flow.ref == ref:
            self._links[pair.prefill].state.prompt_accepted(flow.queued.internal_id)

    def _state_of(self, peer: PeerRef | None) -> WorkerState | None:
        return None if peer is None else self._links[peer].state

    def _on_refusal(self, flow: Flow, ref: RequestRef, asked: WorkerState | None) -> None:
        if asked is not None:
            asked.back_off()
            self.clock.after(BACK_OFF_S, self.pump)
        if flow.ref == ref:
            self._retry(flow)

    def _retry(self, flow: Flow) -> None:
        """Start another attempt, which continues after the tokens that were already sent."""
        self._release_workers(flow)
        flow.queued.resumed = flow.tokens > 0
        flow.attempt += 1
        flow.outcome.attempts += 1
        self.scheduler.queue.push(flow.queued)
        self.pump()

    def _release_workers(self, flow: Flow) -> None:
        pair, ref = flow.pair, flow.ref
        if pair is None:
            return
        flow.pair = None
        for peer in {pair.prefill, pair.decode or pair.prefill}:
            worker = self._links[peer].worker
            self.clock.after(self.network.call_s, lambda worker=worker: worker.abort(ROUTER_ID, [ref]))  # type: ignore[misc]
        self._release(flow, pair)

    def _release(self, flow: Flow, pair: Placement) -> None:
        self._links[pair.prefill].state.remove_prompt(flow.queued.internal_id)
        if pair.decode is not None:
            self._links[pair.decode].state.remove_answer(flow.queued.internal_id)

    # ---- step outputs of workers ----

    def on_step_output(self, worker: VirtualWorker, output: StepOutput) -> None:
        """Receive a worker's output, of a step or between two steps, after the network's delay."""
        moment = self.clock.now
        self.clock.after(self.network.event_s, lambda: self._on_delivery(worker, output, moment))

    def _on_delivery(self, worker: VirtualWorker, output: StepOutput, moment: float) -> None:
        link = self._links[worker.peer]
        for changes in output.prefixes:
            link.prefixes.take(changes)
        link.state.report(output.load)
        for event in output.events:
            flow = self._flows.get(event.ref.request_id)
            if flow is not None and flow.attempt == event.ref.attempt and flow.pair is not None:
                self._on_event(flow, flow.pair, event, _StepOutputSource(worker, output.step, moment))
        if not output.load.decode_requests and not output.load.prefill_tokens:
            for rounds in (1, 2):
                self.clock.after(rounds * SWEEP_S, link.state.expire_report)
        self.pump()

    def _on_event(self, flow: Flow, pair: Placement, event: RequestEvent, source: _StepOutputSource) -> None:
        if event.transfer is not None and pair.decode is not None:
            self._links[pair.decode].state.learn_transfer(event.transfer)
        if event.finish_reason is FinishReason.ERROR:
            self._fail_attempt(flow, event)
        elif event.preempted:
            self._close_piece(flow, event, source)
            self._retry(flow)
        elif event.token_ids and event.first_index == flow.queued.prior_output_tokens:
            self._links[pair.prefill].state.prompt_computed(flow.queued.internal_id)
            flow.outcome.firsts_s.append(source.moment_s)
            flow.tokens = event.first_index + 1
            if event.first_index == 0:
                flow.outcome.cached_tokens = event.cached_tokens
                flow.outcome.held_s = self._hold_s(flow, pair)
        elif event.token_ids:
            self._close_piece(flow, event, source)
        if event.finish_reason is FinishReason.LENGTH:
            self._release(flow, pair)
            self._end(flow, "")

    @staticmethod
    def _close_piece(flow: Flow, event: RequestEvent, source: _StepOutputSource) -> None:
        flow.close_piece(source.worker.log, source.number, event, source.worker.token_log(event.ref))

    def _hold_s(self, flow: Flow, pair: Placement) -> float:
        """Return the maximum time in seconds for which the first token is held back to be sent with the second."""
        queued = flow.queued
        return 0.0 if pair.decode is None else hold_s(queued.slo, self.clock.now - queued.arrived_s, queued.mean_tokens)

    def _fail_attempt(self, flow: Flow, event: RequestEvent) -> None:
        code = event.error.code if event.error is not None else Internal.code
        flow.failures += 1
        if flow.failures >= self.config.max_attempts:
            self._release_workers(flow)
            self._end(flow, code)
        else:
            self._retry(flow)

    def _end(self, flow: Flow, code: str) -> None:
        outcome = flow.outcome
        outcome.error, outcome.ended_s = code, self.clock.now
        if self._flows.pop(flow.queued.internal_id, None) is not None:
            self.scheduler.ended(flow.queued, flow.tokens)
            if (record := flow.placement_record(self.network.event_s)) is not None:
                self.prediction_quality.record(record)
        self.on_end(outcome)

    @property
    def flows(self) -> Sequence[Flow]:
        """Requests that have not ended."""
        return list(self._flows.values())
