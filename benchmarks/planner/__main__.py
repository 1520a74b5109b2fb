"""Runs the planner through a day of changing load: `python -m benchmarks.planner --workers 64`.

Hours of long prompts and short answers alternate with hours of short prompts and long answers. The planner's own class,
which knows neither hours nor lengths, is compared with two oracles: the best split for each hour, and the best constant
split. All answers have the same limit, so that none reveals its length. The last line is one JSON object.
"""

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from typing import Any

from benchmarks.planner.hours import Day, Hour
from benchmarks.planner.options import add_day_options
from benchmarks.planner.oracles import judged
from benchmarks.planner.run import NETWORK, PlannedRun, Run
from benchmarks.results import run_facts, save_result
from tandem.capacity.planner.decision import Split
from tandem.capacity.simulation.arrivals import Mix
from tandem.capacity.simulation.hardware import Hardware, hardware
from tandem.settings.slo import SloClass

SIGMA = 0.5
PREFILL_RATE, DECODE_RATE = 3.8, 3.6
"""Requests per second and worker in both kinds of hours: about four fifths of the best split's goodput."""
SHARES = (0.0625, 0.125, 0.1875, 0.25, 0.375, 0.5, 0.625, 0.75, 0.8125, 0.875)
"""Shares of prefill workers among which the oracles choose."""


def hours(workers: int, count: int) -> list[Hour]:
    """Returns the hours, whose kinds alternate."""
    kinds = (
        Hour("prefill-heavy", Mix(PREFILL_RATE * workers, 1500, 50, SIGMA)),
        Hour("decode-heavy", Mix(DECODE_RATE * workers, 200, 1000, SIGMA)),
    )
    return [kinds[number % 2] for number in range(count)]


def _static(machine: Hardware, day: Day, split: Split, step_policy: str) -> float:
    """Returns the goodput of a day with one hour."""
    tally = Run(machine, day, split, step_policy).go()
    return tally.met[0] / day.seconds


def _planned(machine: Hardware, day: Day, split: Split, step_policy: str, window_s: float) -> dict[str, Any]:
    began = time.process_time()
    run = PlannedRun(machine, day, split, step_policy, window_s=window_s)
    tally = run.go()
    return {
        "goodput_per_s": tally.per_s(day.seconds),
        "share": [round(met / due, 4) for met, due in zip(tally.met, tally.due, strict=True)],
        "changes": [asdict(each) for each in run.changes],
        "cpu_s": round(time.process_time() - began, 1),
    }


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description=(__doc__ or "").split("\n", 1)[0])
    add_day_options(parser, workers=64, hour_s=300.0, static_s=120.0, ttft_ms=3000.0, itl_ms=30.0)
    parser.add_argument("--shape", default="qwen3-32b")
    parser.add_argument("--kv-gib", type=float, default=50.0)
    parser.add_argument("--step-policy", default="decode-priority")
    parser.add_argument("--misjudged", type=float, default=1.0, help="predicted ÷ true seconds of a step")
    parser.add_argument("--processes", type=int, default=1)
    return parser.parse_args(arguments)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs everything; prints results as they arrive."""
    machine = hardware(arguments.shape, None, arguments.kv_gib, arguments.misjudged)
    slo = SloClass("planned", ttft_s=arguments.ttft_ms / 1e3, itl_s=arguments.itl_ms / 1e3, itl_percent=95.0)
    workers, seconds = arguments.workers, arguments.hour_seconds
    day = Day(hours(workers, arguments.hours), seconds, slo, arguments.seed)
    prefills = sorted({min(max(1, round(share * workers)), workers - 1) for share in SHARES})
    splits = [Split(prefill, workers - prefill) for prefill in prefills]
    kinds = {hour.name: hour for hour in day.hours}
    with ProcessPoolExecutor(arguments.processes) as pool:
        half = Split(workers // 2, workers - workers // 2)
        running = pool.submit(_planned, machine, day, half, arguments.step_policy, arguments.window)
        static = {
            split.text: {
                name: pool.submit(
                    _static,
                    machine,
                    Day([hour], min(seconds, arguments.static_seconds), slo, arguments.seed),
                    split,
                    arguments.step_policy,
                )
                for name, hour in kinds.items()
            }
            for split in splits
        }
        planned = running.result()
        for change in planned["changes"]:
            print(f"{change['at_s']:8.1f} s  {change['flips']:3d} flips  {change['reason']}", flush=True)
        print("goodput/s of each hour", planned["goodput_per_s"], "shares", planned["share"], flush=True)
        by_split = {}
        for text, found in static.items():
            by_split[text] = {name: round(future.result(), 3) for name, future in found.items()}
            print(text, by_split[text], flush=True)
    names = [hour.name for hour in day.hours]
    result = judged(planned, by_split, names, seconds)
    return {
        "model": arguments.shape,
        "dtype": "bfloat16",
        "workers": workers,
        "hours": [{"name": hour.name, **asdict(hour.mix)} for hour in day.hours],
        "hour_seconds": seconds,
        "window_s": arguments.window,
        "misjudged": arguments.misjudged,
        "step_policy": arguments.step_policy,
        "slo": {"ttft_ms": arguments.ttft_ms, "itl_ms": arguments.itl_ms, "itl_percent": slo.itl_percent},
        **result,
        "planned": planned,
        "static_goodput_per_s": by_split,
        "static_seconds": min(seconds, arguments.static_seconds),
        "network": asdict(NETWORK),
        "seed": arguments.seed,
        **run_facts("cpu"),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulates, judges and prints; JSON last."""
    parsed = parse_arguments(arguments)
    result = run(parsed)
    if parsed.save:
        print("saved", save_result(f"planner-{parsed.shape}-{parsed.workers}-workers", result))
    print(json.dumps({key: value for key, value in result.items() if key not in {"planned", "static_goodput_per_s"}}))


if __name__ == "__main__":
    main()
