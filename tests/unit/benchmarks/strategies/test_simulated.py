"""The simulated strategy table: relations that hold for all figures, and its command."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.strategies.__main__ import main
from benchmarks.strategies.rows import strategies
from benchmarks.strategies.stage import Chunks, Stage, make_requests
from benchmarks.strategies.workloads import offers
from tandem.capacity.simulation.hardware import hardware, read_costs
from tandem.capacity.simulation.network import Network
from tandem.cli.load.slo import standard_cells
from tandem.protocol.errors import InvalidArgument
from tandem.settings.slo import BEST_EFFORT, SloClass


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


def test_chunks_beside_answers_are_as_long_as_a_gap_target_allows(stage: Stage) -> None:
    """Without named targets chunks are short; with 50 ms they are longer, and so are gaps, but not above 50 ms."""
    rows = {row.name: row for row in strategies(1)}
    workload = offers([], 1.0, 1.0)[2].source.at(2.5, 8.0, 0)
    reports = [
        stage.simulate(rows[name].settings, workload, (), rows[name].slo)[0] for name in ("priority", "priority-50ms")
    ]
    assert not any(report.errors for report in reports)
    assert reports[0].gaps.p99 < reports[1].gaps.p99 < 0.060
    assert reports[1].ttft.p50 < reports[0].ttft.p50


def test_an_unloaded_step_is_what_the_costs_say(stage: Stage) -> None:
    truth = stage.machine.actual_cost
    alone_s = truth.base_s + truth.row_s
    assert alone_s < stage.unloaded_step() < alone_s + 1000 * truth.context_s


def test_quantized_kv_and_weights_count_as_they_are_stored(stage: Stage) -> None:
    plain, kv = (hardware("llama-3-8b", None, 47.58, 1.0, kv_cache_dtype=name) for name in ("auto", "int8"))
    assert plain.pages * plain.page_tokens == 389_760, "as an H100 had with as many bytes of KV"
    assert kv.pages / plain.pages == pytest.approx(256 / 132, rel=1e-3)
    assert kv.actual_cost.context_s / plain.actual_cost.context_s == pytest.approx(132 / 256)
    assert kv.device.page_bytes == 132 * 2 * 8 * 32 * 128
    weights = hardware("llama-3-8b", None, 47.58, 1.0, quantization="int8")
    assert 0.65 < weights.actual_cost.base_s / plain.actual_cost.base_s < 0.75, (
        "a step of one row is 1.4 times as fast on an H100"
    )
    workload = offers([], 1.0, 1.0)[0].source.at(4.0, 6.0, 0)
    settings = strategies(2)[0].settings
    bound, freer = (
        Stage(hardware("llama-3-8b", None, 2.0, 1.0, kv_cache_dtype=name), stage.network).simulate(
            settings, workload, ()
        )[0]
        for name in ("auto", "int8")
    )
    assert freer.ttft.p99 < 0.6 * bound.ttft.p99, "half the bytes, so prompts wait less for pages"


def test_pages_are_named_alike_as_far_as_prompts_are() -> None:
    workload = offers([], 1.0, 1.0)[0].source.at(2.0, 5.0, 0)
    first, again = (make_requests(workload, 128, BEST_EFFORT) for _ in range(2))
    assert [request.prompt.names for request in first] == [request.prompt.names for request in again]
    assert len({name for request in first for name in request.prompt.names}) == sum(
        len(request.prompt.names) for request in first
    )


def test_chunks_share_a_budget_and_first_and_last_tokens_do_not_wait() -> None:
    answers = [[0.0, 0.010, 0.020, 0.030], [0.001, 0.011, 0.021, 0.031]]
    assert Chunks(1e9, 1.0).sent(answers) == answers
    sent = Chunks(100.0, 0.02).sent(answers)
    assert [(sent_pair[0], sent_pair[-1]) for sent_pair in sent] == [(0.0, 0.030), (0.001, 0.031)]
    assert sent[0][1:3] == pytest.approx([0.010, 0.020]), "two chunks are saved, and one comes each 10 ms"
    assert sent[1][1:3] == pytest.approx([0.011, 0.030])


def test_tokens_of_a_class_that_would_be_let_down_do_not_wait_for_the_budget(stage: Stage) -> None:
    """Uses jitter after the router; before it, no two tokens would arrive at once, and none would wait."""
    narrow = replace(stage, network=Network(chunks_per_s=300.0, chunk_delay_max_s=0.025))
    row = next(row for row in strategies(2) if row.name == "disaggregated-1-1")
    workload = offers([], 1.0, 1.0)[0].source.at(4.0, 6.0, 0)
    tolerated_s = {"best_effort": math.inf, "tight": 0.020, "loose": 0.060}
    gaps = {
        name: narrow.simulate(row.settings, workload, (), SloClass(name, ttft_s=60.0, itl_s=itl_s))[0].gaps
        for name, itl_s in tolerated_s.items()
    }
    assert gaps["best_effort"].p90 == pytest.approx(gaps["loose"].p90, rel=0.2)
    assert gaps["tight"].p90 < 0.6 * gaps["loose"].p90


def test_the_command_prints_a_table_and_json_last(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"base_s": 0.03, "token_s": 2e-4, "row_s": 1e-3, "context_s": 1e-6}))
    main(
        ["--simulated", "--only", "shared,adaptive", "--workloads", "balanced", "--seconds", "3", "--costs", str(costs)]
    )
    printed = capsys.readouterr().out
    last = json.loads(printed.splitlines()[-1])
    assert set(last["tables"]["balanced"]["rows"]) == {"shared", "adaptive"}
    assert "| adaptive |" in printed


def test_unknown_names_of_costs_are_refused(tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text('{"base_ms": 3}')
    with pytest.raises(InvalidArgument, match="base_ms"):
        read_costs(costs)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--network", "none.json", "--network: .*none.json cannot be read"),
        ("--network", "strange.json", "has way; known are ingress_s, call_s"),
        ("--workloads", "nonsense", "--workloads: 'nonsense' is not one of balanced"),
        ("--processes", "0", "--processes: 0 is less than 1"),
        ("--kv-gib", "0", "--kv-gib: 0 is less than one KV page"),
        ("--misjudged", "0", "--misjudged: 0 is not above 0"),
    ],
)
def test_what_cannot_be_simulated_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, value: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "strange.json").write_text('{"way": 1}')
    with pytest.raises(SystemExit, match=message):
        main(["--simulated", "--rates", "1", "--seconds", "1", option, value])
