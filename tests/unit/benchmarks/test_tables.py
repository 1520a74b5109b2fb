"""docs/performance.md: key figures of each benchmark's newest run, and no figure without a run."""

import json
import re
import shutil
from pathlib import Path

import pytest

from benchmarks.results import RESULTS, newest_result, read_results
from benchmarks.sections.served import peer_tables
from benchmarks.tables import PAGE, make_page

README = PAGE.parent.parent / "README.md"


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A copy of the saved runs that a test may change."""
    folder = tmp_path / "results"
    shutil.copytree(RESULTS, folder)
    return folder


def change(folder: Path, kind: str, date: str, **figures: object) -> str:
    """Writes a run like the newest of `kind` with another date and figures; returns the file's name."""
    _, run = newest_result(folder, kind)
    name = f"{kind}another.json"
    (folder / name).write_text(json.dumps({**run, **figures, "date": date}))
    return name


def row_of(page: str, start: str) -> str:
    (row,) = (line for line in page.splitlines() if line.startswith(f"| {start} |"))
    return row


def test_the_page_is_made_from_the_runs_that_are_kept() -> None:
    assert PAGE.read_text(encoding="utf-8") == make_page(RESULTS), "make it anew: python -m benchmarks.tables"


def test_removed_options_are_left_out_of_commands(kept: Path) -> None:
    command = "python -m benchmarks.kv_transfer --device cuda --direction write --save"
    change(kept, "kv-transfer-2-gpus", "2030-01-01T00:00:00+00:00", command=command)
    assert "`python -m benchmarks.kv_transfer --device cuda --save`" in make_page(kept)


def test_the_newest_run_is_shown_and_no_earlier_one(kept: Path) -> None:
    new = change(kept, "engine-llama-3-8b-", "2030-01-01T00:00:00+00:00", decode_bw_ratio_b1=0.55, start_seconds=7.0)
    page = make_page(kept)
    row = row_of(page, "llama-3-8b")
    assert "| 0.55, " in row
    assert row.endswith("| 7 |")
    assert f"of 2030-01-01](../benchmarks/results/{new})" in page
    change(kept, "engine-llama-3-8b-", "2020-01-01T00:00:00+00:00", decode_bw_ratio_b1=0.11)
    assert "0.11" not in row_of(make_page(kept), "llama-3-8b")


def test_a_newer_run_without_the_figures_of_a_section_does_not_hide_the_one_that_has_them(kept: Path) -> None:
    (kept / "engine-llama-3-8b-new.json").write_text(json.dumps({"date": "2030-01-01", "decode_ms_b1": 1.0}))
    assert make_page(kept) == make_page(RESULTS)


def test_a_section_without_a_run_says_which_is_missing(kept: Path) -> None:
    for file in kept.glob("kv-transfer-2-gpus*"):
        file.unlink()
    with pytest.raises(LookupError, match="no run of kv-transfer-2-gpus with handover_ms_8192 is kept in results"):
        make_page(kept)


