"""Load ratios compared with calculations by hand and with queueing theory of pools."""

import math
from dataclasses import replace

import pytest

from tandem.capacity.planner.demand import Demand, LatencyTargets
from tandem.capacity.planner.load_ratio import (
    BUSY_MAX,
    HEADROOM,
    LATE,
    Limit,
    busy_cap,
    decode_load_ratio,
    prefill_load_ratio,
    rows_that_fit,
    shared_load_ratio,
)
from tandem.protocol.kv_pages import KvPages
from tandem.protocol.messages import Role
from tests.unit.capacity.planner.scenes import COSTS, FACTS, TARGETS


def test_prompts_take_their_share_of_full_chunks() -> None:
    """900 tokens take 100 ms, so 10 prompts per second occupy one worker fully."""
    load_ratio = prefill_load_ratio(Demand(10.0, 900, 1), TARGETS, FACTS, workers=2)
    assert load_ratio.value == pytest.approx(0.5 / BUSY_MAX)
    assert load_ratio.limit is Limit.COMPUTE


def test_cached_tokens_are_not_computed() -> None:
    load_ratio = prefill_load_ratio(Demand(10.0, 900, 1, cached=0.9), TARGETS, FACTS, workers=1)
    assert load_ratio.value == pytest.approx(0.1 / BUSY_MAX)


def test_long_prompts_attend_to_more_pairs() -> None:
    dear = replace(FACTS, cost=replace(COSTS, pair_s=1e-7))
    once, twice = (prefill_load_ratio(Demand(1.0, tokens, 1), TARGETS, dear, 1).value for tokens in (9000, 18000))
    assert twice > 2.5 * once


def test_a_tight_first_token_leaves_a_small_pool_less_to_do_than_a_large_one() -> None:
    """In a pool of one server (M/M/1) the late part is busy · exp(-(1 - busy) · slack)."""
    slack = 5.0
    one = busy_cap(1, 1.0, slack + 2.0)
    assert one * math.exp(-(1 - one) * slack) == pytest.approx(LATE, rel=1e-3)
    caps = [busy_cap(workers, 1.0, 7.0) for workers in (1, 2, 4, 16)]
    assert caps == sorted(caps)
    assert caps[-1] > 0.9
    assert busy_cap(4, 1.0, 3.0) < busy_cap(4, 1.0, 30.0) <= BUSY_MAX


def test_workers_of_both_roles_keep_pages_for_a_prompt() -> None:
    """Half of 50,000 tokens are used at most: 40 requests of 1,000 with prompts up to 10,000, and 25 with 40,000."""
    demand, facts = Demand(1.0, 500, 500), replace(FACTS, kv_tokens=50_000)
    for longest, rows in ((10_000, 40), (40_000, 25)):
        long = replace(facts, longest_tokens=longest)
        shared = rows_that_fit(demand, TARGETS, long, Role.BOTH)
        assert (shared.count, shared.limit) == (pytest.approx(HEADROOM * rows), Limit.KV)
        assert rows_that_fit(demand, TARGETS, long).count == pytest.approx(HEADROOM * 50)
    loose, tight = (
        shared_load_ratio(Demand(2.0, 500, 500), LatencyTargets(), replace(facts, longest_tokens=longest), 1).value
        for longest in (10_000, 40_000)
    )
    assert tight > loose, "the planner sees it"


def test_rows_are_as_many_as_the_tightest_bottleneck_leaves() -> None:
    """The limits are 100 rows in 20 ms, a hundred requests of 1,000 tokens in 100,000, and a batch of 50."""
    demand = Demand(1.0, 500, 500)
    assert rows_that_fit(demand, TARGETS, FACTS).count == pytest.approx(HEADROOM * 100)
    for facts, rows, limit in (
        (FACTS, 100, Limit.GAP),
        (replace(FACTS, kv_tokens=50_000), 50, Limit.KV),
        (replace(FACTS, batch_requests=30), 30, Limit.BATCH),
    ):
        fits = rows_that_fit(demand, TARGETS, facts)
        assert (fits.count, fits.limit) == (pytest.approx(HEADROOM * rows), limit)


def test_answers_at_the_limit_are_what_those_rows_decode() -> None:
    """90 rows take 19 ms per step, so one worker decodes 90 / 0.019 tokens per second."""
    per_s = 90 / 0.019 / 100
    assert decode_load_ratio(Demand(per_s, 10, 100), TARGETS, FACTS, 1).value == pytest.approx(1.0)
    assert decode_load_ratio(Demand(per_s, 10, 100), TARGETS, FACTS, 4).value == pytest.approx(0.25)


def test_a_shared_worker_has_the_load_of_both_roles() -> None:
    """Prompts and decode rows both load a shared cluster, each alone less than together."""
    prompts, answers = Demand(4.0, 900, 1), Demand(4.0, 1, 500)
    both = Demand(4.0, 900, 500)
    load_ratio = {
        name: shared_load_ratio(phase_load, TARGETS, FACTS, 1).value
        for name, phase_load in locals().items()
        if name != "load_ratio"
    }
    assert (
        max(load_ratio["prompts"], load_ratio["answers"])
        < load_ratio["both"]
        <= 1.1 * (load_ratio["prompts"] + load_ratio["answers"])
    )
    assert shared_load_ratio(both, TARGETS, FACTS, 4).value < load_ratio["both"] / 3


def test_a_gap_target_below_every_step_still_has_a_load_ratio() -> None:
    load_ratio = decode_load_ratio(Demand(1.0, 10, 100), LatencyTargets(1.0, 1e-3), FACTS, 1)
    assert load_ratio.limit is Limit.GAP
    assert 1.0 < load_ratio.value < math.inf


def test_a_request_with_windows_occupies_the_pages_it_holds() -> None:
    kv = KvPages(128, (None, 1024, 1024), step_tokens=2048)
    facts = replace(FACTS, kv_tokens=128 * 1000.0, kv=kv)
    assert FACTS.occupied(20_000, Role.DECODE) == 20_000
    assert facts.occupied(20_000, Role.DECODE) == 128 * (157 + 2 * 10)
    assert facts.occupied(20_000, Role.BOTH) == 128 * (157 + 2 * 41)
