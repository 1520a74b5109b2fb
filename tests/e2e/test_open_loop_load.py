"""Open-loop load from two client processes on a real cluster: every request is counted. Timing is not checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tandem.cli.load.report import LoadReport
from tandem.cli.load.run import LoadSettings, run_load
from tandem.cli.load.slo import SloCell
from tandem.cli.load.synthetic import Lengths, Synthetic
from tandem.cli.load.target import find_target, warm_up
from tandem.cli.load.workload import Arrival, Block, Workload
from tandem.cli.main import app
from tandem.protocol.errors import Unavailable
from tests.soak import soak

LOOSE, HOPELESS = SloCell("loose", 1e6, 1e6), SloCell("hopeless", 1e-9, 1e6)
SETTINGS = LoadSettings(clients=2, drain_s=120.0)


@pytest.fixture(scope="module")
def cluster(running_cluster: Callable[..., Any]) -> Any:
    return running_cluster(dtype="float32", page_tokens=16, max_step_tokens=128)


@pytest.fixture(scope="module")
def address(cluster: Any) -> str:
    return str(cluster.grpc_address)


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Synthetic(Lengths(40, 0.5), Lengths(6, 0.5), cv=2.0).at(rate=4, seconds=2, seed=5)


@pytest.fixture(scope="module")
def report(address: str, workload: Workload) -> LoadReport:
    return run_load(address, workload, (LOOSE, HOPELESS), SETTINGS)


def test_every_request_is_answered_in_full(report: LoadReport, workload: Workload) -> None:
    assert len(report.records) == len(workload.arrivals) > 5
    assert not report.errors
    for number, (record, arrival) in enumerate(zip(report.records, workload.arrivals, strict=True)):
        assert record.index == number
        assert record.due_s == arrival.due_s <= record.sent_s <= record.token_s[0] <= record.token_s[-1]
        assert record.token_s[-1] <= record.ended_s
        assert list(record.token_s) == sorted(record.token_s)
        assert record.prompt_tokens == arrival.prompt_tokens
        assert record.completion_tokens == len(record.token_s) == arrival.new_tokens
        assert (record.finish, record.prefill_worker) == ("LENGTH", "prefill-0")


def test_the_figures_add_up(report: LoadReport, workload: Workload) -> None:
    asked = [arrival.new_tokens for arrival in workload.arrivals]
    assert report.ttft.count == report.end_to_end.count == report.lateness.count == len(asked)
    assert report.gaps.count == sum(new - 1 for new in asked)
    assert report.tpot.count == sum(new > 1 for new in asked)
    assert [score.share for score in report.scores] == [1.0, 0.0]
    assert report.scores[0].per_s == len(asked) / workload.seconds
    result = report.as_result()
    assert result["answer_tokens"] == sum(asked)
    assert result["prompt_tokens"] == sum(arrival.prompt_tokens for arrival in workload.arrivals)


def test_rejected_truncated_and_late_requests_are_counted(address: str) -> None:
    """A prompt with ids outside the vocabulary, one that is too long and is truncated, and one that times out."""
    target = find_target(address)
    foreign = replace(target, view=replace(target.view, model=_vocabulary(target.view.model, 10**6)))
    arrivals = (Arrival(0.0, (Block(1, 64),), 4), Arrival(0.0, (Block(2, 64),), 4))
    refused = run_load(foreign, Workload("foreign", 2, 1, 0, arrivals), (LOOSE,), SETTINGS)
    assert refused.errors == {"INVALID_ARGUMENT": 2}
    assert refused.scores[0].share == 0
    assert refused.ttft.count == 0
    long = Workload("long", 1, 1, 0, (Arrival(0.0, (Block(3, 100),), 10**6),))
    given_up = run_load(target, long, (LOOSE,), LoadSettings(clients=3, drain_s=0.5))
    assert given_up.errors == {"DEADLINE_EXCEEDED": 1}
    assert given_up.workload.clipped == 1
    assert given_up.records[0].asked_tokens == target.context // 2


def _vocabulary(model: Any, size: int) -> Any:
    changed = type(model)()
    changed.CopyFrom(model)
    changed.vocab_size = size
    return changed


@pytest.fixture
def _short_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WARM_PROMPT": 16, "WARM_TOKENS": 3, "LONE_PROMPT": 32, "LONE_TOKENS": 5}.items():
        monkeypatch.setattr(f"tandem.cli.load.target.{name}", value)


@pytest.mark.usefixtures("_short_warm_up")
def test_one_request_alone_measures_a_step(address: str) -> None:
    assert 0 < warm_up(find_target(address)) < 10


@pytest.mark.usefixtures("_short_warm_up")
@pytest.mark.parametrize("api", [pytest.param("grpc", marks=soak), pytest.param("completions", marks=soak), "chat"])
def test_the_bench_command_measures_a_real_model(api: str, cluster: Any, tmp_path: Path) -> None:
    http = f"http://{cluster.http_address.removeprefix('http://')}"
    server = ["--url", f"grpc://{cluster.grpc_address}"] if api == "grpc" else ["--url", http, "--api", api]
    load = ["--rate", "4", "--duration", "1", "--clients", "1", "--warm-up", "2"]
    lengths = ["--prompt-tokens", "48", "--answer-tokens", "6", "--vocab-size", "256"]
    file = tmp_path / "bench.json"
    run = CliRunner().invoke(app, ["bench", *server, *load, *lengths, "--json", str(file)])
    assert run.exit_code == 0, run.output
    for figures in json.loads(file.read_text())["loads"]:
        assert (figures["errors"], figures["finished"]) == ({}, figures["requests"])
        assert figures["answer_tokens"] == 6 * figures["requests"] > 0
        assert figures["prompt_tokens"] == pytest.approx(48 * figures["requests"], rel=0.3 if api == "chat" else 0)
        assert figures["end_to_end_ms"]["p50"] >= figures["ttft_ms"]["p50"] > 0


def test_a_load_without_a_router_says_that_it_is_unreachable(workload: Workload) -> None:
    with pytest.raises(Unavailable, match=r"cannot reach the router at 127.0.0.1:1"):
        run_load("127.0.0.1:1", workload, (LOOSE,), SETTINGS)
