"""Loads with a known bottleneck on simulated workers whose devices have ceilings; the diagnosis names it.

The real metrics are scraped during the load.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from router.config import RouterConfig
from tandem.capacity.simulation.cluster import VirtualCluster
from tandem.capacity.simulation.network import Network
from tandem.capacity.simulation.request import LoadRequest
from tandem.capacity.simulation.spec import Device, WorkerSpec
from tandem.capacity.simulation.worker import VirtualWorker
from tandem.cli.observe.why import findings
from tandem.cost_model.roofline import ModelSizes, Roofline, guess
from tandem.cost_model.step_cost import StepCost
from tandem.engine.config import EngineConfig
from tandem.metrics import families as f
from tandem.metrics.bottlenecks import Bottleneck, Diagnosis, diagnose
from tandem.metrics.exposition import Exposition, merge
from tandem.metrics.registry import Facts, Registry
from tandem.metrics.scrape import Scrape, ScrapeInterval
from tandem.metrics.worker_figures import figures_of
from tandem.protocol.errors import ResourceExhausted
from tandem.protocol.messages import GrantedLease, Reservation, Role
from tandem.protocol.mode import Mode
from tandem.settings.ceilings import Ceilings
from tandem.settings.model import ModelSettings
from tandem.worker.config import WorkerConfig
from tandem.worker.reporting.metrics import Utilization, WorkerMetrics
from tests.unit.capacity.simulation.stages import MODEL, PAGE_TOKENS, request

SIZES = ModelSizes(
    weights=8_000_000_000, weight_bytes=16_000_000_000, kv_bytes_per_token=131_072, attention_flop_per_pair=524_288
)
"""Sizes of an 8B model in bfloat16."""
DEVICE = Ceilings(flops=6e14, bytes_per_s=4e12, launch_s=3e-4)
PREFILL, DECODE, BOTH = "prefill-0", "decode-0", "both-0"
FROM_S, TO_S = 0.8, 1.8
"""Start and end of the observed interval within the load."""


@dataclass
class Stage:
    """One prefill and one decode worker, or one of both roles."""

    ceilings: Ceilings = DEVICE
    pages: int = 8192
    batch: int = 64
    alone: bool = False
    network: Network = field(default_factory=Network)

    @property
    def roles(self) -> dict[str, Role]:
        return {BOTH: Role.BOTH} if self.alone else {PREFILL: Role.PREFILL, DECODE: Role.DECODE}

    def cluster(self) -> VirtualCluster:
        costs = replace(guess(SIZES, self.ceilings), observed=1)
        device = Device(costs, costs, self.pages, PAGE_TOKENS, PAGE_TOKENS * SIZES.kv_bytes_per_token)
        engine = EngineConfig.of(Path(), max_step_tokens=2048, max_batch_requests=self.batch)
        specs = [WorkerSpec(WorkerConfig(name, role, engine), device, MODEL) for name, role in self.roles.items()]
        mode = Mode.COLOCATED if self.alone else Mode.DISAGGREGATED
        config = RouterConfig("router", ModelSettings(Path(), ("model",)), "", mode=mode)
        return VirtualCluster(specs, config, self.network, jumps=False)

    def under(self, load: list[LoadRequest]) -> ScrapeInterval:
        """Runs the load; returns the interval between two scrapes of the real metrics."""
        cluster = self.cluster()
        registries = [metered(worker, Roofline(SIZES, self.ceilings)) for worker in cluster.workers.values()]
        router = Registry({"model": "model", "role": "router", "worker": "router"})
        router.read(lambda: {f.REQUESTS_WAITING: len(cluster.router.scheduler.queue)})
        scrapes: list[Scrape] = []

        def scrape() -> None:
            text = merge(Exposition(registry).render()[0].decode() for registry in (router, *registries))
            scrapes.append(Scrape(text, cluster.clock.now))

        for at_s in (FROM_S, TO_S):
            cluster.clock.at(at_s, scrape)
        cluster.run(load, until_s=TO_S + 1e-9)
        before, now = scrapes
        return ScrapeInterval(before, now)


def metered(worker: VirtualWorker, roofline: Roofline) -> Registry:
    """Returns a real worker's metrics, updated by a simulated one."""
    metrics = WorkerMetrics("model", worker.peer.worker_id, Utilization(roofline))
    finish: Callable[[int, Any], None] = worker._loop._finish
    actual_cost = StepCost(worker.spec.device.actual_cost)
    reserve = worker.reserve

    def finish_metered(number: int, flight: Any) -> None:
        seconds = actual_cost.seconds(flight.work)
        metrics.step(flight.work, seconds, seconds)
        finish(number, flight)

    def reserve_metered(reservation: Reservation) -> GrantedLease:
        try:
            return reserve(reservation)
        except ResourceExhausted:
            metrics.refused()
            raise

    metrics.writing = worker.handoffs.writing
    worker._loop._finish = finish_metered  # type: ignore[method-assign]
    worker.reserve = reserve_metered  # type: ignore[method-assign]
    worker.handoffs.emit = metrics.hearing(worker.handoffs.emit)

    def facts() -> Facts:
        load, pages = worker.load(), worker.pool.counts()
        return {
            f.REQUESTS_RUNNING: load.decode_requests,
            f.REQUESTS_WAITING: load.prefill_requests,
            f.KV_USAGE: worker._schedulers.kv_usage,
            f.KV_PAGES: {("advertised",): pages.advertised, ("others",): pages.total - pages.advertised},
            f.OPEN_LEASES: worker.admission.open_leases,
            f.PREEMPTIONS: worker.admission.requests.preemptions,
            f.BATCH_LIMIT: worker.spec.info.max_batch_requests,
            f.WORKER_READY: 1,
        }

    metrics.registry.read(facts)
    return metrics.registry


