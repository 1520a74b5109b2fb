"""The simulated strategy table: relations that hold whatever the figures are, and how it is laid beside another."""

import json
from pathlib import Path

import pytest

from benchmarks.load.slo import standard_cells
from benchmarks.simulation.__main__ import main
from benchmarks.simulation.against import as_lines, compare
from benchmarks.simulation.chunks import Chunks
from benchmarks.simulation.stage import Stage, make_requests
from benchmarks.strategies.rows import strategies
from benchmarks.strategies.workloads import offers
from router.slo import BEST_EFFORT
from simulation.hardware import hardware, read_costs
from simulation.network import Network
from wire.errors import InvalidArgument


@pytest.fixture(scope="module")
def stage() -> Stage:
    return Stage(hardware("llama-3-8b", None, 100.0, 1.0), Network(chunks_per_s=None))


def test_whole_prompts_beside_answers_make_worse_gaps_than_prompts_elsewhere(stage: Stage) -> None:
    rows = {row.name: row for row in strategies(2)}
    workload = offers([], 1.0, 1.0)[0].source.at(6.0, 8.0, 0)
    cells = standard_cells(stage.unloaded_step())
    shared, _ = stage.simulate(rows["shared"].settings, workload, cells)
    apart, _ = stage.simulate(rows["disaggregated-1-1"].settings, workload, cells)
    assert apart.gaps.p99 < 0.5 * shared.gaps.p99
    assert not shared.errors
    assert not apart.errors
    assert shared.as_result().keys() == apart.as_result().keys()


def test_an_unloaded_step_is_what_the_costs_say(stage: Stage) -> None:
    truth = stage.machine.truth
    alone_s = truth.base_s + truth.row_s
    assert alone_s < stage.unloaded_step() < alone_s + 1000 * truth.context_s


def test_pages_are_named_alike_as_far_as_prompts_are() -> None:
    workload = offers([], 1.0, 1.0)[0].source.at(2.0, 5.0, 0)
    first, again = (make_requests(workload, 128, BEST_EFFORT) for _ in range(2))
    assert [each.prompt.names for each in first] == [each.prompt.names for each in again]
    assert len({name for each in first for name in each.prompt.names}) == sum(len(each.prompt.names) for each in first)


def test_chunks_share_a_budget_and_first_and_last_tokens_do_not_wait() -> None:
    answers = [[0.0, 0.010, 0.020, 0.030], [0.001, 0.011, 0.021, 0.031]]
    assert Chunks(1e9, 1.0).sent(answers) == answers
    sent = Chunks(100.0, 0.02).sent(answers)
    assert [(each[0], each[-1]) for each in sent] == [(0.0, 0.030), (0.001, 0.031)]
    assert sent[0][1:3] == pytest.approx([0.010, 0.020]), "two chunks are saved, and one comes each 10 ms"
    assert sent[1][1:3] == pytest.approx([0.011, 0.030])


def table(rate: float, ttft: float, strict: float) -> dict[str, object]:
    return {"balanced": {"rate": rate, "rows": {"shared": {"ttft_p50_ms": ttft, "goodput_per_s": {"strict": strict}}}}}


def test_tables_side_by_side() -> None:
    near = compare(table(2.0, 110.0, 5.0), table(2.0, 100.0, 4.0))
    assert near == {"balanced": {"shared": {"ttft_p50_ms": 1.1, "goodput_per_s strict": 1.25}}}
    lines = list(as_lines(near))
    assert "beyond" not in lines[0]
    assert "beyond" in lines[1]
    assert lines[-1].startswith("1 of 2")
    other_load = compare(table(2.0, 110.0, 0.0), table(3.0, 100.0, 0.0))
    assert other_load == {"balanced": {"shared": {"goodput_per_s strict": 1.0}}}, "latencies are of another load"


def test_the_command_prints_a_table_and_json_last(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"base_s": 0.03, "token_s": 2e-4, "row_s": 1e-3, "context_s": 1e-6}))
    main(["--only", "shared,adaptive", "--workloads", "balanced", "--seconds", "3", "--costs", str(costs)])
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    assert set(result["tables"]["balanced"]["rows"]) == {"shared", "adaptive"}
    assert "| adaptive |" in printed


def test_costs_that_nobody_knows_are_named(tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text('{"base_ms": 3}')
    with pytest.raises(InvalidArgument, match="base_ms"):
        read_costs(costs)
