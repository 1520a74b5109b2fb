"""Simulated workers with tiers: evicted prefixes are loaded instead of computed, in the time that the tier takes."""

from dataclasses import replace

import pytest

from tandem.capacity.simulation.cluster import VirtualCluster
from tandem.capacity.simulation.request import LoadRequest, Outcome
from tandem.capacity.simulation.spec import TierSpec
from tandem.protocol.messages import Role
from tandem.protocol.mode import Mode
from tandem.protocol.prefixes import KvTier
from tests.unit.capacity.simulation.stages import PAGE_TOKENS, cluster, moments, request
from tests.unit.capacity.simulation.test_prefix_hits import conversations, seen_before

PAGE_BYTES = 1024
HOST = TierSpec(KvTier.HOST, 1 << 30, PAGE_BYTES * 1e4)
"""A large tier that loads a page in 0.1 ms; the device computes it in 0.32 ms."""
PROMPT = 100 * PAGE_TOKENS
POOL = 250
"""Pages for two prompts and a half, so that three further prompts evict a prompt completely."""


def with_tiers(stage: VirtualCluster, *tiers: TierSpec, only: int | None = None) -> VirtualCluster:
    """The same cluster, whose workers (or worker number `only`) have tiers."""
    specs = [replace(spec, tiers=tiers if only in (None, number) else ()) for number, spec in enumerate(stage.specs)]
    return VirtualCluster(specs, stage.config, stage.network)


def alternating(*keys: int) -> list[LoadRequest]:
    """Prompts of these keys, 10 s apart."""
    return [request(10.0 * at, PROMPT + 1, 4, key=key) for at, key in enumerate(keys)]


def run_one(*tiers: TierSpec, keys: tuple[int, ...] = (1, 2, 3, 4, 1)) -> Outcome:
    stage = with_tiers(cluster(Mode.COLOCATED, [Role.BOTH], pages=POOL), *tiers)
    return stage.run(alternating(*keys))[-1]


def test_an_evicted_prefix_is_loaded_in_the_time_of_its_pages() -> None:
    recomputed, reloaded = run_one(), run_one(HOST)
    assert (recomputed.cached_tokens, reloaded.cached_tokens) == (0, PROMPT)
    assert recomputed.prediction is not None
    assert reloaded.prediction is not None
    # A step of 1,601 tokens, against 100 pages and a step of one token.
    assert moments(recomputed)[0] - moments(reloaded)[0] == pytest.approx((4 + 32.02) - (10 + 4.02))


def test_the_router_predicts_the_reload_once_its_rate_was_measured() -> None:
    first, second = run_one(HOST).prediction, run_one(HOST, keys=(1, 2, 3, 4, 1, 2)).prediction
    assert first is not None
    assert second is not None
    assert (first.prompt.reloaded_tokens, first.prompt.reload_s) == (PROMPT, 0.0), "a tier without a rate is tried"
    cost = second.prompt
    assert (cost.resident_tokens, cost.reloaded_tokens, cost.computed_tokens) == (0, PROMPT, 1)
    assert (cost.wait_s, cost.reload_s, cost.compute_s) == pytest.approx((0.0, 0.010, 0.00402))
    assert second.ttft_s == pytest.approx(cost.ttft_s)


def test_a_tier_slower_than_the_device_is_left() -> None:
    slow = replace(HOST, bytes_per_s=PAGE_BYTES * 1e3)
    # The first reload measures the rate, and ends when computing would have ended.
    assert run_one(slow, keys=(1, 2, 3, 4, 1, 2)).cached_tokens == 0
    last = run_one(slow, keys=(1, 2, 3, 4, 1, 2)).prediction
    assert last is not None
    assert (last.prompt.reloaded_tokens, last.prompt.computed_tokens) == (0, PROMPT + 1)


def test_a_full_tier_passes_pages_on_to_the_next_one() -> None:
    small = replace(HOST, capacity_bytes=50 * PAGE_BYTES)
    disk = TierSpec(KvTier.DISK, 1 << 30, PAGE_BYTES * 5e3)
    outcome = run_one(small, disk, keys=(1, 2, 3, 4, 1, 2))
    assert outcome.cached_tokens == PROMPT
    assert outcome.prediction is not None
    assert outcome.prediction.prompt.reload_s == pytest.approx(0.020), "only the disk has the pages"


@pytest.mark.parametrize("kept", [0, 1])
def test_the_router_chooses_the_worker_with_the_tier(kept: int) -> None:
    """Both workers are idle and have computed prompts, but only one of them has kept its evicted pages."""
    first = [request(10.0 * at, PROMPT + 1, 4, key=key) for at in range(6) for key in (2 * at, 2 * at + 1)]

    def stage() -> VirtualCluster:
        return with_tiers(cluster(Mode.COLOCATED, [Role.BOTH] * 2, pages=POOL), HOST, only=kept)

    workers = {outcome.asked.prompt.key: outcome.prefill_worker for outcome in stage().run(first)}
    assert len({workers[0], workers[1]}) == 2, "prompts that arrive together go to both workers"
    for key in (0, 1):
        again = stage().run([*first, request(100.0, PROMPT + 1, 4, key=key)])[-1]
        if workers[key] == f"both-{kept}":
            assert (again.prefill_worker, again.cached_tokens) == (f"both-{kept}", PROMPT)
        else:
            assert again.cached_tokens == 0


@pytest.mark.parametrize(
    ("mode", "roles"), [(Mode.COLOCATED, [Role.BOTH]), (Mode.DISAGGREGATED, [Role.PREFILL, Role.DECODE])]
)
def test_a_small_pool_with_a_large_tier_hits_as_much_as_a_large_pool(mode: Mode, roles: list[Role]) -> None:
    asked = conversations(6, 8)
    outcomes = with_tiers(cluster(mode, roles, pages=250), HOST).run(asked)
    assert sum(outcome.cached_tokens for outcome in outcomes) >= 0.95 * sum(seen_before(asked))


def test_the_simulation_is_the_same_each_time() -> None:
    asked = conversations(4, 6, together=True)
    first, second = (with_tiers(cluster(Mode.ADAPTIVE, [Role.BOTH] * 2, pages=250), HOST).run(asked) for _ in range(2))
    assert [(o.ended_s, o.cached_tokens, o.prefill_worker) for o in first] == [
        (o.ended_s, o.cached_tokens, o.prefill_worker) for o in second
    ]
