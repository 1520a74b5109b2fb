"""Predictions of `tandem plan` beside kept measurements."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from benchmarks.planning import break_even_row, knee_rows, speedup_rows, tables
from benchmarks.results import RESULTS, newest_result


@pytest.fixture
def short_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the loads; the knee is only roughly right."""
    for name, value in (("REQUESTS", 20), ("SECONDS_MIN", 1.0), ("LIVES", 1.0), ("LOADS_MAX", 2)):
        monkeypatch.setattr(f"tandem.capacity.simulation.knee.{name}", value)


def write(folder: Path, name: str, date: str, workers: int, *rows: str, **more: Any) -> None:
    table = {"tables": {"balanced": {"rows": {row: {} for row in rows}}}, "workers": workers, "date": date}
    (folder / f"strategies-llama-3-8b-{name}.json").write_text(json.dumps(table | more))


def test_the_newest_whole_table_of_each_number_of_gpus_is_compared(tmp_path: Path) -> None:
    write(tmp_path, "a", "2026-01-01", 1, "shared", "adaptive")
    write(tmp_path, "b", "2026-01-02", 1, "shared", "adaptive", "priority")
    write(tmp_path, "c", "2026-01-03", 1, "adaptive")
    write(tmp_path, "d", "2026-01-01", 2, "shared", "adaptive")
    names = [file.stem[-1] for file in tables(tmp_path, ["balanced"])]
    assert sorted(names) == ["b", "d"]
    assert tables(tmp_path, ["decode-heavy"]) == []


@pytest.mark.usefixtures("short_loads")
def test_a_knee_has_the_price_of_its_tokens(tmp_path: Path) -> None:
    """At 2 requests/s of 2,500 tokens, two GPUs at $1 an hour compute a million tokens in 200 s."""
    load = {"rate": 2.0, "goodput": {name: {"share": 1.0} for name in ("strict", "balanced", "quick")}}
    facts = {"model": "llama-3-8b", "hardware": {"name": "NVIDIA H200"}, "ask": "adaptive", "unloaded_step_s": 0.004}
    write(tmp_path, "a", "2026-01-01", 2, "shared", "adaptive", loads={"balanced": {"shared": [load]}}, **facts)
    rows = list(knee_rows(tmp_path / "strategies-llama-3-8b-a.json"))
    assert [row["what"] for row in rows] == [
        f"balanced, 2 GPUs, shared, {name}" for name in ("strict", "balanced", "quick")
    ]
    for row in rows:
        assert row["measured"] == [2.0, None]
        assert row["price_measured"] == [None, pytest.approx(2 * 200 / 3600, abs=1e-4)]
        assert row["near"] is (row["predicted"] >= 2 * 0.85)
        if row["predicted"]:
            assert row["price_predicted"] == pytest.approx(row["price_measured"][1] * 2.0 / row["predicted"], rel=1e-2)


def test_speedups_by_drafts_are_those_of_the_kept_run() -> None:
    """The run's number of accepted drafts is its own, so that what remains is the prediction of the steps."""
    _, run = newest_result(RESULTS, "speculation-speed-llama-3-8b", "rows")
    rows = list(speedup_rows(run))
    assert len(rows) == sum(len(row["fixed"]) for row in run["rows"])
    assert fmean(abs(row["predicted"] / row["measured"] - 1) for row in rows) < 0.06
    even = break_even_row(run)
    assert (even["measured"], even["predicted"], even["near"]) == ([128, None], 129, True)
    slow = {**run, "rows": [{**row, "fixed": {"3": {"over_off": 2.0 - row["batch"] / 50}}} for row in run["rows"]]}
    assert break_even_row(slow)["measured"] == [32, 64]
