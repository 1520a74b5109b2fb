"""`tandem bench` against a small OpenAI server, and against a real router whose worker is a stand-in."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from benchmarks.router.token_source import TOKEN, TokenSource
from router.config import RouterConfig
from router.server import RouterServer
from tandem.cli.main import app
from tandem.protocol.generate import ROOT
from tandem.protocol.mode import Mode
from tandem.settings.model import ModelSettings
from tandem.settings.secrets import Secrets
from tests.soak import soak
from tests.unit.cli.bench.openai_server import CONTEXT, OpenAIServer
from tests.unit.router import conftest
from tests.unit.router.fake_cluster import until

model = conftest.model
SMALL = ("--duration", "1", "--clients", "1", "--warm-up", "2", "--prompt-tokens", "16", "--answer-tokens", "4")


@pytest.fixture
def server() -> OpenAIServer:
    return OpenAIServer()


@pytest.fixture
def url(server: OpenAIServer) -> Iterator[str]:
    with server.running() as address:
        yield address


def bench(*options: str) -> Result:
    return CliRunner().invoke(app, ["bench", *options])


def figures(tmp_path: Path, *options: str) -> dict[str, Any]:
    """Returns the JSON of a run that must succeed."""
    run = bench(*SMALL, "--json", str(tmp_path / "figures.json"), *options)
    assert run.exit_code == 0, run.output
    report: dict[str, Any] = json.loads((tmp_path / "figures.json").read_text())
    return report


def test_every_rate_has_its_figures(url: str, server: OpenAIServer, tmp_path: Path) -> None:
    run = bench(*SMALL, "--url", url, "--rate", "9,15", "--api-key", "k", "--json", str(tmp_path / "f"))
    assert run.exit_code == 0, run.output
    for shown in ("9/s", "15/s", "TTFT p50", "ITL p99", "TPOT p90", "E2E mean", "output tokens/s"):
        assert shown in run.output
    result = json.loads((tmp_path / "f").read_text())
    assert (result["model"], [load["rate"] for load in result["loads"]]) == ("listed", [9.0, 15.0])
    assert len(server.asked) - len(server.streamed) == 2, "warm-ups are sent, and in no figure"
    assert sum(load["requests"] for load in result["loads"]) == len(server.streamed)
    for load in result["loads"]:
        assert (load["errors"], load["interrupted"]) == ({}, False)
        assert load["answer_tokens"] == 4 * load["requests"] == 4 * load["finished"]
        assert load["ttft_ms"]["count"] == load["tpot_ms"]["count"] == load["requests"]
        assert load["gap_ms"]["count"] == 3 * load["requests"]
        assert load["output_tokens_per_s"] == pytest.approx(4 * load["requests"] / load["makespan_s"], rel=0.01)
        assert load["total_tokens_per_s"] == pytest.approx(20 * load["requests"] / load["makespan_s"], rel=0.01)
    for asked in server.streamed:
        assert (asked["path"], asked["key"], asked["model"]) == ("/v1/completions", "Bearer k", "listed")
        assert (asked["ignore_eos"], asked["temperature"], len(asked["prompt"])) == (True, 0, 16)
    assert len({tuple(asked["prompt"]) for asked in server.streamed}) == len(server.streamed), "no shared prompts"


def test_words_of_a_chat_have_the_asked_tokens(url: str, server: OpenAIServer, tmp_path: Path) -> None:
    """The server's template and tokenizer are measured by the warm-up: 11 tokens, and 2 for each word."""
    result = figures(tmp_path, "--url", f"{url}/v1", "--api", "chat", "--rate", "8", "--prompt-tokens", "111")
    (load,) = result["loads"]
    assert load["prompt_tokens"] == 111 * load["requests"]
    assert {asked["path"] for asked in server.asked} == {"/v1/chat/completions"}
    assert load["answer_tokens"] == 4 * load["requests"]


def test_goodput_counts_what_meets_the_targets(url: str, server: OpenAIServer, tmp_path: Path) -> None:
    server.token_s = 0.02
    loose = figures(tmp_path, "--url", url, "--rate", "6", "--slo-ttft", "60000", "--slo-itl", "60000")["loads"][0]
    strict = figures(tmp_path, "--url", url, "--rate", "6", "--slo-itl", "1")["loads"][0]
    assert [next(iter(report["goodput"].values()))["share"] for report in (loose, strict)] == [1.0, 0.0]
    assert list(strict["goodput"]) == ["ITL ≤ 1 ms"]
    assert "goodput" not in bench(*SMALL, "--url", url).output


