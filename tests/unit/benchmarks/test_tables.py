"""The page of results: what is shown, beside which floor, and what is said of what misses it."""

import json
from pathlib import Path

from benchmarks.floors import floors_of
from benchmarks.metrics_cost import SURE
from benchmarks.results import RESULTS
from benchmarks.tables import PAGE, make_page

FACTS = {"hardware": {"name": "Chip"}, "dtype": "bfloat16", "commit": "0123456789abcdef", "command": "python -m it"}


def write(folder: Path, name: str, day: int, **figures: object) -> None:
    run = FACTS | {"date": f"2026-01-0{day}T10:30:00+00:00", "shape": "llama-3-8b"} | figures
    (folder / f"{name}-{day}.json").write_text(json.dumps(run))


def rows_of(page: str, title: str) -> dict[str, list[str]]:
    """The cells of one table, by the first of each row."""
    part = page.split(f"## {title}", 1)[1].split("\n## ", 1)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("|")]
    return {row[0]: row[1:] for row in rows}


def test_a_column_a_run_beside_the_floor(tmp_path: Path) -> None:
    write(tmp_path, "engine-b", 2, decode_bw_ratio_b1=0.9, decode_bw_ratio_b8=0.1, start_seconds=41.0)
    write(tmp_path, "engine-a", 1, decode_bw_ratio_b1=0.8, start_seconds=40.0, decode_device_ms_b1=7)
    page = make_page(tmp_path)
    assert rows_of(page, "engine: llama-3-8b, Chip, bfloat16") == {
        "figure": ["floor", "2026-01-01 10:30<br>01234567", "2026-01-02 10:30<br>01234567"],
        "---": ["---"] * 3,
        "`decode_bw_ratio_b1`": ["≥ 0.85", "0.800 (missed)", "0.900"],
        "`decode_bw_ratio_b8`": ["", "", "0.100"],
        "`start_seconds`": ["≤ 40", "40.000", "41.000 (missed)"],
    }
    assert "The newest run misses the floor of `start_seconds`, and lacks `decode_bw_ratio_b32`, " in page


SMALL = {"shape": "qwen3-0.6b", "decode_idle_share_b32": 0.029, "decode_bw_ratio_b32": 0.58}


def test_a_run_that_holds_all_of_its_floors(tmp_path: Path) -> None:
    write(tmp_path, "engine-a", 1, **SMALL, decode_bw_ratio_b1=0.4)
    assert "The newest run holds every floor.\n" in make_page(tmp_path)


def test_a_run_without_a_figure_does_not_hold_its_floor(tmp_path: Path) -> None:
    write(tmp_path, "engine-a", 1, **SMALL, decode_bw_ratio_b1=0.4)
    write(tmp_path, "engine-b", 2, **SMALL)
    assert "holds every floor, and lacks `decode_bw_ratio_b1`, of which a floor is set.\n" in make_page(tmp_path)
    write(tmp_path, "engine-c", 3, shape="qwen3-0.6b", decode_idle_share_b32=0.031, decode_bw_ratio_b32=0.58)
    words = "misses the floor of `decode_idle_share_b32`, and lacks `decode_bw_ratio_b1`, of"
    assert words in make_page(tmp_path)


def test_what_goes_through_a_cluster_of_gpus_and_a_load_have_floors(tmp_path: Path) -> None:
    write(tmp_path, "serving-a", 1, cluster_decode_ratio_b64=0.949, cluster_efficiency_b64=1.0)
    write(tmp_path, "weights-a", 1, load_gb_per_s=1.9, load_ratio=0.7)
    page = make_page(tmp_path)
    through = rows_of(page, "serving: llama-3-8b, Chip, bfloat16")
    assert through["`cluster_decode_ratio_b64`"] == ["≥ 0.95", "0.949 (missed)"]
    assert rows_of(page, "weights: llama-3-8b, Chip, bfloat16")["`load_gb_per_s`"] == ["≥ 2", "1.900 (missed)"]


def test_through_a_cluster_on_a_cpu_there_is_no_floor_of_gpus(tmp_path: Path) -> None:
    write(tmp_path, "serving-a", 1, cluster_efficiency_b8=0.9)
    assert "floor" not in make_page(tmp_path).split("## serving")[1]


def test_other_benchmarks_and_shapes_have_no_floors(tmp_path: Path) -> None:
    write(tmp_path, "kv-a", 1, start_seconds=99.0)
    write(tmp_path, "engine-a", 1, shape="qwen3-8b", start_seconds=99.0)
    page = make_page(tmp_path)
    assert rows_of(page, "kv: llama-3-8b, Chip, bfloat16")["`start_seconds`"] == ["99.000"]
    assert rows_of(page, "engine: qwen3-8b, Chip, bfloat16")["`start_seconds`"] == ["99.000"]
    assert "missed" not in page


