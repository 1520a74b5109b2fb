"""Command-line options that both replays of a day share."""

import argparse


def add_day_options(
    parser: argparse.ArgumentParser,
    *,
    workers: int,
    hour_s: float,
    static_s: float,
    ttft_ms: float,
    itl_ms: float,
) -> None:
    """Adds the options with these defaults."""
    parser.add_argument("--workers", type=int, default=workers)
    parser.add_argument("--hours", type=int, default=4, help="of the day; the kinds take turns")
    parser.add_argument("--hour-seconds", type=float, default=hour_s)
    parser.add_argument("--static-seconds", type=float, default=static_s, help="of the oracles' hours")
    parser.add_argument("--window", type=float, default=5.0, help="seconds between two decisions of the planner")
    parser.add_argument("--ttft-ms", type=float, default=ttft_ms)
    parser.add_argument("--itl-ms", type=float, default=itl_ms)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results/")