@pytest.mark.parametrize(("tokens", "errors"), [("7", "RESOURCE_EXHAUSTED|HTTP 429"), ("9", "engine_dead")])
def test_errors_are_counted_by_kind(tokens: str, errors: str, url: str, tmp_path: Path) -> None:
    load = figures(tmp_path, "--url", url, "--rate", "6", "--answer-tokens", tokens, "--slo-ttft", "1000")["loads"][0]
    ((kind, count),) = load["errors"].items()
    assert kind in errors
    assert count == load["requests"]
    assert load["finished"] == load["output_tokens_per_s"] == 0
    assert load["goodput"]["TTFT ≤ 1000 ms"]["rejected" if tokens == "7" else "failed"] == count


def test_a_server_without_usage_is_counted_by_its_events(url: str, server: OpenAIServer, tmp_path: Path) -> None:
    server.counts_usage = False
    load = figures(tmp_path, "--url", url, "--rate", "6", "--no-ignore-eos")["loads"][0]
    assert (load["errors"], load["answer_tokens"]) == ({}, 4 * load["requests"])
    assert not any("ignore_eos" in asked for asked in server.asked)


def test_own_prompts_are_sent_in_turn(url: str, server: OpenAIServer, tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    talk = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello?"}]
    file.write_text(f'{{"prompt": "One two", "max_tokens": 3}}\n\n{json.dumps({"messages": talk})}\n')
    figures(tmp_path, "--url", url, "--api", "chat", "--rate", "8", "--dataset", str(file), "--arrivals", "constant")
    sent = sorted(server.streamed, key=lambda body: str(body["messages"]))
    assert {len(body["messages"]) for body in sent} == {1, 2}
    assert all(body["messages"] == talk and body["max_tokens"] == 4 for body in sent if len(body["messages"]) == 2)
    assert all(body["max_tokens"] == 3 for body in sent if len(body["messages"]) == 1)
    refused = bench(*SMALL, "--url", url, "--rate", "8", "--dataset", str(file))
    assert refused.exit_code == 2
    assert "--dataset: has conversations; give --api chat" in refused.output


def test_a_trace_has_its_own_times_and_lengths(url: str, server: OpenAIServer, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 100 * n, "input_length": 5 + n, "output_length": 2 + n} for n in range(4)]
    file.write_text("\n".join(json.dumps({**row, "timestamp": row["timestamp"] + 5000}) for row in rows))
    load = figures(tmp_path, "--url", url, "--dataset", str(file))["loads"][0]
    assert sorted((len(body["prompt"]), body["max_tokens"]) for body in server.streamed) == [
        (5, 2), (6, 3), (7, 4), (8, 5)
    ]  # fmt: skip
    assert (load["rate"], load["requests"]) == (4.0, 4)


def test_requests_fit_the_listed_context(url: str, server: OpenAIServer, tmp_path: Path) -> None:
    load = figures(tmp_path, "--url", url, "--rate", "4", "--prompt-tokens", "1000")["loads"][0]
    assert {len(body["prompt"]) for body in server.streamed} == {CONTEXT - 4}
    assert load["clipped"] == load["requests"]


@pytest.mark.parametrize("suffix", ["svg", pytest.param("png", marks=soak)])
def test_the_latencies_are_drawn(suffix: str, url: str, tmp_path: Path) -> None:
    picture = tmp_path / f"latencies.{suffix}"
    figures(tmp_path, "--url", url, "--rate", "5,9", "--plot", str(picture))
    assert picture.read_bytes()[:5] in (b"<?xml", b"\x89PNG\r")


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--rate", "fast"), 2, "--rate: 'fast' is no list of numbers"),
        (("--rate", "0"), 2, "--rate: '0' has a rate that is not above 0"),
        (("--duration", "0"), 2, "--duration: 0 is no number of seconds above 0"),
        (("--prompt-tokens", "many"), 2, "--prompt-tokens: 'many' is neither"),
        (("--arrivals", "bursts"), 2, "--arrivals: 'bursts' is neither poisson nor constant"),
        (("--api", "rest"), 2, "--api: 'rest' is neither completions nor chat"),
        (("--slo-ttft", "0"), 2, "--slo-ttft: 0 is not above 0"),
        (("--plot", "a.pdf"), 2, "--plot: a.pdf ends in neither .svg nor .png"),
        (("--json", "no/such/file"), 2, "--json: no/such is no folder"),
        (("--dataset", "none.jsonl"), 2, "--dataset: none.jsonl cannot be read"),
        (("--model", "third"), 2, "--model: 'third' is not one of the server's models: listed, second"),
        (("--url", "localhost:8000"), 2, "--url: 'localhost:8000' is no address like"),
        (("--url", "grpc://"), 2, "--url: 'grpc://' is no address like"),
        (("--url", "http://127.0.0.1:9"), 4, "does not answer"),
        (("--rate", "0.001"), 2, "no request is due within 1 s"),
    ],
)
def test_wrong_options_are_named(options: tuple[str, ...], code: int, message: str, url: str) -> None:
    run = bench(*SMALL, "--rate", "6", "--url", url, *options)
    assert run.exit_code == code, run.output
    assert message in run.output
    assert "Traceback" not in run.output


