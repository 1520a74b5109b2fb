"""Runs a real cluster's planner through a day of changing load: `python -m benchmarks.planner.live --set threads=4`.

It is `benchmarks.planner` with processes for workers, router and clients in place of the virtual clock. The first
cluster, with the planner off, measures its workers' speed, sizes the day by it (`sizes.py`), and runs an hour of each
kind in each split. A second one, with the planner on, runs the whole day. Everything takes `--seconds` at most. With
`--hour` the day is the given one. On a CPU each worker computes with one thread by default and needs cores of its own.
The last line is one JSON object.
"""

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.load.served_model import ServedModel, add_model_options, choose_model
from benchmarks.load.stage import parse_setting, running_cluster
from benchmarks.planner.live_hours import LiveDay, LiveHour, parse_hour
from benchmarks.planner.live_load import ask
from benchmarks.planner.options import add_day_options
from benchmarks.planner.oracles import judged
from benchmarks.planner.rehearsal import Rehearsal
from benchmarks.planner.sizes import TTFT_PROMPTS, Pace, Sizes, promises, size
from benchmarks.planner.statics import Statics
from benchmarks.planner.timetable import Timetable
from benchmarks.planner.watch import Watch
from benchmarks.results import run_facts, save_result
from benchmarks.strategies.switch import Switch
from tandem.capacity.planner.decision import Split
from tandem.cli.load.run import LoadSettings
from tandem.cli.load.slo import SloCell
from tandem.cli.load.target import find_target, touch
from tandem.cluster.launcher import Endpoints
from tandem.protocol.errors import InvalidArgument, TandemError
from tandem.settings.cluster import CPU_BATCH_REQUESTS, GPU_BATCH_REQUESTS
from tandem.settings.planner import PlannerMode, PlannerSettings
from tandem.settings.slo import BEST_EFFORT, SloClass

BATCH_REQUESTS, STEP_TOKENS = 8, 256
"""Default limits that define a worker's capacity: decode batch size, and a step no longer than a prompt."""
WARMUP_S = 8.0
"""Seconds of warm-up before the first hour, with the last hour's mix, in which workers measure their steps."""
_TAIL = 4.0
"""Time for answers after the last request, in TTFT targets."""
_NOTE = (
    "Hours of a real day last 3600 s, in which a change of load costs a hundredth of what it costs here; the planner's "
    "window is as much shorter than its default of 15 s. Statics are shares of such hours times the day's requests."
)


