"""The benchmark of steps without a device, at a toy size."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from benchmarks.scheduling import PARTS, STEP_S, Plan, _decode_all, _figures, measure, measured_step_s
from tandem.protocol.messages import SamplingParams
from tandem.protocol.policy_name import PolicyName
from tandem.worker.worker import Worker


@pytest.mark.parametrize("joining", [False, True])
def test_every_part_of_every_step_is_counted(joining: bool) -> None:
    plan = Plan(3, 5, 0.001)
    watch = asyncio.run(measure(plan, PolicyName.CHUNKED, joining=joining, temperature=1.0))
    assert all(len(watch.spent[part]) >= 5 for part in ("plan", "pack", "drawn", "applied", "learned", "outbox"))
    assert watch.spent["send"]
    figures = _figures(watch, plan)
    assert min(figures[f"{part}_us"] for part in PARTS) > 0
    assert figures["us_low"] <= figures["us"] <= figures["us_p99"]


def test_a_batch_that_is_never_full_is_said() -> None:
    """Before, the benchmark waited forever if the first answers ended before the last prompt had joined."""
    loads = iter([1, 2, 2, 1])
    worker = SimpleNamespace(
        reserve=lambda _: SimpleNamespace(lease=None),
        prefill=lambda _: None,
        report=SimpleNamespace(load=lambda: SimpleNamespace(decode_requests=next(loads))),
    )
    with pytest.raises(RuntimeError, match="an answer ended when 2 of 3 ran"):
        asyncio.run(_decode_all(cast(Worker, worker), Plan(3, 5, 0.001), SamplingParams(max_tokens=9)))


def test_steps_last_as_long_as_the_newest_kept_run_says(tmp_path: Path) -> None:
    for day, measured in (("2026-01-01", {"decode_ms_b32": 5.0}), ("2026-01-02", {"decode_ms_b256": 15.0})):
        file = tmp_path / f"engine-llama-3-8b-GPU-{day}-bfloat16.json"
        file.write_text(json.dumps(measured), encoding="utf-8")
    assert measured_step_s(256, tmp_path) == 0.015
    assert measured_step_s(32, tmp_path) == 0.005
    assert measured_step_s(7, tmp_path) == STEP_S
