"""Reload or recompute: what it costs to load the KV of a prefix from tiers, and what that saves.

Workers decide with it which pages they load, and routers predict with it what a worker will do.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tandem.cost_model.step_cost import StepCost
from tandem.cost_model.step_work import chunk_pairs
from tandem.protocol.messages import TierLoad
from tandem.protocol.prefixes import KvTier


class ReloadOption(NamedTuple):
    """A part of a prompt that could be loaded: its tokens follow those whose KV is on the device."""

    tokens: int
    pages: Mapping[KvTier, int]
    """The number of pages to load from each tier."""


class ChosenReload(NamedTuple):
    """The best of several options."""

    option: int | None
    """The index of the option; None if it takes no longer to compute the tokens."""
    reload_s: float = 0.0
    """The seconds until the pages are loaded."""
    saved_s: float = 0.0
    """The seconds by which computing the tokens would take longer."""


def reload_seconds(pages: Mapping[KvTier, int], tiers: Sequence[TierLoad]) -> float:
    """Return the seconds until a reload ends that begins now.

    A worker loads one page after the other, so the reload follows those in the queue:

        seconds = Σ over tiers: (queued pages + pages) · seconds per page

    It is infinite if a page is in a tier that is not in `tiers`.
    """
    counts = {tier.tier: tier.queued_pages + pages.get(tier.tier, 0) for tier in tiers}
    if any(count and tier not in counts for tier, count in pages.items()):
        return math.inf
    return sum(counts[tier.tier] * tier.page_s for tier in tiers if counts[tier.tier])


def saved_seconds(cost: StepCost, context: int, tokens: int, chunk: int, load_s: float) -> float:
    """Return the seconds that a request saves if the KV of `tokens` prompt tokens is loaded; negative if it loses.

    The tokens follow `context` tokens whose KV is there. Without the load, they would be computed in chunks of up to
    `chunk` tokens; the load is predicted to take `load_s` seconds.

        saved = prefill seconds of the tokens - load_s
    """
    return cost.prefill_seconds(tokens, chunk_pairs(tokens, context), chunk)[0] - load_s


def best_reload(
    cost: StepCost, context: int, chunk: int, options: Sequence[ReloadOption], tiers: Sequence[TierLoad]
) -> ChosenReload:
    """Return the option that saves most time, the first one of equal options; see `saved_seconds`.

    An option without tokens is never chosen. `tiers` are the tiers of the worker, of which `cost` are the step costs.
    """
    best = ChosenReload(None)
    for index, option in enumerate(options):
        if option.tokens <= 0:
            continue
        reload_s = reload_seconds(option.pages, tiers)
        saved_s = saved_seconds(cost, context, option.tokens, chunk, reload_s)
        if saved_s > best.saved_s:
            best = ChosenReload(index, reload_s, saved_s)
    return best
