"""The planner at work: it looks at the cluster's metrics once a window, decides, and lets the operator's hand do it.

One at a time: while workers change their roles, start or drain, nobody looks, so no decision is made of half a change.
New workers that have no node yet are the exception: that may take minutes, or for ever.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Protocol

from cluster.planner_config import PlannerConfig, PlannerMode
from cluster.supervision.modes import ModeChange
from cluster.supervision.size import SizeChange
from costs.step_cost import StepCost
from planner.decision import Decision, Direction, State
from planner.demand import Promise
from planner.policy import plan
from planner.reading import observe
from router.slo import SloClass
from telemetry import families as f
from telemetry.board import Board, Facts, Reading
from telemetry.family import Family
from telemetry.scrape import Scrape, Stretch
from wire.errors import TandemError
from wire.messages import Membership, Role, WorkerInfo
from wire.mode import Mode

log = logging.getLogger(__name__)

GRACE_S = 60.0
"""What halves that close, and workers that leave, have for the requests that they still have."""
WAIT_S = 60.0
"""How long new workers are waited for; those that come later, with a node for instance, hold nobody up."""


class Hand(Protocol):
    """The operator's, as far as it is needed."""

    @property
    def coming(self) -> int: ...

    async def set_mode(self, change: ModeChange) -> tuple[WorkerInfo, ...]: ...

    async def resize(self, change: SizeChange) -> tuple[WorkerInfo, ...]: ...


class Planning:
    """Owns the planner's state. Belongs to the event loop."""

    def __init__(
        self,
        config: PlannerConfig,
        classes: Iterable[SloClass],
        operator: Hand,
        *,
        membership: Callable[[], Membership],
        scrape: Callable[[], Awaitable[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`scrape` gives the whole cluster's metrics as text, `clock` seconds."""
        self._config = config
        self._classes = tuple(classes)
        self._operator = operator
        self._membership = membership
        self._scrape = scrape
        self._clock = clock
        self._state = State()
        self._before: Scrape | None = None
        self._decision: Decision | None = None
        self._changes = dict.fromkeys((each for each in Direction if each is not Direction.NONE), 0)

    def tell(self, board: Board) -> None:
        """Export what was decided."""
        board.read(self._facts)

    async def run(self) -> None:
        """Look and act until cancelled. What was seen before it is of another time."""
        self._before = None
        while True:
            await asyncio.sleep(self._config.window_s)
            try:
                await self.look()
            except TandemError as error:
                log.warning("the planner's change is not through: %s", error.message)
            except Exception:
                log.exception("the planner could not look; it will again")

    async def look(self) -> None:
        """One window. What it cannot bring about is a TandemError; it looks anew then."""
        now = await asyncio.to_thread(Scrape, await self._scrape(), self._clock())
        before, self._before = self._before, now
        if before is None:
            return
        workers, coming = self._membership().workers, self._operator.coming
        seen = observe(Stretch(before, now), workers, self._promises, coming=coming)
        decision = plan(seen, self._config.limits, self._state)
        self._decision, self._state = decision, decision.state
        if decision.change is Direction.NONE:
            log.debug("planner: %s", decision.reason)
            return
        self._changes[decision.change] += 1
        if self._config.mode is PlannerMode.DRY_RUN:
            log.info("planner, dry run: %s", decision.reason)
            return
        log.info("planner: %s", decision.reason)
        try:
            await self._apply(decision)
        finally:
            self._before = None  # what happened meanwhile is of no split

    async def _apply(self, decision: Decision) -> None:
        """Who is away for a moment counts among those that decode, where only roles change."""
        split, began = decision.split, self._clock()
        if decision.change in {Direction.TO_PREFILL, Direction.TO_DECODE}:
            await self._operator.set_mode(ModeChange(Mode.DISAGGREGATED, prefill=split.prefill, grace_s=GRACE_S))
        else:
            size = SizeChange(split.prefill, split.decode, split.shared, grace_s=GRACE_S, wait_s=WAIT_S)
            await self._operator.resize(size)
        log.info("planner: %s after %.1f s", split.text, self._clock() - began)

    def _promises(self, idle_step_s: float) -> Mapping[str, Promise]:
        classes = (each for each in self._classes if each.has_targets)
        return {each.name: Promise(each.ttft_s, each.tolerates(idle_step_s) / StepCost().margin) for each in classes}

    def _facts(self) -> Facts:
        facts: dict[Family, float | Reading] = {
            f.PLANNER_CHANGES: {(each.value,): float(count) for each, count in self._changes.items()}
        }
        decision = self._decision
        if decision is not None:
            split = decision.split
            facts[f.PLANNER_WANTED] = _by_role(split.prefill, split.decode, split.shared)
            if decision.prefill is not None and decision.decode is not None:
                facts[f.PLANNER_STRAIN] = _by_role(decision.prefill.value, decision.decode.value)
        return facts


def _by_role(*numbers: float) -> Reading:
    return {(role.value,): number for role, number in zip(Role, numbers, strict=False)}