def test_a_plot_without_matplotlib_says_what_to_install_before_any_request(
    url: str, server: OpenAIServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tandem.cli.load.pictures", None)
    monkeypatch.delattr("tandem.cli.load.pictures", raising=False)
    run = bench(*SMALL, "--rate", "6", "--url", url, "--plot", str(tmp_path / "a.svg"))
    assert (run.exit_code, run.output) == (2, "error: --plot: needs matplotlib; pip install 'tandem-serving[plots]'\n")
    assert not server.streamed


def test_the_servers_reason_ends_the_run_before_a_load(url: str, server: OpenAIServer) -> None:
    server.key = "right"
    run = bench(*SMALL, "--rate", "6", "--url", url, "--api-key", "wrong")
    assert run.exit_code == 1
    assert "answered 401: wrong key; give --api-key" in run.output
    assert not server.streamed


@pytest.mark.parametrize(
    "line", ["{", "[1]", "{}", '{"prompt": ""}', '{"prompt": "a", "max_tokens": 0}', '{"messages": [1]}']
)
def test_a_wrong_line_of_a_dataset_is_named(line: str, url: str, tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line)
    run = bench(*SMALL, "--url", url, "--dataset", str(file))
    assert run.exit_code == 2
    assert "own.jsonl line 2" in run.output


def test_ctrl_c_ends_with_the_figures_so_far(url: str, server: OpenAIServer, tmp_path: Path) -> None:
    """Short answers have ended, those in flight have not; the second rate is not begun."""
    server.token_s = 0.001
    file = tmp_path / "figures.json"
    options = ("--url", url, "--rate", "20,40", "--duration", "600", "--json", str(file), "--answer-tokens", "5")
    command = [sys.executable, "-m", "tandem.cli.main", "bench", *SMALL, *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT, text=True)
    deadline_s = time.monotonic() + 120
    while len(server.streamed) < 10 and process.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "(interrupted)" in output
    assert "Traceback" not in output
    (load,) = json.loads(file.read_text())["loads"]
    assert load["interrupted"]
    assert 0 < load["finished"] == load["requests"] <= len(server.streamed)
    assert not load["errors"]


@pytest.mark.parametrize("scheme", ["grpc", "http"])
async def test_a_real_router_answers_every_request(scheme: str, model: Path, tmp_path: Path) -> None:
    source = TokenSource(0.002)
    keys = tmp_path / "keys"
    keys.write_text("sk-1 name=acme role=tenant")
    config = RouterConfig(
        "router-0",
        ModelSettings(model, ("tokens",)),
        await source.start(),
        Secrets(TOKEN),
        mode=Mode.ADAPTIVE,
        grpc_port=0,
        http_port=0,
        chunks_per_s=1e9,
        api_key_file=keys,
    )
    router = RouterServer(config)
    listeners = await router.start()
    await until(lambda: router.ready, "the source is found")
    address = {"grpc": listeners.grpc_address, "http": listeners.http_address.removeprefix("http://")}[scheme]
    options = ("--url", f"{scheme}://{address}", "--rate", "20", "--vocab-size", "256", "--api-key", "sk-1")
    result = await asyncio.to_thread(figures, tmp_path, *options)
    (load,) = result["loads"]
    assert (load["errors"], load["finished"]) == ({}, load["requests"])
    assert load["answer_tokens"] == 4 * load["requests"] > 40
    assert load["prompt_tokens"] == 16 * load["requests"]
    await router.stop(0.0)
    source._stepping.cancel()
    await source._server.stop(None)
