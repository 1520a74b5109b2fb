"""Placement if a worker can pull the first pages of a prompt from another one."""

import math
from dataclasses import replace

import pytest

from router.placement.policy import Placement, PlacementPolicy
from router.placement.queue import QueuedRequest
from router.placement.worker_state import WorkerState
from tandem.protocol.messages import PrefixSource, Role, TierLoad
from tandem.protocol.mode import Mode
from tandem.protocol.prefixes import KvTier
from tests.unit.router.fleets import TestFleet, load, names, need

BIG = {"pages_total": 10_000, "max_step_tokens": 2048, "max_batch_requests": 256}
DIGESTS = tuple(number.to_bytes(16, "little") for number in range(125))


@pytest.fixture
def at() -> TestFleet:
    fleet = TestFleet()
    for name in ("p0", "p1"):
        fleet.add(name, Role.PREFILL, address=f"{name}:1", **BIG)
    fleet.add("d", Role.DECODE, address="d:1", **BIG)
    return fleet


def placed(at: TestFleet, request: QueuedRequest) -> Placement:
    placement = PlacementPolicy(Mode.ADAPTIVE).place(request, at.fleet, 0.0)
    assert placement is not None
    return placement


def pulls(worker: WorkerState, page_s: float, queued: int = 0) -> None:
    worker.report(replace(load(), cost=worker.cost.parameters, pulls=TierLoad(KvTier.PEER, page_s, queued)))


def test_a_prefill_worker_pulls_what_the_decode_worker_has(at: TestFleet) -> None:
    """2,000 tokens take 40 ms; the decode worker has 100 of the 125 pages."""
    at.fleet.prefixes.store(at.workers["d"].slot, DIGESTS[:100])
    asked = need(2000, digests=DIGESTS)
    assert placed(at, asked).source is None, "no worker pulls"
    for name in ("p0", "p1"):
        pulls(at.workers[name], 1e-5)
    placement = placed(at, asked)
    assert names(placement) == ("p0", "d")
    assert placement.source == PrefixSource(at.workers["d"].peer, "d:1", 1600)
    assert (placement.cached_tokens, placement.computed_tokens) == (1600, 400)
    assert placement.prompt.source == "d"
    assert placement.prompt.reload_s == pytest.approx(100 * 1e-5)
    assert placement.prompt.ttft_s == pytest.approx(placement.ttft_s)


@pytest.mark.parametrize(("page_s", "queued"), [(1e-3, 0), (1e-5, 100_000), (math.inf, 0)])
def test_a_slow_link_or_a_long_queue_is_not_used(at: TestFleet, page_s: float, queued: int) -> None:
    at.fleet.prefixes.store(at.workers["d"].slot, DIGESTS[:100])
    for name in ("p0", "p1"):
        pulls(at.workers[name], page_s, queued)
    placement = placed(at, need(2000, digests=DIGESTS))
    assert (placement.source, placement.computed_tokens) == (None, 2000)


def test_an_idle_worker_pulls_instead_of_waiting_at_a_busy_one(at: TestFleet) -> None:
    at.fleet.prefixes.store(at.workers["p1"].slot, DIGESTS[:100])
    for name in ("p0", "p1"):
        pulls(at.workers[name], 1e-5)
    asked = need(2000, digests=DIGESTS)
    assert (names(placed(at, asked)), placed(at, asked).source) == (("p1", "d"), None)
    at.prompt("p1", 500)
    placement = placed(at, asked)
    assert names(placement) == ("p0", "d")
    assert placement.source is not None
    assert placement.source.peer == at.workers["p1"].peer


def test_workers_that_cannot_share_kv_are_no_source(at: TestFleet) -> None:
    at.fleet.prefixes.store(at.workers["d"].slot, DIGESTS[:100])
    for name in ("p0", "p1"):
        pulls(at.workers[name], 1e-5)
    asked = need(2000, digests=DIGESTS)
    at.fleet.incompatible.learn(at.workers["d"].peer, at.workers["p0"].peer, "another model")
    assert placed(at, asked).prefill == at.workers["p1"].peer
    at.fleet.set_live(at.workers["d"], live=False)
    at.add("d1", Role.DECODE, **BIG)
    assert placed(at, asked).source is None


def test_the_last_token_is_never_pulled(at: TestFleet) -> None:
    at.fleet.prefixes.store(at.workers["d"].slot, DIGESTS[:10])
    for name in ("p0", "p1"):
        pulls(at.workers[name], 1e-6)
    placement = placed(at, need(160, digests=DIGESTS[:10]))
    if placement.source is not None:
        assert placement.source.tokens == 144
    assert placement.computed_tokens >= 16
