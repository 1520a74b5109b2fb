"""How many workers should prefill and decode: a decision a window, with its reason.

1. demand: what was offered, smoothed; answers are as long as those that ended, or as those that run make likely
2. strain of each role, by the fitted step costs (`planner/strain.py`), scaled by what broken promises have taught
3. the split that strains the more strained role least; if the number may change, the smallest that has room left
4. a change only if it pays, for several windows in a row, and not soon after the last one
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from costs.step_cost import StepCost
from planner.decision import Decision, Direction, Limits, Range, Split, State
from planner.demand import Demand
from planner.observation import Observation
from planner.sizing import Sizing
from planner.strain import Strain, rows_that_fit
from wire.tracing.spans import Phase

SMOOTH = 0.5
"""Weight of the newest window in the demand."""
SWING, NOISE = 0.2, 2.0
"""By how much a demand differs that is another one: this part, and so many deviations of what chance alone does."""
BACKLOG_S = 30.0
"""Within which what waits is to be worked off, beside what comes."""
COMFORT = 0.7
"""Strain below which nothing is changed for another split: everybody keeps his promise anyway."""
GAIN, GAIN_FULL = 0.08, 0.02
"""Part of the larger strain that another split must take away, and from `FULL` on, if it does not go back."""
FULL, ROOM, SPARE = 0.9, 0.75, 0.6
"""Strain from which on workers are added, strain to have with them, and strain that is not to be exceeded without those
that are taken away.
"""
MISSES_BORNE = 0.05
"""Part of the requests that may miss before the strain of who is to blame is taken for too low."""
_TRICKLE = 0.25
"""Part of the requests that is taken in at least, while answers run: the others' number is a moment's."""
LEARN, FORGET = 1.05, 0.95
SCALE_MAX = 2.0
"""How a strain's scale grows with a bad window, returns to 1 with a good one, and where it ends."""
_OPPOSITE = {
    Direction.TO_PREFILL: Direction.TO_DECODE,
    Direction.TO_DECODE: Direction.TO_PREFILL,
    Direction.UP: Direction.DOWN,
    Direction.DOWN: Direction.UP,
}


@dataclass(frozen=True, slots=True)
class _View:
    """What one window's choice is made from."""

    seen: Observation
    sizing: Sizing
    state: State


def plan(seen: Observation, limits: Limits, state: State) -> Decision:
    """What to do after this window. The state in the decision is for the next one."""
    now = Split(seen.prefill, seen.decode, seen.shared)
    newest, prompts, answers = _newest(seen, state), seen.prompts, seen.answers
    if newest is None or prompts is None or answers is None or not (now.shared or (now.prefill and now.decode)):
        why = "no worker has measured its steps" if prompts is None or answers is None else "nothing was ever asked for"
        return Decision(now, Direction.NONE, f"{now.text} stays: {why}", None, None, replace(state, windows=0))
    swings = _swings(seen, newest, state.demand)
    demand = newest if swings or state.demand is None else state.demand.towards(newest, SMOOTH)
    since = 0 if swings else state.since + 1
    state = replace(state, demand=demand, running=seen.running_requests, since=since, acted=state.acted + 1)
    if swings:
        state = replace(state, prefill_scale=1.0, decode_scale=1.0)  # they were of another demand
    each_s = demand.prompt_seconds(StepCost(prompts.cost), prompts.chunk_tokens)
    waiting = seen.waiting_requests + seen.waiting_tokens / max(demand.computed_tokens, 1.0)
    scales = state.prefill_scale, state.decode_scale
    sizing = Sizing(demand, seen.promise, prompts, answers, waiting * each_s / BACKLOG_S, *scales)
    if since >= limits.settled:
        state = _learn(seen, sizing.strains(now), state)
        sizing = replace(sizing, prefill_scale=state.prefill_scale, decode_scale=state.decode_scale)
    view = _View(seen, sizing, state)
    return _decide(view, now, _wanted(sizing, now, seen.coming, limits), limits)


def _newest(seen: Observation, state: State) -> Demand | None:
    """Of this window; where nothing came, less and less of what came before."""
    offered, before = seen.offered, state.demand
    if offered.per_s > 0:
        return Demand(offered.per_s, offered.prompt_tokens, _answer_tokens(seen, state), offered.cached)
    return None if before is None else replace(before, per_s=before.per_s * (1 - SMOOTH))


def _swings(seen: Observation, newest: Demand, before: Demand | None) -> bool:
    """Whether it is another demand, and not the noise of the one before."""
    count = seen.offered.per_s * seen.seconds
    return before is not None and count > 0 and before.differs(newest) > SWING + NOISE / math.sqrt(count)


def _answer_tokens(seen: Observation, state: State) -> float:
    """Of a mix that has just changed, only what is short has ended. A row lives as long as its answer (Little's law),
    so where more and more answers run they are longer than those that have ended, where ever fewer run, shorter. Where
    no more can run, those that wait count as well.
    """
    ended, decoding = seen.offered.answer_tokens, seen.decode or seen.shared
    if seen.answers is None or not decoding:
        return ended
    p, rows = seen.answers.cost, seen.running_requests / decoding
    told = Demand(seen.offered.per_s, seen.offered.prompt_tokens, ended)
    full = seen.offered.crowded_per_s > MISSES_BORNE * told.per_s
    full = full or rows >= FULL * rows_that_fit(told, seen.promise, seen.answers).count
    there = seen.running_requests + (seen.waiting_requests if full else 0.0)
    admitted_per_s = max(told.per_s - seen.offered.refused_per_s, _TRICKLE * told.per_s)
    alive = there / admitted_per_s / (p.base_s + rows * (p.row_s + p.context_s * told.context_tokens))
    if full or seen.running_requests > state.running:
        return max(ended, alive)
    return min(ended, alive) if seen.running_requests < state.running * (1 - SWING) else ended


