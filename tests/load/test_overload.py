"""Ten times the capacity of a cluster of real processes: requests are served, or rejected with a hint, at any speed.

`make soak` runs the command itself for ten seconds, which also leaves the cluster idle and consistent.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.load.overload import missed_limits, overload, settings, violations
from tests.load.small_cluster import small_cluster
from tests.soak import soak


@pytest.mark.timeout(600)
def test_requests_beyond_the_capacity_are_rejected_with_a_hint_and_the_cluster_serves_on() -> None:
    with small_cluster(**settings(), max_queued_requests=64) as cluster:
        result = overload(cluster, seconds=4.0, after_s=2.0, requests=48, seed=1)
    assert violations(result) == []


@soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("command", "length"), [("overload", ["--seconds", "10"]), ("leaks", ["--requests", "6000"])])
def test_a_command_finds_nothing_wrong(command: str, length: list[str], tmp_path: Path) -> None:
    """Limits of time may be exceeded on a busy machine, so that only the other findings decide."""
    ran = subprocess.run(
        [sys.executable, "-m", f"tests.load.{command}", *length, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    found = [line for line in ran.stdout.splitlines() if "grew" in line and line != "nothing grew"]
    found += [line for line in ran.stdout.splitlines() if line.startswith(("overload: ", "after: "))]
    assert list(tmp_path.glob("*.json")), ran.stdout + ran.stderr
    assert found == []


def test_limits_of_time_are_named_one_by_one() -> None:
    during: dict[str, Any] = {"met_share_of_admitted": 0.9, "rejected_ms": {"p99": 150.0}}
    assert missed_limits({"overload": during, "recovery_s": 6.0}) == [
        "90.0% of the admitted requests kept their targets",
        "rejections took 150 ms in the 99th percentile",
        "the recovery took 6 s",
    ]
    during = {"met_share_of_admitted": 1.0, "rejected_ms": {"p99": 20.0}}
    assert missed_limits({"overload": during, "recovery_s": 0.0}) == []
