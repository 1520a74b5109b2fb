"""The planner's policy: in each window it decides the number of prefill and decode workers, and gives a reason.

1. Demand: the offered load, smoothed; output lengths are those of ended requests, corrected by the number of running
   requests.
2. Load ratio of each role: from the fitted step costs (`tandem/capacity/planner/load_ratio.py`), scaled by observed
   misses.
3. Split: the one whose larger load ratio is smallest or, if the number of workers may change, the smallest split with
   headroom.
4. Change: only if it gains enough and was recommended in several consecutive windows, and not soon after the last
   change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tandem.capacity.planner.decision import Decision, Direction, Split, State
from tandem.capacity.planner.demand import Demand
from tandem.capacity.planner.load_ratio import LoadRatio, rows_that_fit
from tandem.capacity.planner.observation import Observation
from tandem.capacity.planner.sizing import Sizing
from tandem.cost_model.step_cost import StepCost
from tandem.protocol.lifecycle.spans import Phase
from tandem.settings.planner import Limits, Range

SMOOTH = 0.5
"""Weight of the newest window in the smoothed demand."""
SWING, NOISE = 0.2, 2.0
"""The demand has changed suddenly if it differs by more than `SWING` + `NOISE` / √(requests in the window).

The second term is `NOISE` standard deviations of the number of requests, which has Poisson noise.
"""
BACKLOG_S = 30.0
"""Duration in seconds over which the planner spreads the work on queued prompts, as additional load."""
COMFORT = 0.7
"""If the larger load ratio is below this, the roles stay as they are, because all targets are met anyway."""
GAIN, GAIN_FULL = 0.08, 0.02
"""Minimum relative reduction of the larger load ratio for a change of roles; `GAIN_FULL` if that ratio is >= `FULL`.

A change that reverts the last one always needs `GAIN`.
"""
FULL, TARGET_RATIO, SPARE = 0.9, 0.75, 0.6
"""Workers are added if the larger load ratio exceeds `FULL`: as few as bring it to `TARGET_RATIO` or below.

Workers are removed if the larger load ratio of the remaining ones is at most `SPARE`.
"""
MISSES_TOLERATED = 0.05
"""Fraction of requests that may miss their targets before a role's load ratio counts as underestimated."""
_TRICKLE = 0.25
"""Minimum share of offered requests that are assumed to be admitted: the measured rate of rejections fluctuates."""
LEARN, FORGET = 1.05, 0.95
SCALE_MAX = 2.0
"""The scale of a load ratio grows by the factor `LEARN` when its role misses targets, up to `SCALE_MAX`.

Otherwise its distance from 1 shrinks by the factor `FORGET` in each window.
"""
_OPPOSITE = {
    Direction.TO_PREFILL: Direction.TO_DECODE,
    Direction.TO_DECODE: Direction.TO_PREFILL,
    Direction.UP: Direction.DOWN,
    Direction.DOWN: Direction.UP,
}


@dataclass(frozen=True, slots=True)
class _View:
    """The inputs of the decision in one window."""

    seen: Observation
    sizing: Sizing
    state: State


def plan(seen: Observation, limits: Limits, state: State) -> Decision:
    """Return the decision for this window; its `state` is the input for the next window."""
    now = Split(seen.prefill, seen.decode, seen.shared)
    newest, prompts, answers = _newest(seen, state), seen.prompts, seen.answers
    if newest is None or prompts is None or answers is None or not (now.shared or (now.prefill and now.decode)):
        why = "no worker has measured its steps" if prompts is None or answers is None else "there has been no load"
        return Decision(now, Direction.NONE, f"{now.text} stays: {why}", None, None, replace(state, windows=0))
    swings = _swings(seen, newest, state.demand)
    demand = newest if swings or state.demand is None else state.demand.towards(newest, SMOOTH)
    since = 0 if swings else state.since + 1
    state = replace(state, demand=demand, running=seen.running_requests, since=since, acted=state.acted + 1)
    if swings:
        state = replace(state, prefill_scale=1.0, decode_scale=1.0)  # they were learned under another demand
    each_s = demand.prompt_seconds(StepCost(prompts.cost), prompts.chunk_tokens)
    waiting = seen.waiting_requests + seen.waiting_tokens / max(demand.computed_tokens, 1.0)
    scales = state.prefill_scale, state.decode_scale
    sizing = Sizing(demand, seen.targets, prompts, answers, waiting * each_s / BACKLOG_S, *scales)
    if since >= limits.settled:
        state = _learn(seen, sizing.load_ratios(now), state)
        sizing = replace(sizing, prefill_scale=state.prefill_scale, decode_scale=state.decode_scale)
    view = _View(seen, sizing, state)
    return _decide(view, now, _wanted(sizing, now, seen.coming, limits), limits)


def _newest(seen: Observation, state: State) -> Demand | None:
    """Return the demand of this window.

    Without new requests, it is the previous demand with a reduced rate; None if there is no previous demand.
    """
    offered, before = seen.offered, state.demand
    if offered.per_s > 0:
        return Demand(offered.per_s, offered.prompt_tokens, _answer_tokens(seen, state), offered.cached)
    return None if before is None else replace(before, per_s=before.per_s * (1 - SMOOTH))


def _swings(seen: Observation, newest: Demand, before: Demand | None) -> bool:
    """Return True if the demand has changed suddenly: by more than `SWING` and `NOISE` together allow."""
    count = seen.offered.per_s * seen.seconds
    return before is not None and count > 0 and before.differs(newest) > SWING + NOISE / math.sqrt(count)


