"""The strategy table's figures, and the rows that can be compared in it."""

import json
from pathlib import Path
from typing import Any

from benchmarks.cluster import ServedModel
from benchmarks.strategies.__main__ import parse_arguments, summary
from benchmarks.strategies.measured import Run
from benchmarks.strategies.parts import knees
from benchmarks.strategies.pictures import draw_table, make_table
from benchmarks.strategies.rows import strategies
from benchmarks.strategies.table import as_text, common_load, figures, make_rows


def load(rate: float, strict: float, quick: float = 1.0, gap_p99: float = 10.0) -> dict[str, Any]:
    """A load with these shares of goodput."""
    shares = {"strict": strict, "quick": quick}
    return {
        "rate": rate,
        "offered_per_s": rate,
        "ttft_ms": {"p50": 100.0, "p99": 200.0},
        "gap_ms": {"p50": 5.0, "p99": gap_p99},
        "tokens_per_s": 10 * rate,
        "goodput": {cell: {"share": share, "per_s": share * rate} for cell, share in shares.items()},
    }


def test_goodput_counts_only_where_the_share_was_kept() -> None:
    assert knees([load(1, 1.0), load(2, 0.9), load(4, 0.8)]) == {"strict": 1.8, "quick": 4.0}
    assert knees([load(1, 0.5, 0.5)]) == {"strict": 0.0, "quick": 0.0}


def test_the_best_split_stands_in_the_table_and_the_relations_are_ratios() -> None:
    rows = {row.name: row for row in strategies(3)}
    measured = {
        rows["shared"]: [load(1, 1.0, gap_p99=100.0), load(1.5, 0.5, 0.5, gap_p99=200.0)],
        rows["chunked-512"]: [load(1.5, 0.4, 0.8, gap_p99=30.0), load(1, 0.95, gap_p99=20.0)],
        rows["disaggregated-1-2"]: [load(1, 1.0), load(1.5, 1.0, gap_p99=11.0), load(2.25, 1.0)],
        rows["disaggregated-2-1"]: [load(1, 0.2, 0.2)],
        rows["adaptive"]: [load(1, 1.0), load(1.5, 1.0), load(2.25, 0.92)],
        rows["priority"]: [],
    }
    table = make_rows(measured)
    assert [row.strategy.name for row in table] == ["shared", "chunked-512", "disaggregated-1-2", "adaptive"]
    assert common_load(table) == 1.5
    results = figures(table)
    assert results["itl_p99_disaggregated_over_shared"] == 0.055
    assert results["goodput_disaggregated_over_colocated"] == {"strict": 2.25, "quick": 2.25}
    assert results["goodput_adaptive_over_best"] == {"strict": 0.92, "quick": 1.0}
    text = as_text(results)
    assert text.split("\n\n")[0].count("\n") == 5
    assert "| chunked-512 | 100 / 200 | 5.0 / 30.0 | 15 | 0.95 | 1.00 |" in text
    assert "| disaggregated-1-2 | 100 / 200 | 5.0 / 11.0 | 15 | ≥ 2.25 | ≥ 2.25 |" in text
    assert "not swept alike" not in text


def test_rows_that_were_not_swept_alike_are_not_compared() -> None:
    """An interrupted run's table once gave adaptive 0.95 of the best goodput, at a lower rate than the best row."""
    rows = {row.name: row for row in strategies(2)}
    lost = load(2.25, 0.1, 0.1)
    table = make_rows(
        {
            rows["shared"]: [load(1, 0.8), load(1.5, 0.2), lost],
            rows["priority"]: [load(1, 0.1, 0.1)],
            rows["adaptive"]: [load(1, 1.0), load(1.5, 0.5)],
        }
    )
    results = figures(table)
    assert results["goodput_adaptive_over_best"] == {"strict": None}, "no other has any"
    assert results["goodput_adaptive_over_best_not_swept_alike"] == ["quick"]
    columns: Any = results["rows"]
    assert columns["adaptive"]["knee"] == {"strict": True, "quick": False}
    assert columns["shared"]["knee"] == columns["priority"]["knee"] == {"strict": True, "quick": True}
    assert columns["adaptive"]["rates"] == [1, 1.5]
    text = as_text(results)
    assert "| 1.00 | ≥ 1.50 |" in text
    assert "Rates of each row: shared 3 up to 2.25/s, priority 1 up to 1/s, adaptive 2 up to 1.5/s.\n" in text
    assert "No goodput_adaptive_over_best in quick: the rows were not swept alike." in text


def test_rates_that_one_row_alone_was_measured_at_are_no_sweep_alike() -> None:
    rows = {row.name: row for row in strategies(2)}
    shared = [load(1, 1.0, 1.0), load(2, 0.1, 0.1)]
    adaptive = [load(1, 1.0), load(1.5, 1.0), load(2, 0.1, 0.1)]
    results = figures(make_rows({rows["shared"]: shared, rows["adaptive"]: adaptive}))
    assert results["goodput_adaptive_over_best"] == {}
    again = figures(make_rows({rows["shared"]: [*shared, load(1.5, 0.95)], rows["adaptive"]: adaptive}))
    assert again["goodput_adaptive_over_best"] == {"strict": round(1.5 / 1.425, 4), "quick": 1.0}


def test_a_kept_table_is_drawn_as_the_command_draws_it(tmp_path: Path) -> None:
    parts, first, again = tmp_path / "parts", tmp_path / "first", tmp_path / "again"
    parts.mkdir()
    given = ["--parts", str(parts), "--workloads", "balanced,decode-heavy", "--rates", "1,2", "--workers", "3"]
    parsed = parse_arguments([*given, "--only", "shared,disaggregated,adaptive", "--pictures", str(first)])
    run = Run(parsed, ServedModel(Path("model"), "m", random_weights=True))
    for offer in run.offers:
        for row in run.rows:
            for rate in (2.0, 1.0):
                run.part(row, offer).add(load(rate, 1.0 if row.name != "disaggregated-2-1" else 0.5), {"dtype": "any"})
    kept = json.loads(json.dumps(summary(run, parsed)))
    draw_table(make_table("strategies", kept), again, "svg")
    drawn = {file.name: file.read_text() for file in first.iterdir()}
    assert drawn.keys() == {"strategies-balanced.svg", "strategies-decode-heavy.svg"}
    assert drawn == {file.name: file.read_text() for file in again.iterdir()}
    said = ["shared", "disaggregated-1-2", "disaggregated-2-1", "adaptive", "strict", "quick"]
    assert [name for name in said if f"<!-- {name} -->" not in drawn["strategies-balanced.svg"]] == [
        "disaggregated-2-1"
    ], "it has no place in the table"


def test_a_table_says_whose_clients_were_late() -> None:
    rows = {row.name: row for row in strategies(2)}
    late = load(1.5, 1.0) | {"valid": False}
    results = figures(
        make_rows({rows["shared"]: [load(1, 1.0), late], rows["adaptive"]: [load(1, 1.0) | {"valid": True}]})
    )
    assert results["invalid_loads"] == ["shared at 1.5/s"]
    assert as_text(results).endswith("INVALID, the clients were late: shared at 1.5/s")
    assert "INVALID" not in as_text(figures(make_rows({rows["shared"]: [load(1, 1.0)]})))
