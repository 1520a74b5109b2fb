"""Reload or recompute: what is saved is the predicted time of the prefill, less that of the reload."""

from dataclasses import replace

import pytest

from tandem.cost_model.prefix_reload import ChosenReload, ReloadOption, best_reload, reload_seconds, saved_seconds
from tandem.cost_model.step_cost import StepCost
from tandem.protocol.cost_parameters import UNMEASURED
from tandem.protocol.messages import TierLoad
from tandem.protocol.prefixes import KvTier

COST = StepCost(replace(UNMEASURED, base_s=0.5, token_s=1e-3, pair_s=1e-6))


def test_tokens_after_a_longer_context_save_more() -> None:
    # Two steps, 1,000 tokens, and 1,000 · 1,001 / 2 pairs, to which each token of the context adds 1,000.
    alone_s = 2 * 0.5 + 1.0 + 0.5005
    assert saved_seconds(COST, 0, 1000, 500, 0.0) == pytest.approx(alone_s)
    assert saved_seconds(COST, 2000, 1000, 500, 0.0) == pytest.approx(alone_s + 2.0)


def test_a_slow_reload_loses() -> None:
    assert saved_seconds(COST, 0, 1000, 500, 2.0) == pytest.approx(0.5005)
    assert saved_seconds(COST, 0, 1000, 500, 3.0) < 0


HOST, DISK = TierLoad(KvTier.HOST, 0.001, 30), TierLoad(KvTier.DISK, 0.01, 5)


def test_a_reload_follows_those_in_the_queues_of_all_tiers() -> None:
    assert reload_seconds({KvTier.HOST: 70}, (HOST, DISK)) == pytest.approx(0.1 + 0.05)
    assert reload_seconds({KvTier.HOST: 70, KvTier.DISK: 5}, (HOST, DISK)) == pytest.approx(0.1 + 0.1)
    assert reload_seconds({KvTier.HOST: 0}, (HOST,)) == pytest.approx(0.03), "an earlier reload loads its pages"


def test_an_unmeasured_tier_is_tried_and_a_failing_or_missing_one_is_not() -> None:
    failing = replace(DISK, page_s=float("inf"))
    assert reload_seconds({KvTier.DISK: 9}, (replace(DISK, page_s=0.0),)) == 0.0
    assert reload_seconds({KvTier.DISK: 9}, (failing,)) == float("inf")
    assert reload_seconds({KvTier.DISK: 9}, (HOST,)) == float("inf")
    assert reload_seconds({KvTier.HOST: 9}, (HOST, replace(failing, queued_pages=0))) == pytest.approx(0.039)


def test_the_option_that_saves_most_is_chosen() -> None:
    # 1,000 tokens take 0.5 + 1 + 0.5 s to compute, 2,000 tokens 2 · (0.5 + 1) + 2 s.
    short, long = ReloadOption(500, {KvTier.HOST: 10}), ReloadOption(1000, {KvTier.HOST: 10, KvTier.DISK: 10})
    idle = (replace(HOST, queued_pages=0), replace(DISK, queued_pages=0))
    chosen = best_reload(COST, 0, 1000, [long, short], idle)
    assert (chosen.option, chosen.reload_s) == (0, pytest.approx(0.11))
    assert chosen.saved_s == pytest.approx(saved_seconds(COST, 0, 1000, 1000, 0.11))
    busy = (idle[0], replace(DISK, queued_pages=200))
    assert best_reload(COST, 0, 1000, [long, short], busy).option is None, "the queue of the disk is before both"
    slow = (idle[0], replace(DISK, queued_pages=0, page_s=0.15))
    assert best_reload(COST, 0, 1000, [long, short], slow).option == 1
    assert best_reload(COST, 0, 1000, [ReloadOption(0, {KvTier.HOST: 1})], idle) == ChosenReload(None)
    assert best_reload(COST, 0, 1000, [], idle) == ChosenReload(None)