def test_goodput_is_the_best_colocated_row_beside_the_others(kept: Path) -> None:
    def row(*goodput: float) -> object:
        times = dict.fromkeys(("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "tokens_per_s"), 1.0)
        return {"goodput_per_s": dict(zip(("strict", "balanced", "quick"), goodput, strict=True)), **times}

    rows = {"shared": row(1, 2, 3), "chunked-512": row(2, 1, 3), "adaptive": row(5, 6, 7)}
    tables: dict[str, dict[str, object]] = {"balanced": {"rows": rows, "rate": 2.0}}
    change(kept, "strategies-", "2030-01-01T00:00:00+00:00", workers=2, tables=tables)
    assert row_of(make_page(kept), "balanced | llama-3-8b | 2").endswith(
        "| 2.0 / – / 5.0 | 2.0 / – / 6.0 | 3.0 / – / 7.0 |"
    )
    tables["balanced"]["rows"] = rows | {"disaggregated-1-1": row(4, 0, 0)}
    change(kept, "strategies-", "2030-01-01T00:00:00+00:00", workers=2, tables=tables)
    assert "| 2.0 / 4.0 / 5.0 |" in row_of(make_page(kept), "balanced | llama-3-8b | 2")
    assert "| 1.9 / – / 2.7 |" in row_of(make_page(kept), "decode-heavy | llama-3-8b | 2"), (
        "another workload's newest run"
    )


def test_the_best_server_at_each_rate_is_bold(kept: Path) -> None:
    _, run = newest_result(kept, "peer-vllm")
    for key, served in run["serving"].items():
        served[-1]["tok_s"] = 5000.0 if key == "vllm" else 4000.0
        served[-1]["ttft_ms"]["50"] = 10.04 if key == "tandem" else 10.03
    run["serving"]["vllm"].insert(0, run["serving"]["vllm"][0] | {"rate": 4.0})
    change(kept, "peer-vllm", "2030-01-01", serving=run["serving"])
    _, served = peer_tables(kept)
    last = served[-2:]
    assert [line.split(" | ")[2] for line in last] == ["**5,000**", "4,000"]
    assert all("| **10**, " in line for line in last), "what is shown alike is bold alike"
    assert not any(line.startswith("| 4 |") for line in served), "Tandem was not measured at that rate"


def test_the_readme_quotes_the_page() -> None:
    """Every row of the README's tables of figures is a row of the page."""
    page = set(PAGE.read_text(encoding="utf-8").splitlines())
    speed = README.read_text(encoding="utf-8").split("\n## Speed\n")[1].split("\n## ")[0]
    rows = [line for line in speed.splitlines() if line.startswith("|")]
    assert len(rows) > 6
    assert not set(rows) - page


def test_every_link_to_a_run_leads_to_a_file() -> None:
    names = [name for name, _ in read_results(RESULTS)]
    for file in (*PAGE.parent.rglob("*.md"), README):
        text = file.read_text(encoding="utf-8")
        linked = re.findall(r"benchmarks/results/([\w.-]+\.json)", text)
        assert not set(linked) - set(names), file.name


def test_sections_of_runs_that_are_not_kept_yet_appear_with_the_first_one(kept: Path) -> None:
    facts = {"hardware": {"name": "a GPU"}, "commit": "abc", "date": "2030-01-01", "shape": "llama-3-8b"}
    prompt = {"tokens": 512, "engine_ms": 1.5, "engine_gib": 0.1, "sdpa_ms": 2.0, "sdpa_gib": 0.2, "products_ms": 3.0}
    head = {"form": "GQA", "bytes_per_token": 131072, "step_ms": 2.5, "hand_over_ms": 10.7}
    forms = {"prompts": [prompt], "heads": [head], "overtakes_products_at": 50_000, "network_gbps": 400.0}
    order = {"product": "qkv", "n": 6144, "k": 4096, "tokens": 512, "row_major_tflops": 1.0}
    order |= {"grouped_tflops": 2.0, "cublas_tflops": 3.0}
    chunk = {"chunk": 2048, "itl_ms": 50.0, "prompt_tokens_per_s": 40960.0, "answer_tokens_per_s": 2560.0}
    shares: list[dict[str, object]] = [
        {"share": 0.5, "cached_tokens": 256, "ttft_ms": 9.0, "saved_over_predicted": 0.97}
    ]
    prefixes = {
        "shares": [{"share": 0.0, "cached_tokens": 0, "ttft_ms": 17.0}, *shares],
        "uses": [{"use": "tree", "prompt_tokens": 9000, "computed": 1100, "distinct": 1000}],
        "pages": [{"page_tokens": 16, "fill": 0.98, "contiguous": 0.2}],
    }
    runs = {
        "attention-forms-x": {**forms, "rows": 64, "context": 4096},
        "tile-order-x": {"rows": [order], "group": 8},
        "prefixes-x": {**prefixes, "prompt_tokens": 512, "lookup_over_none": 1.01, "model": "m"},
        "chunks-x": {"rows": [chunk], "decoding": 128, "context": 1024},
    }
    for name, figures in runs.items():
        for file in kept.glob(f"{name.removesuffix('x')}*"):
            file.unlink()
        (kept / f"{name}.json").write_text(json.dumps(facts | figures))
    page = make_page(kept)
    assert "| 512 | 1.50 ms, 0.10 GiB | 2.00 ms, 0.20 GiB | – | 3.00 ms |" in page
    assert "from 50,000 tokens on" in page
    assert "| GQA | 128 | 2.50 | 10.7 |" in page
    assert "| qkv, 6,144 x 4,096 | 512 | 1 | 2 | 3 |" in page
    assert "| 2,048 | 50.0 | 40,960 | 2,560 |" in page
    assert "| 0 | 0 | 17.0 | – |\n| 0.5 | 256 | 9.0 | 0.97 |" in page
    assert "| tree | 9,000 | 1,100 | 1,000 |" in page
    assert "| fill | 98% |" in page
