"""Reload or recompute: what is saved is the predicted time of the prefill, less that of the reload."""

from dataclasses import replace

import pytest

from tandem.cost_model.prefix_reload import saved_seconds
from tandem.cost_model.step_cost import StepCost
from tandem.protocol.cost_parameters import UNMEASURED

COST = StepCost(replace(UNMEASURED, base_s=0.5, token_s=1e-3, pair_s=1e-6))


def test_tokens_after_a_longer_context_save_more() -> None:
    # Two steps, 1,000 tokens, and 1,000 · 1,001 / 2 pairs, to which each token of the context adds 1,000.
    alone_s = 2 * 0.5 + 1.0 + 0.5005
    assert saved_seconds(COST, 0, 1000, 500, 0.0) == pytest.approx(alone_s)
    assert saved_seconds(COST, 2000, 1000, 500, 0.0) == pytest.approx(alone_s + 2.0)


def test_a_slow_reload_loses() -> None:
    assert saved_seconds(COST, 0, 1000, 500, 2.0) == pytest.approx(0.5005)
    assert saved_seconds(COST, 0, 1000, 500, 3.0) < 0
