"""Switches a running cluster from one row to the next without restarts, and reads the statistics of its steps."""

import asyncio
import time

from benchmarks.strategies.rows import GAP_50_MS, Strategy
from tandem.cli.connection.controller_client import ControllerClient
from tandem.cli.connection.router import view_of
from tandem.cli.load.target import Target, touch, wait_until_idle
from tandem.cluster.launcher import Endpoints
from tandem.metrics import families as f
from tandem.metrics.family import Family
from tandem.metrics.scrape import ScrapeInterval
from tandem.protocol.errors import DeadlineExceeded, InvalidArgument
from tandem.protocol.mode import Mode
from tandem.protocol.policy_name import PolicyName
from tandem.settings.slo import with_defaults

_PHASES = ("decode", "mixed", "prefill")
_PARTS = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def steps_of(load: ScrapeInterval) -> dict[str, dict[str, object]]:
    """Return the statistics of all workers' steps between two scrapes, by kind of step.

    They are the number of steps, and quantiles of the milliseconds and of observed / predicted time, as exact as the
    buckets of the histograms.
    """
    by_phase: dict[str, dict[str, object]] = {}
    for phase in _PHASES:
        count = load.grown(f.STEP_SECONDS, "_count", phase=phase)
        if count:
            by_phase[phase] = {
                "count": int(count),
                "ms": {name: _rounded(load, 1e3, f.STEP_SECONDS, part, phase) for name, part in _PARTS.items()},
                "over_predicted": {
                    name: _rounded(load, 1.0, f.STEP_OVER_PREDICTED, part, phase) for name, part in _PARTS.items()
                },
            }
    return by_phase


def _rounded(load: ScrapeInterval, times: float, family: Family, part: float, phase: str) -> float | None:
    value = load.quantile(family, part, phase=phase)
    return None if value is None else round(value * times, 3)


BY_SWITCH = "a switch of the running cluster's mode"
_FOLLOW_S = 10.0
_LOOK_S = 0.02
_ROWS_OWN = frozenset({"mode", "workers", "prefill", "decode", "step_policy", "step_budget"})
"""The fields of `ClusterSettings` in which rows differ."""


def settings_for_all(extra: dict[str, object], device: str, workers: int) -> dict[str, object]:
    """Return the settings of the one cluster that serves all rows.

    Raises InvalidArgument for fields that differ between rows.
    """
    for name in extra:
        if name in _ROWS_OWN:
            raise InvalidArgument("--set", f"{name} is what the rows differ in; choose them with --only")
    classes = with_defaults([GAP_50_MS])
    return {"device": device, "mode": Mode.ADAPTIVE.value, "workers": workers, "slo_classes": classes} | extra


class Switch:
    """Switches one cluster, which must have no other clients."""

    def __init__(self, listeners: Endpoints, target: Target, drain_s: float) -> None:
        self._controller = ControllerClient(listeners.controller, listeners.token)
        self._target = target
        self._drain_s = drain_s
        self._row: Strategy | None = None
        self._touched: set[str] = set()

    def to(self, row: Strategy) -> float:
        """Wait until the cluster is idle, switch it to `row`, and warm it up on the first switch to this row.

        Returns the seconds of the switch; 0 = the cluster is in this row already. Raises DeadlineExceeded if the router
        does not adopt the change.
        """
        if row == self._row:
            return 0.0
        wait_until_idle(self._target, self._drain_s)
        began = time.monotonic()
        asyncio.run(self._set_mode(row))
        seconds = time.monotonic() - began
        self._row = row
        if row.name not in self._touched:
            self._touched.add(row.name)
            touch(self._target)
        return seconds

    async def _set_mode(self, row: Strategy) -> None:
        settings = row.settings
        disaggregated = settings["mode"] == Mode.DISAGGREGATED
        await self._controller.set_mode(
            str(settings["mode"]),
            prefill=_count(settings["prefill"]) if disaggregated else 0,
            decode=_count(settings["decode"]) if disaggregated else 0,
            step_policy=str(settings.get("step_policy", PolicyName.UNCHUNKED)),
            step_budget=_count(settings.get("step_budget", 0)),
        )
        deadline_s = time.monotonic() + _FOLLOW_S
        while (mode := view_of(self._target.address, self._target.api_key).info.mode) != settings["mode"]:
            if time.monotonic() > deadline_s:
                raise DeadlineExceeded(f"the router's mode is still {mode}, not that of {row.name}; see its log")
            await asyncio.sleep(_LOOK_S)


def _count(value: object) -> int:
    if not isinstance(value, int):
        raise InvalidArgument("row", f"{value!r} is no number")
    return value
