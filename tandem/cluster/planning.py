"""The planner's control loop: in each window it reads the cluster's metrics, decides, and acts through the operator.

Changes are sequential: while workers change roles, start or drain, no window is observed, so that no decision is based
on half a change. The loop does not wait for new workers that have no node: they may take minutes, or never come.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Protocol

from tandem.capacity.planner.decision import Decision, Direction, State
from tandem.capacity.planner.demand import LatencyTargets
from tandem.capacity.planner.policy import plan
from tandem.capacity.planner.reading import observe
from tandem.cluster.supervision.modes import ModeChange
from tandem.cluster.supervision.size import SizeChange
from tandem.cost_model.step_cost import StepCost
from tandem.metrics import families as f
from tandem.metrics.family import Family
from tandem.metrics.registry import Facts, Reading, Registry
from tandem.metrics.scrape import Scrape, ScrapeInterval
from tandem.protocol.errors import TandemError
from tandem.protocol.messages import Membership, Role, WorkerInfo
from tandem.protocol.mode import Mode
from tandem.settings.planner import PlannerMode, PlannerSettings
from tandem.settings.slo import SloClass

log = logging.getLogger(__name__)

GRACE_S = 60.0
"""Seconds that closing schedulers and removed workers have for the requests they still hold."""
WAIT_S = 60.0
"""Maximum wait for new workers, in seconds.

The loop continues without workers that take longer, e.g. for a new node.
"""


class OperatorInterface(Protocol):
    """The part of the operator's interface that the planner uses."""

    @property
    def coming(self) -> int:
        """The number of workers that are expected to serve but do not serve yet."""

    async def set_mode(self, change: ModeChange) -> tuple[WorkerInfo, ...]:
        """Change the mode; return the current workers."""

    async def resize(self, change: SizeChange) -> tuple[WorkerInfo, ...]:
        """Change the number of workers; return the current workers."""


class Planning:
    """Runs the planner and owns its state. Belongs to the controller's event loop."""

    def __init__(
        self,
        config: PlannerSettings,
        classes: Iterable[SloClass],
        operator: OperatorInterface,
        *,
        membership: Callable[[], Membership],
        scrape: Callable[[], Awaitable[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the loop; `scrape` returns the cluster-wide metrics as text, `clock` returns seconds."""
        self._config = config
        self._classes = tuple(classes)
        self._operator = operator
        self._membership = membership
        self._scrape = scrape
        self._clock = clock
        self._state = State()
        self._before: Scrape | None = None
        self._decision: Decision | None = None
        self._changes = dict.fromkeys((direction for direction in Direction if direction is not Direction.NONE), 0)

    def export_to(self, registry: Registry) -> None:
        """Export the planner's decisions as metrics."""
        registry.read(self._facts)

    async def run(self) -> None:
        """Process one window after another until cancelled, starting from a fresh scrape."""
        self._before = None
        while True:
            await asyncio.sleep(self._config.window_s)
            try:
                await self.poll()
            except TandemError as error:
                log.warning("the planner's change failed: %s", error.message)
            except Exception:
                log.exception("the planner failed to process a window; continuing with the next one")

    async def poll(self) -> None:
        """Process one window: scrape the metrics, decide, and apply the decision.

        Raises a TandemError if the change failed; the next window starts from a fresh scrape.
        """
        now = await asyncio.to_thread(Scrape, await self._scrape(), self._clock())
        before, self._before = self._before, now
        if before is None:
            return
        workers, coming = self._membership().workers, self._operator.coming
        seen = observe(ScrapeInterval(before, now), workers, self._targets_by_class, coming=coming)
        decision = plan(seen, self._config.limits, self._state)
        self._decision, self._state = decision, decision.state
        if decision.change is Direction.NONE:
            log.debug("planner: %s", decision.reason)
            return
        self._changes[decision.change] += 1
        if self._config.actions is PlannerMode.DRY_RUN:
            log.info("planner, dry run: %s", decision.reason)
            return
        log.info("planner: %s", decision.reason)
        try:
            await self._apply(decision)
        finally:
            self._before = None  # this window spans a change and describes neither split

    async def _apply(self, decision: Decision) -> None:
        """Apply the decided split of the workers.

        If only roles change, only the number of prefill workers is requested and all others decode, so a worker that is
        briefly absent causes no error.
        """
        split, began = decision.split, self._clock()
        if decision.change in {Direction.TO_PREFILL, Direction.TO_DECODE}:
            await self._operator.set_mode(ModeChange(Mode.DISAGGREGATED, prefill=split.prefill, grace_s=GRACE_S))
        else:
            size = SizeChange(split.prefill, split.decode, split.shared, grace_s=GRACE_S, wait_s=WAIT_S)
            await self._operator.resize(size)
        log.info("planner: %s after %.1f s", split.text, self._clock() - began)

    def _targets_by_class(self, idle_step_s: float) -> Mapping[str, LatencyTargets]:
        classes = (slo for slo in self._classes if slo.has_targets)
        return {
            slo.name: LatencyTargets(slo.ttft_s, slo.gap_target(idle_step_s) / StepCost().margin) for slo in classes
        }

    def _facts(self) -> Facts:
        facts: dict[Family, float | Reading] = {
            f.PLANNER_CHANGES: {(direction.value,): float(count) for direction, count in self._changes.items()}
        }
        decision = self._decision
        if decision is not None:
            split = decision.split
            facts[f.PLANNER_WANTED] = _by_role(split.prefill, split.decode, split.shared)
            if decision.prefill is not None and decision.decode is not None:
                facts[f.PLANNER_LOAD_RATIO] = _by_role(decision.prefill.value, decision.decode.value)
        return facts


def _by_role(*numbers: float) -> Reading:
    return {(role.value,): number for role, number in zip(Role, numbers, strict=False)}
