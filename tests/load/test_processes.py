"""The criteria for processes that grow, and the counts of objects inside of a process."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from tests.load.leaks import MEMORY_GROWTH_MAX, Series
from tests.load.processes import ProcessSize, counted_processes

SIZE = ProcessSize(100 << 20, 50, 20, 100_000, 50_000, {"builtins.dict": 900})

KEEPS = """
import sys

class Kept:
    pass

kept = []
for _ in sys.stdin:
    kept += [Kept() for _ in range(1000)]
    print("kept", flush=True)
"""


def series(*sizes: ProcessSize) -> Series:
    """Returns measurements of one process."""
    made = Series.__new__(Series)
    made.sizes, made.shared = [{"router": size} for size in sizes], [(2, 4096)] * len(sizes)
    return made


def test_nothing_has_grown_if_only_one_measurement_was_higher() -> None:
    assert series(SIZE, replace(SIZE, memory=SIZE.memory << 1, fds=90), SIZE, SIZE).growth(0, 1000) == []


@pytest.mark.parametrize(
    "growth",
    [{"memory": MEMORY_GROWTH_MAX + 1}, {"fds": 3}, {"threads": 7}, {"blocks": 2100}, {"objects": 2100}],
    ids=["memory", "fds", "threads", "blocks", "objects"],
)
def test_each_kind_of_growth_is_found(growth: dict[str, int]) -> None:
    ((what, grown),) = growth.items()
    more = replace(SIZE, **cast("dict[str, Any]", {what: getattr(SIZE, what) + grown}))
    (found,) = series(SIZE, SIZE, more, more).growth(0, 1000)
    assert found.startswith(f"router: {what} grew by {grown} in 1000 requests")


def test_shared_memory_that_is_left_is_found() -> None:
    made = series(SIZE, SIZE, SIZE)
    made.shared[-1] = (3, 8192)
    assert made.growth(0, 10) == ["shared memory grew from 2 files of 4096 bytes to 3 of 8192"]


def test_a_process_counts_the_objects_that_it_keeps(tmp_path: Path) -> None:
    with (
        counted_processes(tmp_path) as counts,
        subprocess.Popen(
            [sys.executable, "-c", KEEPS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        (before,) = counts.sizes({"one": process.pid}).values()
        process.stdin.write("more\n")
        process.stdin.flush()
        assert process.stdout.readline() == "kept\n"
        (after,) = counts.sizes({"one": process.pid}).values()
        process.stdin.close()
    assert after.kinds["__main__.Kept"] == 1000
    assert after.objects - before.objects >= 1000