def test_transfers_between_two_gpus_have_floors_one_beside_a_figure_of_the_same_run(tmp_path: Path) -> None:
    write(tmp_path, "kv-a", 1, gpus=2, handover_ms_8192=6.0, decode_step_ms=4.0, exposed_share_8192=0.03)
    write(tmp_path, "kv-b", 2, gpus=2, handover_ms_8192=6.1, decode_step_ms=4.0, transfer_bw_ratio_2048_read=0.1)
    page = make_page(tmp_path)
    assert rows_of(page, "kv: llama-3-8b, 2 x Chip, bfloat16") == {
        "figure": ["floor", "2026-01-01 10:30<br>01234567", "2026-01-02 10:30<br>01234567"],
        "---": ["---"] * 3,
        "`handover_ms_8192`": ["≤ 2 + `decode_step_ms`", "6.000", "6.100 (missed)"],
        "`decode_step_ms`": ["", "4.000", "4.000"],
        "`exposed_share_8192`": ["≤ 0.02", "0.030 (missed)", ""],
        "`transfer_bw_ratio_2048_read`": ["", "", "0.100"],
    }
    assert "The newest run misses the floor of `handover_ms_8192`, and lacks " in page


def test_what_counting_costs_has_floors_and_so_has_how_sure_that_is(tmp_path: Path) -> None:
    write(tmp_path, "metrics-cost", 1, ratio=0.991, ratio_standard_error=0.006, tokens_per_s_on=99.1, turns=24)
    page = make_page(tmp_path)
    assert rows_of(page, "metrics: llama-3-8b, Chip, bfloat16") == {
        "figure": ["floor", "2026-01-01 10:30<br>01234567"],
        "---": ["---"] * 2,
        "`ratio`": ["≥ 0.99", "0.991"],
        "`ratio_standard_error`": ["≤ 0.005", "0.006 (missed)"],
        "`tokens_per_s_on`": ["", "99.100"],
    }
    assert floors_of("metrics", {})["ratio_standard_error"].limit == SURE


def test_one_gpu_has_a_word_instead_of_floors(tmp_path: Path) -> None:
    write(tmp_path, "kv-a", 1, gpus=1, transfer_bw_ratio_2048=0.1)
    page = make_page(tmp_path)
    assert "Both processes share the chip" in page
    assert "missed" not in page


def test_runs_of_several_commands_say_which(tmp_path: Path) -> None:
    write(tmp_path, "kv-a", 1, gpus=2, decode_step_ms=4.0)
    write(tmp_path, "kv-b", 2, gpus=2, decode_step_ms=4.0, command="python -m that")
    page = make_page(tmp_path)
    assert "1. `python -m it`\n2. `python -m that`\n\n" in page
    heads = rows_of(page, "kv: llama-3-8b, 2 x Chip, bfloat16")["figure"]
    assert heads == ["floor", "2026-01-01 10:30<br>01234567<br>(1)", "2026-01-02 10:30<br>01234567<br>(2)"]


def test_what_was_tuned_or_profiled_has_no_table(tmp_path: Path) -> None:
    for kind in ("tune-linear", "profile-llama-3-8b", "fused-kernels"):
        write(tmp_path, kind, 1, copy_gb_per_s=1.0, decode_idle_share_b1=0.5)
    assert "## " not in make_page(tmp_path)


def test_the_newest_runs_with_eager_steps_and_fused_kernels(tmp_path: Path) -> None:
    write(tmp_path, "engine-a", 1, decode_ms_b1=2.0, decode_eager_ms_b1=3.0)
    write(tmp_path, "engine-b", 2, decode_ms_b1=4.0, decode_eager_ms_b1=8.0)
    write(tmp_path, "engine-c", 3, decode_ms_b1=9.0)
    silu = {"operation": "silu", "tokens": 8, "fused_us": 2.0, "unfused_us": 5.0, "ratio": 2.5}
    write(tmp_path, "fused-kernels", 1, comparisons=[silu])
    page = make_page(tmp_path)
    assert rows_of(page, "CUDA graphs")["1"] == ["4.000", "8.000", "2.000"]
    assert rows_of(page, "Fused kernels")["silu"] == ["8", "2.000", "5.000", "2.500"]


def test_the_page_is_made_from_the_runs_that_are_kept() -> None:
    assert PAGE.read_text(encoding="utf-8") == make_page(RESULTS), "make it anew: python -m benchmarks.tables"
