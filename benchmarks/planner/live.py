"""The planner of a real cluster through a day that swings: `python -m benchmarks.planner.live`.

As `benchmarks.planner`, with workers, router and clients of their own processes in place of the virtual clock: one
cluster whose planner is on meets the whole day, another whose planner is off meets an hour of each kind in each split.
On a CPU each worker computes with one thread. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from types import TracebackType
from typing import Any

from benchmarks.load.command import show
from benchmarks.load.report import LoadReport
from benchmarks.load.run import LoadSettings, run_load
from benchmarks.load.slo import SloCell
from benchmarks.load.stage import parse_setting, running_cluster
from benchmarks.load.synthetic import Lengths, Synthetic
from benchmarks.load.target import Target, find_target, warm_up
from benchmarks.load.workload import Arrival, Workload
from benchmarks.planner.oracles import judged
from benchmarks.results import run_facts, save_result
from benchmarks.served_model import ServedModel, add_model_options, choose_model
from benchmarks.strategies.rows import Strategy
from benchmarks.strategies.switch import Switch
from cli.controller_client import ControllerClient
from cluster.launcher import Endpoints
from cluster.planner_config import PlannerConfig, PlannerMode
from planner.decision import Direction, Split
from router.slo import SloClass
from router.verdict import Outcome
from wire.errors import InvalidArgument, TandemError
from wire.messages import Role

_HOUR_BITS = 32
"""More than requests of an hour: prompts of two hours have nothing in common."""
_PROMPT_SIGMA, _ANSWER_SIGMA = 0.5, 0.3
HOURS = ("prefill-heavy:1.5:200:5", "decode-heavy:1.5:30:80")
"""For a small model on two cores, each of which computes some 260 tokens of prompts a second."""
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class LiveHour:
    """A stretch of time in which the mix stays as it is; `rate` in requests a second."""

    name: str
    rate: float
    source: Synthetic

    def workload(self, seconds: float, seed: int) -> Workload:
        return replace(self.source.at(self.rate, seconds, seed), name=self.name)


def parse_hour(text: str) -> LiveHour:
    """From NAME:RATE:PROMPT:ANSWER, mean lengths in tokens. InvalidArgument says what is wrong."""
    try:
        name, rate, prompt, answer = text.split(":")
        per_s = float(rate)
    except ValueError:
        raise InvalidArgument("--hour", f"{text!r} is not NAME:RATE:PROMPT_TOKENS:ANSWER_TOKENS") from None
    if not per_s > 0:
        raise InvalidArgument("--hour", f"{text!r} needs a rate above 0")
    prompts = Lengths.parse("--hour", f"lognormal:{prompt}:{_PROMPT_SIGMA}")
    return LiveHour(name, per_s, Synthetic(prompts, Lengths.parse("--hour", f"lognormal:{answer}:{_ANSWER_SIGMA}")))


def day_of(hours: Sequence[LiveHour], seconds: float, seed: int) -> Workload:
    """The hours one after the other, each `seconds` long."""
    arrivals = [
        Arrival(
            number * seconds + arrival.due_s,
            tuple(replace(block, key=(number << _HOUR_BITS) + block.key) for block in arrival.prompt),
            arrival.new_tokens,
        )
        for number, hour in enumerate(hours)
        for arrival in hour.workload(seconds, seed + number).arrivals
    ]
    whole_s = seconds * len(hours)
    return Workload("day", len(arrivals) / whole_s, whole_s, seed, tuple(arrivals))


def met_by_hour(report: LoadReport, cell: SloCell, hours: int) -> tuple[list[int], list[int]]:
    """Requests that kept their promise, and all, of each hour of a day, by the moment they were due."""
    seconds = report.workload.seconds / hours
    of = [min(int(record.due_s / seconds), hours - 1) for record in report.records]
    met = Counter(hour for hour, record in zip(of, report.records, strict=True) if cell.judge(record) is Outcome.MET)
    due = Counter(of)
    return [met[hour] for hour in range(hours)], [due[hour] for hour in range(hours)]


class Watch(AbstractContextManager["Watch"]):
    """Asks the controller once a second who prefills; `changes` has what changed, `at_s` seconds after its start."""

    def __init__(self, doors: Endpoints) -> None:
        self.changes: list[dict[str, Any]] = []
        self._controller = ControllerClient(doors.controller, doors.token)
        self._over = threading.Event()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        before: Split | None = None
        while not self._over.wait(_LOOK_S):
            now = asyncio.run(self._split())
            if before is not None and now.prefill != before.prefill:
                self._note(now, now.prefill - before.prefill)
            before = now

    async def _split(self) -> Split:
        roles = Counter(info.duty.role if info.duty else info.role for info in await self._controller.workers())
        return Split(roles[Role.PREFILL], roles[Role.DECODE])

    def _note(self, now: Split, more: int) -> None:
        at_s, way = time.monotonic() - self._began, Direction.TO_PREFILL if more > 0 else Direction.TO_DECODE
        change = {"at_s": round(at_s, 1), "split": now.text, "flips": abs(more), "direction": way.value}
        print(f"{at_s:8.1f} s  {now.text}", flush=True)
        self.changes.append(change)


@dataclass(frozen=True, slots=True)
class Replay:
    """What both clusters have in common."""

    model: ServedModel
    arguments: argparse.Namespace
    hours: Sequence[LiveHour] = field(default_factory=tuple)

    @property
    def slo(self) -> SloClass:
        return SloClass("planned", self.arguments.ttft_ms / 1e3, self.arguments.itl_ms / 1e3, itl_percent=95.0)

    @property
    def cell(self) -> SloCell:
        slo = self.slo
        return SloCell(slo.name, slo.ttft_s, slo.itl_s, slo.itl_percent)

    def settings(self, split: Split, planner: PlannerConfig) -> dict[str, object]:
        """Of a cluster."""
        arguments = self.arguments
        extra: dict[str, object] = {"threads": 1} if arguments.device == "cpu" else {}
        extra |= dict(parse_setting(each) for each in arguments.set)
        roles = {"mode": "disaggregated", "prefill": split.prefill, "decode": split.decode, "planner": planner}
        return extra | roles | {"device": arguments.device, "slo_classes": (self.slo,), "default_slo_class": "planned"}

    def load(self, target: Target, workload: Workload) -> LoadReport:
        """Of requests that all have the promise."""
        settings = LoadSettings(self.arguments.clients, self.arguments.drain_seconds, slo_class=self.cell.name)
        print(f"{workload.name:>14} ", end="")
        return show(run_load(target, workload, [self.cell], settings))

    def planned(self, split: Split) -> dict[str, Any]:
        """The whole day, begun in this split."""
        arguments, count = self.arguments, len(self.hours)
        planner = PlannerConfig(PlannerMode.ON, arguments.window)
        with running_cluster(self.model, self.settings(split, planner)) as doors:
            target = find_target(doors.grpc)
            warm_up(target)
            with Watch(doors) as watch:
                report = self.load(target, day_of(self.hours, arguments.hour_seconds, arguments.seed))
        met, due = met_by_hour(report, self.cell, count)
        return {
            "goodput_per_s": [round(each / arguments.hour_seconds, 4) for each in met],
            "share": [round(kept / max(all_, 1), 4) for kept, all_ in zip(met, due, strict=True)],
            "changes": watch.changes,
            "load": report.as_result(),
            **target.as_result(),
        }

    def static(self, splits: Sequence[Split]) -> dict[str, dict[str, float]]:
        """Goodput of each split in an hour of each kind, without a planner."""
        arguments, found = self.arguments, {split.text: dict[str, float]() for split in splits}
        with running_cluster(self.model, self.settings(splits[0], PlannerConfig())) as doors:
            target = find_target(doors.grpc)
            warm_up(target)
            switch = Switch(doors, target, arguments.drain_seconds)
            for split in splits:
                settings = {"mode": "disaggregated", "prefill": split.prefill, "decode": split.decode}
                switch.to(Strategy(split.text, "disaggregated", settings))
                for number, hour in enumerate({each.name: each for each in self.hours}.values()):
                    # Every load has tokens of its own: none finds another's prompts in a cache.
                    seed = arguments.seed + number
                    workload = hour.workload(arguments.static_seconds, seed)
                    fresh = replace(workload, seed=seed + (split.prefill << _HOUR_BITS))
                    print(f"{split.text} ", end="")
                    (score,) = self.load(target, fresh).scores
                    found[split.text][hour.name] = round(score.per_s, 4)
        return found


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    description = (__doc__ or "").split("\n", 1)[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner.live", description=description)
    add_model_options(parser)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a field of ClusterConfig")
    parser.add_argument(
        "--hour",
        action="append",
        metavar="NAME:RATE:PROMPT:ANSWER",
        help=f"a kind of hour: requests a second and mean tokens; repeatable; default: {' '.join(HOURS)}",
    )
    parser.add_argument("--hours", type=int, default=4, help="of the day; the kinds take turns")
    parser.add_argument("--hour-seconds", type=float, default=200.0)
    parser.add_argument("--static-seconds", type=float, default=90.0, help="of the hours that the oracles look at")
    parser.add_argument("--window", type=float, default=5.0, help="seconds between two looks of the planner")
    parser.add_argument("--ttft-ms", type=float, default=5000.0)
    parser.add_argument("--itl-ms", type=float, default=150.0)
    parser.add_argument("--clients", type=int, default=2, help="client processes")
    parser.add_argument("--drain-seconds", type=float, default=60.0, help="for answers after the last arrival")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="keep the run under benchmarks/results/")
    return parser.parse_args(arguments)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything, printed as it comes. InvalidArgument for a cluster of fewer than two workers."""
    if arguments.workers < 2:
        raise InvalidArgument("--workers", f"{arguments.workers} cannot be split into roles; two or more can")
    kinds = [parse_hour(each) for each in arguments.hour or HOURS]
    hours = [kinds[number % len(kinds)] for number in range(arguments.hours)]
    replay = Replay(choose_model(arguments.model, arguments.shape), arguments, hours)
    splits = [Split(prefill, arguments.workers - prefill) for prefill in range(1, arguments.workers)]
    planned = replay.planned(splits[0])
    by_split = replay.static(splits)
    return {
        "hours": [{"name": hour.name, "rate": hour.rate, **asdict(hour.source)} for hour in hours],
        "hour_seconds": arguments.hour_seconds,
        "window_s": arguments.window,
        "slo": replay.cell.as_result(),
        **judged(planned, by_split, [hour.name for hour in hours], arguments.hour_seconds),
        "planned": planned,
        "static_goodput_per_s": by_split,
        "static_seconds": arguments.static_seconds,
        "settings": [*arguments.set],
        "seed": arguments.seed,
        "model": planned["model"],
        "dtype": planned["dtype"],
        **run_facts("cuda" if arguments.device.startswith("cuda") else "cpu"),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Replay, show, judge; JSON last."""
    parsed = parse_arguments(arguments)
    try:
        result = run(parsed)
    except TandemError as error:
        raise SystemExit(error.message) from None
    if parsed.save:
        print("saved", save_result(f"planner-live-{result['model']}-{parsed.workers}-workers", result))
    print(json.dumps({key: value for key, value in result.items() if key != "planned"}))


if __name__ == "__main__":
    main()
