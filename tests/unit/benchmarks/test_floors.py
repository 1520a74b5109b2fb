"""Floors of results, and the command that checks the newest ones."""

import json
from pathlib import Path

import pytest

from benchmarks.floors import check, floors_of

SMALL = {"shape": "qwen3-0.6b", "decode_bw_ratio_b1": 0.4, "decode_bw_ratio_b32": 0.58, "decode_idle_share_b32": 0.03}


def write(folder: Path, name: str, day: int, **figures: object) -> None:
    run = {"hardware": {"name": "Chip"}, "date": f"2026-01-0{day}T10:30:00+00:00", "shape": "llama-3-8b"} | figures
    (folder / f"{name}-{day}.json").write_text(json.dumps(run))


def test_a_run_that_holds_all_of_its_floors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "engine-a", 1, **SMALL)
    assert check(tmp_path) == 0
    assert capsys.readouterr().out == "held    engine-a-1.json\n"


def test_what_the_newest_run_misses_or_lacks_fails_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "engine-a", 1, **SMALL)
    write(tmp_path, "engine-b", 2, shape="qwen3-0.6b", decode_bw_ratio_b32=0.57, decode_idle_share_b32=0.031)
    assert check(tmp_path) == 1
    assert capsys.readouterr().out.splitlines() == [
        "missed  engine-b-2.json",
        "        decode_bw_ratio_b1 is not in it, its floor is ≥ 0.4",
        "        decode_bw_ratio_b32 is 0.570, its floor is ≥ 0.58",
        "        decode_idle_share_b32 is 0.031, its floor is ≤ 0.03",
    ]
    write(tmp_path, "engine-c", 3, **SMALL)
    assert check(tmp_path) == 0, "the newest one counts"


def test_each_model_hardware_and_number_of_gpus_is_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "weights-a", 1, load_gb_per_s=1.9)
    write(tmp_path, "weights-b", 2, load_gb_per_s=2.1, shape="qwen3-8b")
    write(tmp_path, "weights-c", 3, load_gb_per_s=2.2, hardware={"name": "Other"})
    assert check(tmp_path) == 1
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "missed",
        "load_gb_per_s",
        "held",
        "held",
    ]


def test_transfers_between_two_gpus_have_floors_one_beside_a_figure_of_the_same_run() -> None:
    run = {"gpus": 2, "decode_step_ms": 4.0}
    floor = floors_of("kv", run)["handover_ms_8192"]
    assert str(floor) == "≤ 2 + `decode_step_ms`"
    assert not floor.missed(6.0, run)
    assert floor.missed(6.1, run)
    assert not floors_of("kv", {"gpus": 1}), "both processes share the chip"
    assert floors_of("kv", {"gpus": 0}).keys() == {"exposed_of_prefill_1536"}


def test_other_shapes_benchmarks_and_clusters_on_a_cpu_have_no_floors() -> None:
    assert not floors_of("engine", {"shape": "qwen3-8b"})
    assert not floors_of("tune", {"shape": "llama-3-8b"})
    assert not floors_of("serving", {"cluster_efficiency_b8": 0.9})
    assert floors_of("serving", {"cluster_decode_ratio_b64": 0.9})


def test_each_scheme_has_floors_of_its_own(tmp_path: Path) -> None:
    floors = floors_of("engine", {"shape": "llama-3-8b_fp8_kv-int8"})
    assert str(floors["decode_over_before_b128"]) == "≥ 1.52"
    assert "prefill_over_before_1x8192" in floors_of("engine", {"shape": "llama-3-8b_fp8"})
    assert "decode_bw_ratio_b1" in floors_of("engine", {"shape": "llama-3-8b"})
    write(tmp_path, "engine-a", 1, **SMALL)
    write(tmp_path, "engine-b", 2, shape="qwen3-0.6b_fp8")
    assert check(tmp_path) == 0, "another scheme is another model"
