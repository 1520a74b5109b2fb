"""A simulated cluster with the settings of a measured one, and simulated loads with the same reports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from router.config import RouterConfig
from router.requests.chunk_budget import ChunkBudget, must_not_wait
from tandem.capacity.simulation.cluster import VirtualCluster
from tandem.capacity.simulation.hardware import Hardware
from tandem.capacity.simulation.network import DeliveryDelay, Network
from tandem.capacity.simulation.prompt import VirtualPrompt, page_names
from tandem.capacity.simulation.request import LoadRequest, Outcome
from tandem.capacity.simulation.spec import WorkerSpec
from tandem.cli.load.record import RequestRecord
from tandem.cli.load.report import LoadReport, make_report
from tandem.cli.load.slo import SloCell
from tandem.cli.load.workload import Arrival, Block, Workload
from tandem.cluster.supervision.roles import plan
from tandem.engine.config import EngineConfig
from tandem.settings.cluster import ClusterSettings
from tandem.settings.slo import BEST_EFFORT, SloClass
from tandem.worker.config import WorkerConfig


class Chunks:
    """Models the router's budget of chunks, which delays tokens; first and last tokens are never delayed."""

    def __init__(self, chunks_per_s: float, delay_max_s: float) -> None:
        self._budget = ChunkBudget(chunks_per_s, delay_max_s)

    def sent(self, answers: Sequence[Sequence[float]]) -> list[Sequence[float]]:
        """Return the times at which tokens leave the router, given the times at which they reach it, by answer."""
        flushes = self._flushes([np.asarray(times[1:-1]) for times in answers])
        return [self._delayed(times, flushes) for times in answers]

    def _flushes(self, inner: Sequence[np.ndarray]) -> list[float]:
        if not inner:
            return []
        arrivals = np.concatenate(inner)
        order = np.argsort(arrivals, kind="stable")
        arrivals, owners = arrivals[order], np.repeat(np.arange(len(inner)), [len(times) for times in inner])[order]
        flushes: list[float] = []
        at = 0
        while at < len(arrivals):
            first = float(arrivals[at])
            together = int(np.searchsorted(arrivals, first, side="right"))
            last = first + self._budget.wait_s(first, together - at)
            end = int(np.searchsorted(arrivals, last, side="right"))
            self._budget.spend(last, len(np.unique(owners[at:end])))
            flushes.append(last)
            at = end
        return flushes

    @staticmethod
    def _delayed(answer: Sequence[float], flushes: Sequence[float]) -> Sequence[float]:
        if len(answer) < 3 or not flushes:
            return answer
        places = np.searchsorted(flushes, np.asarray(answer[1:-1]), side="left")
        moments = np.minimum(np.asarray(flushes)[np.minimum(places, len(flushes) - 1)], answer[-1])
        return [answer[0], *moments.tolist(), answer[-1]]


_TIMEOUT = "DEADLINE_EXCEEDED"
LONE_PROMPT, LONE_TOKENS = 512, 64


def make_cluster(
    machine: Hardware,
    settings: Mapping[str, object],
    network: Network,
    *,
    classes: Sequence[SloClass] = (),
    jumps: bool = True,
) -> VirtualCluster:
    """Return the simulated cluster that `tandem up` would start with these settings."""
    asked = ClusterSettings.of(Path(machine.name), device="cuda", **settings)
    specs = [
        WorkerSpec(
            WorkerConfig(
                worker_id=slot.worker_id,
                role=slot.role,
                engine=EngineConfig(asked.served, **asked.engine.values()),
                **asked.worker.values(),
            ),
            machine.device,
            machine.facts,
            machine.drafts,
        )
        for slot in plan(asked, asked.worker_count)
    ]
    config = RouterConfig(
        "router", asked.served, "", mode=asked.router.mode, slo_classes=(*asked.router.slo_classes, *classes)
    )
    return VirtualCluster(specs, config, network, jumps)


def make_requests(workload: Workload, page_tokens: int, slo: SloClass) -> list[LoadRequest]:
    """Return the requests of a load, all of one SLO class. Pages with equal tokens have equal names."""
    requests = []
    for number, arrival in enumerate(workload.arrivals):
        segments = [(block.key, 0, block.tokens) for block in arrival.prompt]
        prompt = VirtualPrompt(number, arrival.prompt_tokens, page_names(segments, page_tokens))
        requests.append(LoadRequest(arrival.due_s, prompt, arrival.new_tokens, slo))
    return requests


