"""Simulates the day of a real cluster, with workers as fast as the real ones were measured to be."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.planner.hours import Day, Hour, Tally
from benchmarks.planner.live_hours import LiveDay, LiveHour
from benchmarks.planner.oracles import judged
from benchmarks.planner.pace import PROMPT_TOKENS
from benchmarks.planner.run import PlannedRun, Run
from benchmarks.planner.sizes import Pace, Sizes
from benchmarks.simulation.stage import make_requests
from tandem.capacity.planner.decision import Split
from tandem.capacity.simulation.arrivals import Mix
from tandem.capacity.simulation.hardware import Hardware
from tandem.capacity.simulation.request import LoadRequest
from tandem.cli.load.workload import Workload
from tandem.engine.config import GPU_PAGE_TOKENS
from tandem.engine.models.shapes import shape_config
from tandem.protocol.cost_parameters import CostParameters

_SHAPE = "llama-3-8b"
"""A shape with a long context; its step cost is not used, since the cost is measured."""
_PAGES = 1 << 14
_BASE_PART = 0.5
"""Share of a full batch's step that a step of one request takes, too: on a CPU weights are half of it."""
_STEP_POLICY = "unchunked"


@dataclass(frozen=True, slots=True)
class DrawnDay(Day):
    """A day with the requests of a real load."""

    workload: Workload | None = None

    def requests(self, max_context: int) -> Iterator[LoadRequest]:
        """Yields the real load's requests."""
        assert self.workload is not None
        yield from make_requests(self.workload.fitted(max_context), GPU_PAGE_TOKENS, self.slo)


def costs_of(pace: Pace, batch: int) -> CostParameters:
    """Returns the step cost of a worker."""
    base_s = _BASE_PART * pace.step_s
    prompt_s = PROMPT_TOKENS * (pace.workers - 1) / pace.prompt_tokens_per_s
    return CostParameters(
        base_s=base_s,
        token_s=max(prompt_s - base_s, 0.1 * prompt_s) / PROMPT_TOKENS,
        row_s=(pace.step_s - base_s) / batch,
        observed=1000,
    )


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """A cluster's hardware and load. `settings` are fields of `ClusterSettings`."""

    machine: Hardware
    sizes: Sizes
    settings: Mapping[str, object]
    seed: int = 0

    @classmethod
    def of(cls, pace: Pace, sizes: Sizes, *, batch: int, step_tokens: int, seed: int) -> "Rehearsal":
        """Returns a rehearsal for workers of this pace."""
        costs = costs_of(pace, batch)
        machine = Hardware(shape_config(_SHAPE), _SHAPE, costs, costs, _PAGES)
        return cls(machine, sizes, {"max_batch_requests": batch, "max_step_tokens": step_tokens}, seed)

    def go(self, splits: Sequence[Split], count: int, hour_s: float, static_s: float) -> dict[str, Any]:
        """Simulates `count` hours, beginning in the last split, and judges them as the real day.

        One more hour with the last one's mix precedes them and does not count.
        """
        kinds = self.sizes.kinds
        hours = [kinds[number % len(kinds)] for number in range(count)]
        day = LiveDay(hours, hour_s, self.seed, warmup_s=hour_s)
        run = PlannedRun(
            self.machine,
            self._drawn(day, [hours[-1], *hours]),
            splits[-1],
            _STEP_POLICY,
            settings=self.settings,
            window_s=self.sizes.window_s,
            limits_known=True,
        )
        tally = run.go()
        changes = [asdict(change) for change in run.changes]
        planned = {
            "goodput_per_s": tally.per_s(hour_s)[1:],
            "changes": [{**each, "at_s": each["at_s"] - hour_s} for each in changes if each["at_s"] >= hour_s],
        }
        due = day.due_per_s()
        shares = {
            split.text: {kind.name: self._share(split, kind, number, static_s) for number, kind in enumerate(kinds)}
            for split in splits
        }
        by_split = {split: {name: share * due[name] for name, share in each.items()} for split, each in shares.items()}
        found = judged(planned, by_split, [hour.name for hour in hours], hour_s)
        return {**found, "share": [round(a / b, 4) for a, b in _pairs(tally)[1:]], "static_share": shares}

    def _share(self, split: Split, kind: LiveHour, number: int, seconds: float) -> float:
        day = self._drawn(LiveDay([kind], seconds, self.seed + number), [kind])
        tally = Run(self.machine, day, split, _STEP_POLICY, settings=self.settings).go()
        return round(tally.met[0] / max(tally.due[0], 1), 4)

    def _drawn(self, day: LiveDay, hours: Sequence[LiveHour]) -> DrawnDay:
        mixes = [Hour(hour.name, Mix(hour.rate, hour.source.prompt.mean, hour.source.answer.mean)) for hour in hours]
        return DrawnDay(mixes, day.seconds, self.sizes.slo, self.seed, day.workload)


def _pairs(tally: Tally) -> list[tuple[int, int]]:
    return list(zip(tally.met, [max(due, 1) for due in tally.due], strict=True))
