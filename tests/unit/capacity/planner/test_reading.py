"""Windows from two scrapes: the planner sees the metrics that the processes export."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest

from router.config import RouterConfig
from router.refusal import Refusal, Refused
from router.requests.metrics import RouterMetrics
from tandem.capacity.planner.demand import LatencyTargets
from tandem.capacity.planner.reading import fitted, observe
from tandem.metrics import families as f
from tandem.metrics.exposition import Exposition, merge
from tandem.metrics.family import Family
from tandem.metrics.registry import Registry
from tandem.metrics.scrape import Scrape, ScrapeInterval
from tandem.protocol.cost_parameters import UNMEASURED, CostParameters
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.lifecycle.spans import Phase
from tandem.protocol.messages import Assignment, ModelFacts, PeerRef, Role, WorkerInfo
from tandem.settings.model import ModelSettings
from tandem.worker.reporting.metrics import step_costs

FACTS = ModelFacts("m", 10, 4096, (), "float32")
COST = CostParameters(1e-2, 2e-3, 3e-4, 4e-8, 5e-4, 6e-7, 150, 0.01, 99)
TARGETS_BY_CLASS = {"strict": LatencyTargets(2.0, 0.02), "quick": LatencyTargets(0.3, 0.06)}


def info(name: str, role: Role, assignment: Role | None = None, closing: Role | None = None) -> WorkerInfo:
    worker_assignment = None if assignment is None else Assignment(assignment)
    return WorkerInfo(
        PeerRef(name, 1),
        role,
        "a:1",
        FACTS,
        100,
        16,
        64,
        2048,
        "cpu",
        "fake",
        assignment=worker_assignment,
        closing=closing,
    )


class Cluster:
    """A router and two workers that export metrics, except those in `unreported`."""

    def __init__(self, unreported: Collection[Family] = ()) -> None:
        self.unreported = unreported
        self.router = RouterMetrics(RouterConfig("r", ModelSettings(Path(), ("m",)), ""))
        self.running = {"prefill-0": 0.0, "decode-0": 0.0}
        self.boards = [self._registry(name) for name in self.running]
        self.cost = COST
        self.router.registry.read(lambda: {f.REQUESTS_RUNNING: 0, f.REQUESTS_WAITING: 3})

    def _registry(self, name: str) -> Registry:
        registry = Registry({"model": "m", "worker": name})
        registry.read(lambda: {f.REQUESTS_RUNNING: self.running[name], f.REQUESTS_WAITING: 2.0})
        registry.read(lambda: {f.WORKER_INFO: {(name.partition("-")[0], "cpu", "float32"): 1.0}})
        registry.read(
            lambda: {family: fact for family, fact in step_costs(self.cost).items() if family not in self.unreported}
        )
        return registry

    def scrape(self, at_s: float) -> Scrape:
        boards = [self.router.registry, *self.boards]
        return Scrape(merge([Exposition(registry).render()[0].decode() for registry in boards]), at_s)


WORKERS = [info("prefill-0", Role.PREFILL, Role.PREFILL), info("decode-0", Role.DECODE, Role.DECODE)]


def test_an_observation_has_the_counts_of_its_window() -> None:
    cluster = Cluster()
    cluster.router.offered(1, 999, 7.0)  # before it
    before = cluster.scrape(100.0)
    for _ in range(4):
        cluster.router.offered(2, 600, 50.0)
    cluster.router.registry.counter(f.SLO_REQUESTS, "strict", "met").add(6)
    cluster.router.registry.counter(f.SLO_REQUESTS, "strict", "missed_itl").add(2)
    cluster.router.registry.counter(f.SLO_MISSED, "strict", Phase.DECODE).add(2)
    cluster.running["decode-0"] = 5.0
    seen = observe(ScrapeInterval(before, cluster.scrape(110.0)), WORKERS, lambda _: TARGETS_BY_CLASS)
    assert seen.seconds == 10.0
    assert (seen.offered.per_s, seen.offered.prompt_tokens, seen.offered.answer_tokens) == (0.8, 300.0, 50.0)
    assert (seen.prefill, seen.decode, seen.shared) == (1, 1, 0)
    assert (seen.waiting_requests, seen.waiting_tokens, seen.running_requests) == (3.0, 2 * 2 * 300.0, 5.0)
    assert (seen.kept.met, seen.kept.missed[Phase.DECODE], seen.kept.total) == (6.0, 2.0, 8.0)
    assert seen.targets == TARGETS_BY_CLASS["strict"]
    assert seen.answers is not None
    assert (seen.answers.kv_tokens, seen.answers.longest_tokens) == (1600, 4096)
    assert seen.answers.decode_speedup == 1.0
    got = seen.answers.cost
    assert (got.base_s, got.prompt_base_s, got.token_s, got.pair_s, got.row_s, got.context_s, got.free_tokens) == (
        pytest.approx((1e-2, 2e-3, 3e-4, 4e-8, 5e-4, 6e-7, 150))
    )


def test_tokens_of_steps_with_drafts_count() -> None:
    cluster = Cluster()
    cluster.boards[1].read(lambda: {f.SPECULATION_SPEEDUP: 1.7})
    seen = observe(ScrapeInterval(cluster.scrape(0.0), cluster.scrape(10.0)), WORKERS, lambda _: TARGETS_BY_CLASS)
    assert seen.answers is not None
    assert seen.prompts is not None
    assert (seen.answers.decode_speedup, seen.prompts.decode_speedup) == (1.7, 1.0)


def test_rejected_requests_are_counted_by_reason() -> None:
    cluster = Cluster()
    before = cluster.scrape(0.0)
    for reason in Refusal:
        cluster.router.refused("strict", Refused(reason, "no"))
        cluster.router.offered(1, 100, 10.0)
    cluster.router.refused("strict", InvalidArgument("prompt", "is wrong"))
    seen = observe(ScrapeInterval(before, cluster.scrape(10.0)), WORKERS, lambda _: TARGETS_BY_CLASS)
    assert seen.offered.refused_per_s == pytest.approx(0.4), "nobody there, or a wrong request: these were not offered"
    assert seen.offered.crowded_per_s == pytest.approx(0.1)


def test_targets_of_classes_with_few_requests_do_not_count() -> None:
    cluster = Cluster()
    before = cluster.scrape(0.0)
    cluster.router.registry.counter(f.SLO_REQUESTS, "strict", "met").add(2)
    cluster.router.registry.counter(f.SLO_REQUESTS, "quick", "met").add(98)
    seen = observe(ScrapeInterval(before, cluster.scrape(1.0)), WORKERS, lambda _: TARGETS_BY_CLASS)
    assert seen.targets == TARGETS_BY_CLASS["quick"]


def test_a_worker_counts_by_its_assigned_role() -> None:
    changing = [info("prefill-0", Role.BOTH, Role.PREFILL, Role.DECODE), info("decode-0", Role.DECODE, Role.DECODE)]
    leaving = info("decode-1", Role.DECODE, Role.DECODE, Role.DECODE)
    cluster = Cluster()
    seen = observe(ScrapeInterval(cluster.scrape(0.0), cluster.scrape(1.0)), [*changing, leaving], lambda _: {})
    assert (seen.prefill, seen.decode) == (1, 1)


def test_the_fitted_costs_have_the_largest_noise_of_the_workers() -> None:
    cluster = Cluster()
    cluster.cost = replace(COST, mixed_step_margin=1.27)
    facts = fitted(cluster.scrape(0.0))
    assert facts is not None
    assert facts.mixed_step_margin == pytest.approx(1.27)


def test_a_worker_that_reports_no_noise_has_the_default() -> None:
    """For instance a worker of an older release."""
    cluster = Cluster(unreported=(f.STEP_MIXED_NOISE,))
    facts = fitted(cluster.scrape(0.0))
    assert facts is not None
    assert facts.mixed_step_margin == UNMEASURED.mixed_step_margin


def test_unmeasured_costs_do_not_count() -> None:
    cluster = Cluster()
    cluster.cost = CostParameters()
    seen = observe(ScrapeInterval(cluster.scrape(0.0), cluster.scrape(1.0)), WORKERS, lambda _: TARGETS_BY_CLASS)
    assert seen.prompts is None
    assert seen.answers is None