@dataclass(slots=True)
class Replay:
    """One run of the command."""

    model: ServedModel
    arguments: argparse.Namespace
    table: Timetable
    given: Sizes | None
    """The sizes that the command line gives; None = the day is to be sized."""
    pace: Pace | None = None
    start_s: float = 0.0
    """Seconds that a cluster takes to start."""
    overhead_s: float = 0.0
    """Seconds of a load besides the period in which its requests arrive."""
    settings: dict[str, object] = field(init=False)

    def __post_init__(self) -> None:
        own = {} if self.given else {"max_batch_requests": BATCH_REQUESTS, "max_step_tokens": STEP_TOKENS}
        cpu = {"threads": 1} if self.arguments.device == "cpu" else {}
        self.settings = {**own, **cpu, **dict(parse_setting(each) for each in self.arguments.set)}

    @property
    def splits(self) -> list[Split]:
        """The splits, from the best one of prefill-heavy hours to that of decode-heavy hours."""
        workers = self.arguments.workers
        return [Split(prefill, workers - prefill) for prefill in range(workers - 1, 0, -1)]

    @property
    def clients(self) -> LoadSettings:
        """Settings of the client processes."""
        return LoadSettings(self.arguments.clients, self.arguments.drain_seconds)

    def cluster(self, split: Split, planner: PlannerSettings) -> AbstractContextManager[Endpoints]:
        """Returns a cluster that starts with this split."""
        classes: tuple[SloClass, ...] = (self.given.slo,) if self.given else promises()
        roles = {"mode": "disaggregated", "prefill": split.prefill, "decode": split.decode, "planner": planner}
        named = {"device": self.arguments.device, "slo_classes": (*classes, BEST_EFFORT)}
        self.table.say(f"starting a cluster, {split.text}, planner {planner.mode.value}")
        return running_cluster(self.model, self.settings | roles | named)

    def statics(self) -> tuple[Sizes, Statics]:
        """Measures the share of requests that meet their class in each split; sizes the hours first."""
        began = self.table.passed_s
        with self.cluster(self.splits[0], PlannerSettings()) as listeners:
            self.start_s = self.table.passed_s - began
            target = find_target(listeners.grpc)
            switch = Switch(listeners, target, self.arguments.drain_seconds)
            statics = Statics(target, switch, self.clients, self.arguments.seed)
            self.table.say("serves")
            sizes, seconds = self.given or self.sized(statics), self.arguments.static_seconds
            kinds, cell = list(sizes.kinds), cell_of(sizes.slo)
            if not self.given:
                seconds = self.table.static_seconds(
                    self.arguments.hours, len(self.splits) * len(kinds) + 1, self.start_s + WARMUP_S, self.overhead_s
                )
                self.table.say(f"oracles run hours of {seconds:.1f} s")
                for number, split in ((1, self.splits[-1]), (0, self.splits[0])):
                    kinds[number] = statics.tuned(split, kinds[number], number, cell, seconds)
            statics.all(self.splits, kinds, cell, seconds)
            self.table.say(f"kept: {statics.shares}")
        return Sizes(sizes.slo, kinds[0], kinds[1], sizes.window_s), statics

    def sized(self, statics: Statics) -> Sizes:
        """Sizes the day by the workers' measured speed."""
        defaults = CPU_BATCH_REQUESTS if self.arguments.device == "cpu" else GPU_BATCH_REQUESTS
        batch = int(str(self.settings.get("max_batch_requests", defaults)))
        self.pace, overhead_s = statics.measure(self.arguments.workers, batch)
        self.table.say(f"pace: {self.pace}")
        sizes = size(self.pace)
        self.table.say(f"sized: {json.dumps(sizes.as_result())}")
        self.overhead_s = overhead_s + _TAIL * sizes.slo.ttft_s
        return sizes

    def planned(self, listeners: Endpoints, sizes: Sizes, day: LiveDay) -> dict[str, Any]:
        """Runs the whole day with the planner on."""
        target, cell = find_target(listeners.grpc), cell_of(sizes.slo)
        with Watch(listeners, self.table.say) as watch:
            report = ask(target, day.workload, cell, self.clients, where="planned", on_start=watch.start)
        met, due = day.met(report, cell)
        changes = [{**each, "at_s": round(each["at_s"] - day.warmup_s, 1)} for each in watch.changes]
        return {
            "goodput_per_s": [round(each / day.seconds, 4) for each in met],
            "share": [round(kept / max(all_, 1), 4) for kept, all_ in zip(met, due, strict=True)],
            "changes": [each for each in changes if each["at_s"] >= 0],
            "changes_before": [each for each in changes if each["at_s"] < 0],
            "load": report.as_result(),
            **target.as_result(),
        }

    def predicted(self, sizes: Sizes, hour_s: float, static_s: float) -> dict[str, Any] | None:
        """Returns the results under the virtual clock; None for a day that was not sized."""
        if self.pace is None:
            return None
        batch, tokens = (int(str(self.settings[name])) for name in ("max_batch_requests", "max_step_tokens"))
        seed, began = self.arguments.seed, time.process_time()
        rehearsal = Rehearsal.of(self.pace, sizes, batch=batch, step_tokens=tokens, seed=seed)
        found = rehearsal.go(self.splits, self.arguments.hours, hour_s, static_s)
        self.table.say(f"predicted in {time.process_time() - began:.1f} s: {json.dumps(found)}")
        return found

    def day(self, sizes: Sizes) -> LiveDay:
        """Returns the day, as long as the remaining time allows."""
        count = self.arguments.hours
        hours: list[LiveHour] = [sizes.kinds[number % 2] for number in range(count)]
        if self.given:
            return LiveDay(hours, self.arguments.hour_seconds, self.arguments.seed)
        seconds = self.table.hour_seconds(count, WARMUP_S + self.overhead_s)
        return LiveDay(hours, seconds, self.arguments.seed, WARMUP_S)