def _learn(seen: Observation, strains: tuple[Strain, Strain], state: State) -> State:
    """Whose strain is higher than the model says: promises are broken there though the model has room."""
    kept, (prefill, decode) = seen.kept, strains
    if not kept.total:
        return state
    prefill_late = kept.share_missed(Phase.PREFILL) > MISSES_BORNE and _explains(prefill, state.prefill_scale)
    decode_late = kept.share_missed(Phase.TRANSFER, Phase.DECODE) > MISSES_BORNE and _explains(
        decode, state.decode_scale
    )
    return replace(
        state,
        prefill_scale=_scaled(state.prefill_scale, grow=prefill_late and not decode_late),
        decode_scale=_scaled(state.decode_scale, grow=decode_late and not prefill_late),
    )


def _explains(strain: Strain, scale: float) -> bool:
    """Whether misses can be those of a strain that is taken for too low: it has room as it is, and none if the costs
    are as far off as they may be. Where there is more room than that, more workers would not help.
    """
    return strain.value < 1 <= strain.value / scale * SCALE_MAX


def _scaled(scale: float, *, grow: bool) -> float:
    return min(scale * LEARN, SCALE_MAX) if grow else 1.0 + (scale - 1.0) * FORGET


def _wanted(sizing: Sizing, now: Split, coming: int, limits: Limits) -> Split:
    """The best split, without regard to what a change costs."""
    total, shared = limits.workers, bool(now.shared)
    if total is None:
        return sizing.best(now.workers, limits, shared=shared) or now
    if sizing.worst(now).value > FULL or now.workers < total.least:
        least = max(now.workers, total.least)
        more = sizing.fewest(Range(least, max(least, total.most)), limits, ROOM, shared=shared) or now
        # Whoever is on the way may take long, or never find a node: until then the best is made of those who serve.
        return more if more.workers > now.workers + coming else sizing.best(now.workers, limits, shared=shared) or now
    most = max(total.least, min(now.workers, total.most))
    fewer = sizing.fewest(Range(total.least, most), limits, SPARE, shared=shared)
    if fewer is not None and fewer.workers < now.workers and sizing.worst(fewer).value <= SPARE:
        return fewer
    return sizing.best(now.workers, limits, shared=shared) or now


def _decide(view: _View, now: Split, wanted: Split, limits: Limits) -> Decision:
    """Whether the change is worth it, and long enough wanted."""
    state = view.state
    prefill, decode = view.sizing.strains(now)
    direction = _direction(now, wanted)
    if direction in {Direction.TO_PREFILL, Direction.TO_DECODE}:
        worst = view.sizing.worst(now).value
        back = direction is _OPPOSITE.get(state.last)
        gain = GAIN if worst < FULL or back else GAIN_FULL
        if worst < COMFORT or view.sizing.worst(wanted).value > worst * (1 - gain):
            direction = Direction.NONE
    windows = state.windows + 1 if direction is state.wanted and direction is not Direction.NONE else 1
    patience = limits.patience_down if direction is Direction.DOWN else limits.patience
    if direction is _OPPOSITE.get(state.last) and state.acted < limits.settled:
        patience = max(patience, limits.patience_back)
    acts = direction is not Direction.NONE and windows >= patience and not state.rest
    after = replace(
        state,
        wanted=Direction.NONE if acts else direction,
        windows=0 if acts or direction is Direction.NONE else windows,
        since=0 if acts else state.since,
        acted=0 if acts else state.acted,
        rest=limits.cooldown if acts else max(0, state.rest - 1),
        last=direction if acts else state.last,
    )
    change = direction if acts else Direction.NONE
    reason = _reason(view, now, wanted, direction, f"{windows} of {patience} windows", acts=acts)
    return Decision(wanted if direction is not Direction.NONE else now, change, reason, prefill, decode, after)


def _direction(now: Split, wanted: Split) -> Direction:
    if wanted.workers != now.workers:
        return Direction.UP if wanted.workers > now.workers else Direction.DOWN
    if wanted.prefill == now.prefill:
        return Direction.NONE
    return Direction.TO_PREFILL if wanted.prefill > now.prefill else Direction.TO_DECODE


def _reason(view: _View, now: Split, wanted: Split, direction: Direction, count: str, *, acts: bool) -> str:
    demand, kept = view.sizing.demand, view.seen.kept
    load = (
        f"{demand.per_s:.3g} requests/s of {demand.computed_tokens:.0f} computed and {demand.answer_tokens:.0f} "
        f"answer tokens strain {_strains(view, now)}"
    )
    if kept.total:
        load += f", {kept.attained:.0%} kept their promise"
    if view.seen.coming:
        load += f", {view.seen.coming} more workers are on their way"
    if direction is Direction.NONE:
        return f"{now.text} stays: {load}"
    then = f"{wanted.text} would have {_strains(view, wanted)}"
    if acts:
        return f"from {now.text} to {wanted.text}: {load}; {then}"
    waits = f"rests {view.state.rest} more windows" if view.state.rest else f"wanted in {count}"
    return f"{now.text} stays for now: {load}; {then}, {waits}"


def _strains(view: _View, split: Split) -> str:
    prefill, decode = view.sizing.strains(split)
    return f"workers {prefill.text}" if split.shared else f"prefill {prefill.text} and decode {decode.text}"
