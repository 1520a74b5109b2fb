"""The strategy table is measured on a real cluster that is switched from row to row.

If all rows are already measured, no cluster is started. The measured values are not checked.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from benchmarks.strategies.__main__ import main
from benchmarks.strategies.switch import BY_SWITCH
from tandem.cluster.launcher import Endpoints

LOAD = "--rates 3 --seconds 2 --drain-seconds 120 --length-scale 0.01 --ask none --clients 1 --minutes 60"
FEW_AND_SHORT = {"WARM_REQUESTS": 2, "WARM_PROMPT": 16, "WARM_TOKENS": 3, "LONE_PROMPT": 32, "LONE_TOKENS": 5}
"""Smaller warm-up and single-request phases before the loads."""
AS_STARTED = {"mode": "disaggregated", "prefill": 1, "decode": 1, "step_policy": "unchunked"}


@pytest.fixture
def starts(running_cluster: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """The settings of each cluster that the command starts; it is given the cluster that other tests share."""
    cluster = running_cluster(dtype="float32", page_tokens=16, max_step_tokens=512)
    started: list[object] = []

    def start(model: object, settings: object) -> AbstractContextManager[Endpoints]:
        started.append(settings)
        return nullcontext(cluster.listeners)

    monkeypatch.setattr("benchmarks.strategies.measured.running_cluster", start)
    for name, value in FEW_AND_SHORT.items():
        monkeypatch.setattr(f"tandem.cli.load.target.{name}", value)
    yield started
    asyncio.run(cluster.controller.set_mode(**AS_STARTED))
    cluster.assert_idle_and_sound()


def test_a_table_is_measured_once_and_drawn(
    starts: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts, pictures = tmp_path / "parts", tmp_path / "pictures"
    command = [*LOAD.split(), "--only", "shared,adaptive", "--workloads", "balanced", "--parts", str(parts)]
    main(command)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["complete"]
    assert list(result["tables"]["balanced"]["rows"]) == ["shared", "adaptive"]
    assert starts == [{"device": "cpu", "mode": "adaptive", "workers": 2}]
    kept = {row: parts / f"balanced--{row}.json" for row in ("shared", "adaptive")}
    measured = {row: file.read_bytes() for row, file in kept.items()}
    for content in measured.values():
        part = json.loads(content)
        (load,) = part["loads"]
        assert part["reached_by"] == BY_SWITCH
        assert load["rate"] == 3
        assert load["finished"] == load["requests"] > 0
        assert load["steps"]
    (shared,) = json.loads(measured["shared"])["loads"]
    ways = [way.split(">") for way in shared["served_by"]]
    # An answer of one token ends with its prefill.
    assert all(decode in {prefill, ""} for prefill, decode in ways), "nothing leaves its worker in this row"

    main([*command, "--pictures", str(pictures)])
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["tables"] == result["tables"]
    assert len(starts) == 1
    assert {row: file.read_bytes() for row, file in kept.items()} == measured
    assert [file.name for file in pictures.iterdir()] == ["strategies-balanced.svg"]