def cell_of(slo: SloClass) -> SloCell:
    """Returns the class as the cell by which clients judge."""
    return SloCell(slo.name, slo.ttft_s, slo.itl_s, slo.itl_percent)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    description = (__doc__ or "").split("\n", 1)[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner.live", description=description)
    add_model_options(parser)
    add_day_options(parser, workers=3, hour_s=200.0, static_s=90.0, ttft_ms=5000.0, itl_ms=150.0)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a field of ClusterSettings")
    parser.add_argument("--seconds", type=float, default=330.0, help="of the whole run, where the day is sized")
    parser.add_argument(
        "--hour",
        action="append",
        metavar="NAME:RATE:PROMPT:ANSWER",
        help="one of two kinds of hours: requests a second and mean tokens, with lengths and targets as the options "
        "above say; without it the day is sized by how fast workers are",
    )
    parser.add_argument("--clients", type=int, default=2, help="client processes")
    parser.add_argument("--drain-seconds", type=float, default=30.0, help="for answers after the last arrival")
    return parser.parse_args(arguments)


def given(arguments: argparse.Namespace) -> Sizes | None:
    """Returns the sizes that the command line gives; None without."""
    if not arguments.hour:
        return None
    if len(arguments.hour) != 2:
        raise InvalidArgument("--hour", f"{len(arguments.hour)} kinds of hours cannot alternate; two can")
    slo = SloClass("planned", ttft_s=arguments.ttft_ms / 1e3, itl_s=arguments.itl_ms / 1e3, itl_percent=95.0)
    first, second = map(parse_hour, arguments.hour)
    return Sizes(slo, first, second, arguments.window)


def run(arguments: argparse.Namespace, table: Timetable) -> dict[str, Any]:
    """Runs everything; prints results as they arrive, and saves them before the last cluster stops.

    InvalidArgument for fewer than three workers.
    """
    if arguments.workers < 3:
        raise InvalidArgument("--workers", f"{arguments.workers} have one split; three or more can be changed")
    replay = Replay(choose_model(arguments.model, arguments.shape), arguments, table, given(arguments))
    sizes, statics = replay.statics()
    with replay.cluster(replay.splits[-1], PlannerSettings(PlannerMode.ON, sizes.window_s)) as listeners:
        touch(find_target(listeners.grpc))
        day = replay.day(sizes)
        table.say(f"a day of {len(day.hours)} hours of {day.seconds:.1f} s, over in {day.end_s:.0f} s")
        result = summary(replay, sizes, statics, day, replay.planned(listeners, sizes, day))
        result["predicted"] = replay.predicted(sizes, day.seconds, statics.loads[-1].workload.seconds)
        if arguments.save:
            name = f"planner-live-{result['model']}-{arguments.workers}-workers"
            table.say(f"saved {save_result(name, result)}")
        print(json.dumps({key: value for key, value in result.items() if key not in _LONG}), flush=True)
    return result


_LONG = {"planned", "static_loads", "predicted"}


def summary(replay: Replay, sizes: Sizes, statics: Statics, day: LiveDay, planned: dict[str, Any]) -> dict[str, Any]:
    """Returns the result for JSON."""
    arguments, by_split = replay.arguments, statics.goodput(day.due_per_s())
    return {
        **judged(planned, by_split, [hour.name for hour in day.hours], day.seconds),
        **sizes.as_result(),
        "note": _NOTE,
        "share": planned["share"],
        "changes": planned["changes"],
        "hours": len(day.hours),
        "hour_seconds": day.seconds,
        "warmup_seconds": day.warmup_s,
        "ttft_prompts": TTFT_PROMPTS,
        "pace": None if replay.pace is None else asdict(replay.pace),
        "planned": planned,
        "static_share": statics.shares,
        "static_goodput_per_s": by_split,
        "static_loads": statics.as_result(),
        "settings": {name: str(value) for name, value in replay.settings.items()},
        "start_seconds": round(replay.start_s, 1),
        "seconds": round(replay.table.passed_s, 1),
        "seed": arguments.seed,
        "model": planned["model"],
        "dtype": planned["dtype"],
        **run_facts("cuda" if arguments.device.startswith("cuda") else "cpu"),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the day, judges and prints it; JSON last."""
    began = time.monotonic()
    parsed = parse_arguments(arguments)
    table = Timetable(parsed.seconds, began)
    try:
        run(parsed, table)
    except TandemError as error:
        raise SystemExit(error.message) from None


if __name__ == "__main__":
    main()