@dataclass(frozen=True, slots=True)
class Stage:
    """The environment of simulated loads. Answers may take `drain_s` seconds after the last due time."""

    machine: Hardware
    network: Network
    drain_s: float = 30.0

    def simulate(
        self, settings: Mapping[str, object], workload: Workload, cells: Sequence[SloCell], slo: SloClass = BEST_EFFORT
    ) -> tuple[LoadReport, VirtualCluster]:
        """Run a load through a new cluster; return a report like that of a measured load, and the cluster."""
        fitted = workload.fitted(self.machine.model.max_context)
        cluster = make_cluster(
            self.machine, settings, self.network, classes=() if slo.name in _DEFAULT_NAMES else (slo,)
        )
        requests = make_requests(fitted, self.machine.page_tokens, slo)
        end_s = fitted.seconds + self.drain_s
        outcomes = cluster.run(requests, end_s)
        request_records = records(requests, outcomes, self.network, end_s, self.machine.idle_step_s)
        return make_report(fitted, request_records, cells, 1.0), cluster

    def unloaded_step(self) -> float:
        """Return the decode step of an idle cluster in seconds.

        It is the mean gap of a single answer after its first token.
        """
        settings = {"mode": "disaggregated", "prefill": 1, "decode": 1}
        lone = Workload("lone", 1.0, 1.0, 0, (Arrival(0.0, (Block(0, LONE_PROMPT),), LONE_TOKENS),))
        report, _ = self.simulate(settings, lone, ())
        moments = report.records[0].token_s[1:]
        return (moments[-1] - moments[0]) / (len(moments) - 1)


_DEFAULT_NAMES = {slo_class.name for slo_class in ClusterSettings.of(Path("any")).router.slo_classes}


def _sent(outcomes: Sequence[Outcome], network: Network, idle_step_s: float) -> list[Sequence[float]]:
    """Return when the router sends the tokens of each answer.

    Answers that may be delayed share the router's budget of chunks.
    """
    moments: list[Sequence[float]] = [outcome.token_s(network.event_s) for outcome in outcomes]
    if network.chunks_per_s is not None:
        longest_s = network.chunk_delay_max_s
        waiting = [place for place, outcome in enumerate(outcomes) if not _keeps_pace(outcome, idle_step_s, longest_s)]
        sent = Chunks(network.chunks_per_s, longest_s).sent([moments[place] for place in waiting])
        for place, sent_s in zip(waiting, sent, strict=True):
            moments[place] = sent_s
    return moments


def _keeps_pace(outcome: Outcome, idle_step_s: float, longest_s: float) -> bool:
    """Return True if the router sends the tokens of this answer without delay.

    It does if a delay would miss an ITL target that the prediction at placement meets.
    """
    slo, prediction = outcome.asked.slo, outcome.prediction
    if prediction is None or not slo.has_gap_target:
        return False
    return must_not_wait(slo.gap_target(idle_step_s), prediction.itl_s, prediction.itl_s, longest_s)


def records(
    requests: Sequence[LoadRequest],
    outcomes: Sequence[Outcome],
    network: Network,
    deadline_s: float,
    idle_step_s: float,
) -> list[RequestRecord]:
    """Return the records that clients would have made; answers that are incomplete at `deadline_s` have none.

    Targets in steps are multiples of `idle_step_s`.
    """
    delay = DeliveryDelay(network)
    moments = [delay.late(sent_s).tolist() for sent_s in _sent(outcomes, network, idle_step_s)]
    ended = {id(outcome.asked): (outcome, token_s) for outcome, token_s in zip(outcomes, moments, strict=True)}
    request_records = []
    for index, asked in enumerate(requests):
        outcome, token_s = ended.get(id(asked), (Outcome(asked, _TIMEOUT, deadline_s), ()))
        whole = not outcome.error
        request_records.append(
            RequestRecord(
                index,
                asked.due_s,
                asked.due_s,
                token_s[-1] if token_s else outcome.ended_s,
                tuple(token_s),
                asked.new_tokens,
                len(token_s),
                "LENGTH" if whole else "",
                outcome.error,
                prompt_tokens=len(asked.prompt) if whole else 0,
                completion_tokens=len(token_s) if whole else 0,
                cached_tokens=outcome.cached_tokens,
                prefill_worker=outcome.prefill_worker,
                decode_worker=outcome.decode_worker,
            )
        )
    return request_records