def _answer_tokens(seen: Observation, state: State) -> float:
    """Estimate the mean output length from ended and running requests.

    Right after a change of the mix, only short requests have ended. The number of running requests gives a second
    estimate: by Little's law, that number is the rate of admitted requests times the duration of a mean output. If the
    number grows, the result is the larger of the two estimates; if it shrinks, the smaller; otherwise the mean of the
    ended requests. If no further request fits, queued requests count as running, and the larger estimate is used.
    """
    ended, decoding = seen.offered.answer_tokens, seen.decode or seen.shared
    if seen.answers is None or not decoding:
        return ended
    rows = seen.running_requests / decoding
    known = Demand(seen.offered.per_s, seen.offered.prompt_tokens, ended)
    full = seen.offered.crowded_per_s > MISSES_TOLERATED * known.per_s
    full = full or rows >= FULL * rows_that_fit(known, seen.targets, seen.answers).count
    there = seen.running_requests + (seen.waiting_requests if full else 0.0)
    admitted_per_s = max(known.per_s - seen.offered.refused_per_s, _TRICKLE * known.per_s)
    step_s = StepCost(seen.answers.cost).rows_seconds(rows, rows * known.context_tokens)
    alive = there / admitted_per_s / step_s * seen.answers.decode_speedup
    if full or seen.running_requests > state.running:
        return max(ended, alive)
    return min(ended, alive) if seen.running_requests < state.running * (1 - SWING) else ended


def _learn(seen: Observation, load_ratios: tuple[LoadRatio, LoadRatio], state: State) -> State:
    """Raise the scale of a role that misses its targets although its load ratio is below 1.

    Other scales decay towards 1.
    """
    kept, (prefill, decode) = seen.kept, load_ratios
    if not kept.total:
        return state
    prefill_late = kept.share_missed(Phase.PREFILL) > MISSES_TOLERATED and _explains(prefill, state.prefill_scale)
    decode_late = kept.share_missed(Phase.TRANSFER, Phase.DECODE) > MISSES_TOLERATED and _explains(
        decode, state.decode_scale
    )
    return replace(
        state,
        prefill_scale=_scaled(state.prefill_scale, grow=prefill_late and not decode_late),
        decode_scale=_scaled(state.decode_scale, grow=decode_late and not prefill_late),
    )


def _explains(load_ratio: LoadRatio, scale: float) -> bool:
    """Return True if an underestimated load ratio can explain the missed targets.

    It can if the load ratio is below 1 with its current scale, and would be at least 1 with the maximum scale. If it is
    below 1 even with the maximum scale, more workers would not help.
    """
    return load_ratio.value < 1 <= load_ratio.value / scale * SCALE_MAX


def _scaled(scale: float, *, grow: bool) -> float:
    return min(scale * LEARN, SCALE_MAX) if grow else 1.0 + (scale - 1.0) * FORGET


def _wanted(sizing: Sizing, now: Split, coming: int, limits: Limits) -> Split:
    """Return the best split, ignoring the cost of changing to it."""
    total, shared = limits.workers, bool(now.shared)
    if total is None:
        return sizing.best(now.workers, limits, shared=shared) or now
    if sizing.worst(now).value > FULL or now.workers < total.least:
        least = max(now.workers, total.least)
        more = sizing.fewest(Range(least, max(least, total.most)), limits, TARGET_RATIO, shared=shared) or now
        # New workers may take long to start, or never get a node: until they serve, the best split of the serving ones
        # applies.
        return more if more.workers > now.workers + coming else sizing.best(now.workers, limits, shared=shared) or now
    most = max(total.least, min(now.workers, total.most))
    fewer = sizing.fewest(Range(total.least, most), limits, SPARE, shared=shared)
    if fewer is not None and fewer.workers < now.workers and sizing.worst(fewer).value <= SPARE:
        return fewer
    return sizing.best(now.workers, limits, shared=shared) or now


def _decide(view: _View, now: Split, wanted: Split, limits: Limits) -> Decision:
    """Decide whether the change gains enough and has been recommended in enough consecutive windows."""
    state = view.state
    prefill, decode = view.sizing.load_ratios(now)
    direction = _direction(now, wanted)
    if direction in {Direction.TO_PREFILL, Direction.TO_DECODE}:
        worst = view.sizing.worst(now).value
        back = direction is _OPPOSITE.get(state.last)
        gain = GAIN if worst < FULL or back else GAIN_FULL
        if worst < COMFORT or view.sizing.worst(wanted).value > worst * (1 - gain):
            direction = Direction.NONE
    windows = state.windows + 1 if direction is state.wanted and direction is not Direction.NONE else 1
    required_windows = limits.required_windows_down if direction is Direction.DOWN else limits.required_windows
    # Reverting a recent change takes more windows, so that the split does not oscillate.
    if direction is _OPPOSITE.get(state.last) and state.acted < limits.settled:
        required_windows = max(required_windows, limits.required_windows_back)
    acts = direction is not Direction.NONE and windows >= required_windows and not state.rest
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
    reason = _reason(view, now, wanted, direction, f"{windows} of {required_windows} windows", acts=acts)
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
        f"output tokens; load: {_load_ratios(view, now)}"
    )
    if kept.total:
        load += f", {kept.attained:.0%} met their targets"
    if view.seen.coming:
        load += f", {view.seen.coming} more workers are starting"
    if direction is Direction.NONE:
        return f"{now.text} stays: {load}"
    then = f"{wanted.text} would have {_load_ratios(view, wanted)}"
    if acts:
        return f"from {now.text} to {wanted.text}: {load}; {then}"
    waits = f"rests {view.state.rest} more windows" if view.state.rest else f"wanted in {count}"
    return f"{now.text} stays for now: {load}; {then}, {waits}"


def _load_ratios(view: _View, split: Split) -> str:
    prefill, decode = view.sizing.load_ratios(split)
    return f"workers {prefill.text}" if split.shared else f"prefill {prefill.text} and decode {decode.text}"
