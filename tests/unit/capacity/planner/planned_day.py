"""Runs a simulated cluster through a day of changing load, with a constant split or with the planner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.strategies.stage import make_cluster
from router.observability.request_outcome import Outcome as Kind
from router.observability.request_outcome import RequestOutcome
from tandem.capacity.planner.decision import Decision, Direction, Split, State
from tandem.capacity.planner.demand import LatencyTargets
from tandem.capacity.planner.load_ratio import WorkerFacts
from tandem.capacity.planner.observation import Observation, Offered, TargetCounts
from tandem.capacity.planner.policy import plan
from tandem.capacity.simulation.arrivals import Mix
from tandem.capacity.simulation.cluster import VirtualCluster
from tandem.capacity.simulation.hardware import Hardware
from tandem.capacity.simulation.network import Network
from tandem.capacity.simulation.request import LoadRequest, Outcome
from tandem.cluster.supervision.modes import Topology, assign
from tandem.cost_model.answer_length import AnswerLengths
from tandem.cost_model.step_cost import StepCost
from tandem.protocol.lifecycle.spans import Phase
from tandem.protocol.messages import Role
from tandem.protocol.mode import Mode
from tandem.settings.planner import Limits
from tandem.settings.slo import SloClass

NETWORK = Network(chunks_per_s=None)
"""No limit on chunks: so many workers would have several routers."""
_QUEUE = 100_000
SAME_LIMIT = 4096
"""The limit of all answers as reported to the planner, so that no limit reveals a length."""


@dataclass(frozen=True, slots=True)
class Hour:
    """A period with a constant request mix."""

    name: str
    mix: Mix


@dataclass(frozen=True, slots=True)
class Day:
    """Consecutive hours, each `seconds` long."""

    hours: Sequence[Hour]
    seconds: float
    slo: SloClass
    seed: int = 0

    def requests(self, max_context: int) -> Iterator[LoadRequest]:
        """Yields the requests of all hours, by arrival."""
        for number, hour in enumerate(self.hours):
            yield from hour.mix.requests(
                self.seconds,
                self.slo,
                max_context,
                seed=self.seed + number,
                start_s=number * self.seconds,
                key=number * 10**9,
            )

    def hour_of(self, due_s: float) -> int:
        """Returns the number of the hour in which a request is due."""
        return min(int(due_s / self.seconds), len(self.hours) - 1)

    @property
    def end_s(self) -> float:
        """The end of the last hour."""
        return self.seconds * len(self.hours)


@dataclass(slots=True)
class Tally:
    """Requests of each hour: the number due, and the number that met their class."""

    due: list[int] = field(default_factory=list)
    met: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, hours: int) -> Tally:
        """Returns a tally of zeros."""
        return cls([0] * hours, [0] * hours)

    def per_s(self, seconds: float) -> list[float]:
        """Returns the goodput of each hour."""
        return [round(met / seconds, 3) for met in self.met]


@dataclass(frozen=True, slots=True)
class Change:
    """A change by the planner."""

    at_s: float
    split: str
    flips: int
    direction: str
    reason: str


@dataclass(slots=True)
class Run:
    """A run through one day with a constant split."""

    machine: Hardware
    day: Day
    split: Split
    step_policy: str
    settings: Mapping[str, object] = field(default_factory=dict, kw_only=True)
    """Further fields of `ClusterSettings`."""
    tally: Tally = field(init=False)
    cluster: VirtualCluster = field(init=False)

    def __post_init__(self) -> None:
        self.tally = Tally.of(len(self.day.hours))
        settings = {
            "mode": Mode.DISAGGREGATED,
            "prefill": 1,
            "decode": 1,
            "step_policy": self.step_policy,
            **self.settings,
        }
        pair = make_cluster(self.machine, settings, NETWORK, classes=(self.day.slo,))
        specs = [
            replace(spec, config=replace(spec.config, worker_id=f"{spec.config.role.value}-{number}"))
            for spec, count in zip(pair.specs, (self.split.prefill, self.split.decode), strict=True)
            for number in range(count)
        ]
        self.cluster = VirtualCluster(specs, replace(pair.config, max_queued_requests=_QUEUE), NETWORK)
        self.cluster.router.on_end = self._on_end

    @property
    def idle_step_s(self) -> float:
        """Seconds of an idle worker's decode step."""
        return self.machine.idle_step_s

    def go(self) -> Tally:
        """Runs the day; returns the goodput of each hour. Late answers count, missing ones are missed."""
        for request in self.day.requests(self.machine.model.max_context):
            self.cluster.clock.at(request.due_s + NETWORK.ingress_s, lambda asked=request: self._arrive(asked))  # type: ignore[misc]
        self.cluster.clock.run(self.day.end_s + self.day.seconds)
        return self.tally

    def _arrive(self, asked: LoadRequest) -> None:
        self.tally.due[self.day.hour_of(asked.due_s)] += 1
        self.cluster.router.arrive(asked)

    def _on_end(self, outcome: Outcome) -> None:
        self._end(outcome)

    def _end(self, outcome: Outcome) -> RequestOutcome:
        verdict = outcome.judge(self.day.slo, self.idle_step_s, outcome.token_s(NETWORK.event_s))
        self.tally.met[self.day.hour_of(outcome.asked.due_s)] += verdict.phase is None
        return verdict