def load(every_s: float, prompt: int, answer: int) -> list[LoadRequest]:
    """Returns such a request every `every_s` seconds."""
    return [request(number * every_s, prompt, answer, key=number) for number in range(int(TO_S / every_s))]


@dataclass
class Case:
    stage: Stage
    load: list[LoadRequest]
    worker: str
    bottleneck: Bottleneck


NO_WIRE = Stage(pages=640, network=Network(bytes_per_s=1e7))
"""Pages for ten prompts of 1000 tokens, each of which takes 13 s to write."""
CASES = {
    "long prompts": Case(Stage(), load(0.05, 4000, 1), PREFILL, Bottleneck.COMPUTE),
    "a few answers": Case(Stage(), load(0.2, 50, 400), DECODE, Bottleneck.BANDWIDTH),
    "long answers, few pages": Case(Stage(pages=600), load(0.02, 100, 900), DECODE, Bottleneck.KV_CAPACITY),
    "room for prompts": Case(Stage(pages=400, alone=True), load(0.02, 400, 900), BOTH, Bottleneck.KV_CAPACITY),
    "a slow wire": Case(Stage(network=Network(bytes_per_s=2e9)), load(0.05, 1000, 8), PREFILL, Bottleneck.TRANSFER),
    "no hand-over ends": Case(NO_WIRE, load(0.02, 1000, 8), PREFILL, Bottleneck.TRANSFER),
    "no prompt comes": Case(NO_WIRE, load(0.02, 1000, 8), DECODE, Bottleneck.TRANSFER),
    "a small batch": Case(Stage(batch=4), load(0.02, 100, 400), DECODE, Bottleneck.QUEUE),
    "a slow host": Case(Stage(replace(DEVICE, launch_s=2e-2)), load(0.2, 50, 100), DECODE, Bottleneck.HOST),
    "next to nothing": Case(Stage(), load(0.4, 50, 8), DECODE, Bottleneck.NONE),
}


def diagnosis_of(interval: ScrapeInterval, worker: str) -> Diagnosis:
    return diagnose(figures_of(interval, worker))


@pytest.mark.parametrize("name", CASES)
def test_the_bottleneck_that_the_load_was_built_for(name: str) -> None:
    case = CASES[name]
    interval = case.stage.under(case.load)
    assert diagnosis_of(interval, case.worker).bottleneck is case.bottleneck, figures_of(interval, case.worker)
    names, bottlenecks = (list(map(str, column.cells)) for column in findings(interval).columns[:2])
    assert dict(zip(names, bottlenecks, strict=True))[case.worker] == case.bottleneck


def test_the_proposed_change_moves_the_bottleneck() -> None:
    """After the proposed change the bottleneck is gone."""
    queue, wire = CASES["a small batch"], CASES["a slow wire"]
    assert "--max-batch-requests" in diagnosis_of(queue.stage.under(queue.load), DECODE).change
    assert diagnosis_of(replace(queue.stage, batch=256).under(queue.load), DECODE).bottleneck is not Bottleneck.QUEUE
    assert "a faster transport" in diagnosis_of(wire.stage.under(wire.load), PREFILL).change
    assert (
        diagnosis_of(replace(wire.stage, network=Network()).under(wire.load), PREFILL).bottleneck
        is not Bottleneck.TRANSFER
    )


def test_hand_overs_that_do_not_end_hold_the_pages() -> None:
    """Unfinished hand-overs hold the pages of both workers: ten prompts write all the time, and none is handed over."""
    case = CASES["no hand-over ends"]
    interval = case.stage.under(case.load)
    assert interval.now.total(f.TRANSFER_SECONDS, "_count") == 0
    prefill, decode = figures_of(interval, PREFILL), figures_of(interval, DECODE)
    assert prefill.transferring == decode.others_transferring == pytest.approx(10, abs=0.01)
    assert prefill.kv_used > 0.9 < decode.arriving
    assert prefill.steps == prefill.arriving == prefill.others_transferring == decode.transferring == 0


def test_a_full_decode_worker_is_not_diagnosed_as_a_slow_transfer() -> None:
    """Answers fill the decode worker. Prompts wait for its pages at the router, not for the transport."""
    case = CASES["long answers, few pages"]
    interval = case.stage.under(case.load)
    assert diagnosis_of(interval, DECODE).bottleneck is Bottleneck.KV_CAPACITY
    assert diagnosis_of(interval, PREFILL).bottleneck is Bottleneck.NONE
    assert figures_of(interval, PREFILL).requests_waiting > 0
    assert figures_of(interval, PREFILL).transferring < 0.1


def test_figures_match_the_load() -> None:
    """A 4000-token prompt is two chunks of arithmetic and little else."""
    figures = figures_of(Stage().under(load(0.05, 4000, 1)), PREFILL)
    assert figures.busy == pytest.approx(1.0, abs=0.05)
    assert 0.85 < figures.compute < 1.0
    assert figures.bandwidth < 0.15
    assert figures.transferring == figures.preempted == figures.decoding == 0
    assert figures.prompts_waiting + figures.requests_waiting > 0
