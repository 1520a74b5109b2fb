"""A simulated router: the real queue, placement, worker calls, attempts, retries and ends, on simulated workers.

It differs from the real router in two parts. Tokens have no text, and a worker reports them with the events of an
attempt instead of one by one, because it may simulate many steps in a single operation. And there are no periodic
sweeps: no request times out, and no answer is preempted for another tenant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from router.config import RouterConfig
from router.observability.prediction_quality import PredictionQuality
from router.observability.request_outcome import JointOutcome
from router.placement.fleet import Fleet
from router.placement.policy import PlacementPolicy
from router.placement.scheduler import RequestScheduler
from router.requests.attempt_progress import AttemptProgress, failed
from router.requests.ends import RequestEnds
from router.requests.first_token import first_token_hold_s
from router.requests.live_requests import LiveRequests
from router.requests.metrics import RouterMetrics
from router.requests.placer import RequestPlacer
from router.requests.request import Admitted, RoutedRequest
from router.requests.worker_calls import DispatchCalls
from tandem.capacity.simulation.clock import VirtualClock
from tandem.capacity.simulation.link import VirtualLink
from tandem.capacity.simulation.network import Network
from tandem.capacity.simulation.request import LoadRequest, Outcome, Piece
from tandem.capacity.simulation.worker import VirtualWorker
from tandem.protocol.errors import ResourceExhausted
from tandem.protocol.messages import PeerRef, RequestEvent, SamplingParams, StepOutput


class _NoText:
    """The text of simulated tokens, see `TokenText`."""

    def decode(self, _ids: Sequence[int]) -> str:
        return ""

    def token_bytes(self, _token_id: int) -> bytes:
        return b""


class VirtualRouter:
    """A simulated router; it calls `on_end` once for each request, with its outcome."""

    def __init__(
        self,
        config: RouterConfig,
        clock: VirtualClock,
        network: Network,
        on_end: Callable[[Outcome], None],
        policy: PlacementPolicy | None = None,
    ) -> None:
        """`policy` chooses the workers; None = the product's policy in the configured mode."""
        self.on_end = on_end
        self.fleet = Fleet()
        self.prediction_quality = PredictionQuality()
        self._config, self._clock, self._network = config, clock, network
        self._links: dict[PeerRef, VirtualLink] = {}
        self._outcomes: dict[str, Outcome] = {}
        """Outcomes of the requests that have not ended, by internal id."""
        self._live = LiveRequests(_NoText(), clock)
        self.scheduler = RequestScheduler(config, policy or PlacementPolicy(config.mode), self.fleet, clock)
        self._ends = RequestEnds(
            config,
            self._live,
            self.scheduler,
            clock=clock,
            incompatible=self.fleet.incompatible,
            prediction_quality=self.prediction_quality,
            metrics=RouterMetrics(config, clock),
            pump=self._place_waiting,
            send_error=lambda _request, _error: None,  # `_end` reads the error's code
            forget=self._end,
        )
        self._progress = AttemptProgress(self._ends)
        self._calls = DispatchCalls(config, self._ends)
        self._placer = RequestPlacer(
            self._live,
            self.scheduler,
            self.fleet,
            self._ends,
            clock,
            link=self._links.__getitem__,
            start=self._start,
        )

    @property
    def requests(self) -> Iterable[RoutedRequest]:
        """Requests that have not ended."""
        return self._live.values()

    @property
    def links(self) -> Iterable[VirtualLink]:
        """The connections to all workers."""
        return self._links.values()

    def join(self, worker: VirtualWorker) -> None:
        """Add a serving worker."""
        self._links[worker.peer] = VirtualLink(
            worker,
            self.fleet,
            self._clock,
            self._network,
            router_id=self._config.router_id,
            on_change=self._place_waiting,
        )

    def apply_assignment(self, worker: VirtualWorker) -> None:
        """Update the router's state of the worker after its assignment has changed."""
        self._links[worker.peer].apply_registration()
        self._place_waiting()

    def arrive(self, asked: LoadRequest) -> None:
        """Admit or reject an arriving request."""
        outcome = Outcome(asked)
        (request,) = self._live.make(
            Admitted(
                f"r{self._live.arrivals + 1}",
                asked.prompt,  # type: ignore[arg-type]
                SamplingParams(max_tokens=asked.new_tokens, ignore_eos=True),
                (),
                0,
                (),
                tenant=asked.tenant,
                slo=asked.slo,
                digests=asked.prompt.names,
            ),
            JointOutcome(),
        )
        try:
            self.scheduler.enter(request.queued)
        except ResourceExhausted as error:
            outcome.refused, outcome.error, outcome.ended_s = error, error.code, self._clock.now
            self.on_end(outcome)
            return
        self._outcomes[request.internal_id] = outcome
        self._live.add([request])
        self._place_waiting()

    def _place_waiting(self) -> None:
        self._placer.schedule()

    def _start(self, request: RoutedRequest) -> None:
        if request.attempt == 1:
            outcome = self._outcomes[request.internal_id]
            outcome.prediction, outcome.placed_s = request.prediction, self._clock.now
        self._calls.start(request)

    def on_step_output(self, worker: VirtualWorker, output: StepOutput) -> None:
        """Receive a worker's output, of a step or between two steps, after the network's delay."""
        moment_s = self._clock.now
        self._clock.after(self._network.event_s, lambda: self._on_delivery(worker, output, moment_s))

    def _on_delivery(self, worker: VirtualWorker, output: StepOutput, moment_s: float) -> None:
        self._links[worker.peer].learn(output)
        for event in output.events:
            request = self._live.current(event.ref.request_id, event.ref.attempt)
            if request is not None:
                self._on_event(request, event, worker, output.step, moment_s)
        self._place_waiting()

    def _on_event(
        self, request: RoutedRequest, event: RequestEvent, worker: VirtualWorker, step: int, moment_s: float
    ) -> None:
        """Process an event of step number `step`, which ended at `moment_s` on the worker."""
        now = self._clock.now
        self._progress.note(request, event, now)
        if failed(event):
            self._progress.fail(request, event)
        elif event.token_ids or event.preempted:
            end = event.first_index + len(event.token_ids)
            self._log_tokens(request, event, worker, step, moment_s)
            first_index = request.assembler.count
            self._progress.add_tokens(request, first_index, (0,) * (end - first_index), now, finish=event.finish_reason)
            if (reason := request.assembler.finished) is not None:
                self._ends.finish(request, reason, "")
        self._progress.requeue_if_preempted(request, now)

    def _log_tokens(
        self, request: RoutedRequest, event: RequestEvent, worker: VirtualWorker, step: int, moment_s: float
    ) -> None:
        """Record when the attempt decoded its tokens up to this event.

        The newest token is that of step `step` or, if the request was preempted, that of the step before it. One token
        per step is assumed, unless the worker has logged the time of each token.
        """
        outcome = self._outcomes[request.internal_id]
        decoded = event.first_index + len(event.token_ids) - request.prior_output_tokens - 1
        if event.token_ids and event.first_index == request.prior_output_tokens:
            outcome.firsts_s.append(moment_s)
            if not event.first_index:
                outcome.held_s = first_token_hold_s(request, self._clock.now)
            return
        del outcome.pieces[len(outcome.firsts_s) - 1 :]
        tokens = worker.token_log(event.ref)
        piece = Piece(worker.log, step + (not event.preempted) - decoded, decoded)
        outcome.pieces.append(piece if tokens is None else Piece(tokens, 0, decoded))

    def _end(self, request: RoutedRequest) -> None:
        outcome = self._outcomes.pop(request.internal_id)
        outcome.error, outcome.ended_s = request.failure, self._clock.now
        outcome.attempts, outcome.cached_tokens = request.attempt, request.cached_tokens
        outcome.prefill_worker, outcome.decode_worker = request.prefill_worker, request.decode_worker
        outcome.placement = request.timeline().placement
        self.on_end(outcome)