@dataclass(slots=True)
class PlannedRun(Run):
    """A run in which the planner decides every `window_s` seconds, and its decisions are applied."""

    window_s: float = 10.0
    limits: Limits = field(default_factory=Limits)
    limits_known: bool = False
    """True if requests report their answers' lengths."""
    changes: list[Change] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    _state: State = field(default_factory=State)
    _offered: list[LoadRequest] = field(default_factory=list)
    _expected: float = 0.0
    _lengths: AnswerLengths = field(default_factory=AnswerLengths)
    _verdicts: list[RequestOutcome] = field(default_factory=list)

    def go(self) -> Tally:
        """Runs the day with the planner."""
        self.cluster.clock.after(self.window_s, self._look)
        return Run.go(self)

    def _arrive(self, asked: LoadRequest) -> None:
        self._offered.append(asked)
        self._expected += asked.new_tokens if self.limits_known else self._lengths.mean(SAME_LIMIT)
        Run._arrive(self, asked)

    def _end(self, outcome: Outcome) -> RequestOutcome:
        verdict = Run._end(self, outcome)
        if not outcome.error:
            self._lengths.learn(SAME_LIMIT, outcome.asked.new_tokens)
        self._verdicts.append(verdict)
        return verdict

    def _look(self) -> None:
        decision = plan(self._observe(), self.limits, self._state)
        self._state = decision.state
        self.decisions.append(decision)
        if decision.change is not Direction.NONE:
            self._apply(decision)
        if self.cluster.clock.now < self.day.end_s:
            self.cluster.clock.after(self.window_s, self._look)

    def _apply(self, decision: Decision) -> None:
        """Applies a decision like the controller: workers in a needed role keep it."""
        workers = {worker.peer.worker_id: worker for worker in self.cluster.workers.values()}
        roles = {worker_id: worker.assignment.assignment.role for worker_id, worker in workers.items()}
        assignments = assign(Topology(Mode.DISAGGREGATED, decision.split.prefill), roles)
        flipped = [
            worker_id for worker_id, assignment in assignments.items() if assignment.role is not roles[worker_id]
        ]
        for worker_id in flipped:
            workers[worker_id].assume(assignments[worker_id].role)
        now = round(self.cluster.clock.now, 3)
        self.changes.append(Change(now, decision.split.text, len(flipped), decision.change, decision.reason))

    def _observe(self) -> Observation:
        workers = list(self.cluster.workers.values())
        loads = [worker.load() for worker in workers]
        wanted = Counter(worker.assignment.assignment.role for worker in workers)
        facts = self._facts()
        rejected = [verdict for verdict in self._verdicts if verdict.outcome is Kind.REJECTED]
        offered = Offered(
            len(self._offered) / self.window_s,
            _mean([len(request.prompt) for request in self._offered]),
            0.0,
            self._expected / max(len(self._offered), 1),
            refused_per_s=len(rejected) / self.window_s,
            crowded_per_s=sum(verdict.phase is Phase.DECODE for verdict in rejected) / self.window_s,
        )
        missed = Counter(verdict.phase for verdict in self._verdicts if verdict.phase is not None)
        seen = Observation(
            seconds=self.window_s,
            offered=offered,
            targets=LatencyTargets(self.day.slo.ttft_s, self.day.slo.gap_target(self.idle_step_s) / StepCost().margin),
            prompts=facts,
            answers=facts,
            prefill=wanted[Role.PREFILL],
            decode=wanted[Role.DECODE],
            waiting_requests=len(self.cluster.router.scheduler.queue),
            waiting_tokens=sum(load.prefill_tokens for load in loads),
            running_requests=sum(load.decode_requests for load in loads),
            kept=TargetCounts(len(self._verdicts) - sum(missed.values()), missed),
        )
        self._offered, self._verdicts, self._expected = [], [], 0.0
        return seen

    def _facts(self) -> WorkerFacts:
        info = next(iter(self.cluster.workers.values())).info
        tokens = self.machine.pages * self.machine.page_tokens
        sizes = info.max_batch_requests, info.max_step_tokens, info.model.max_context
        return WorkerFacts(self.machine.reported_cost, tokens, *sizes)


def _mean(values: list[int]) -> float:
    return sum(values) / len(values) if values else 0.0
