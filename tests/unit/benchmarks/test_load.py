"""The load benchmark against a server that streams what the test sets."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks.load import CELLS, figures, main, make_source, parse_arguments
from tandem.cli.load.http_client import address_of
from tandem.cli.load.record import RequestRecord
from tandem.cli.load.report import make_report
from tandem.cli.load.synthetic import Lengths, Synthetic
from tandem.cli.load.trace import Trace
from tandem.protocol.errors import InvalidArgument
from tests.soak import soak

EXCERPT = Path(__file__).parents[1] / "cli" / "traces" / "mooncake_excerpt.jsonl"


class Server(BaseHTTPRequestHandler):
    """Streams as many tokens as requested; refuses answers of 7, truncates those of 9, sends invalid JSON for 11."""

    asked: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "listed"}]}')

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append({**request, "path": self.path, "key": self.headers["Authorization"]})
        wanted = request["max_tokens"]
        self.send_response(400 if wanted == 7 else 200)
        self.end_headers()
        sent = wanted - 1 if wanted == 9 else wanted
        for number in range(0 if wanted == 7 else sent):
            self.event({"choices": [{"text": f" {number}"}]})
        if wanted == 11:
            self.wfile.write(b"data: {\n\n")
        self.event({"choices": [], "usage": {"completion_tokens": sent}})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, data: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    Server.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


def result_of(url: str, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    common = ["--url", url, "--device", "cpu", "--clients", "1", "--seconds", "1", "--rates", "9"]
    main([*common, "--prompt-tokens", "6", *options])
    last: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return last


def test_requests_leave_as_drawn_and_are_counted(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = result_of(url, capsys, "--new-tokens", "5", "--row", "as it is", "--api-key", "k", "--vocab-size", "50")
    (load,) = result["rows"]["as it is"]
    drawn = Synthetic(Lengths(6), Lengths(5)).at(9, 1, 0)
    assert load["n"] == len(drawn.arrivals) == len(Server.asked)
    assert (load["errors"], load["chunks_per_token"], load["out_tokens"]) == (0, 1.0, 5 * load["n"])
    assert set(load["gap_ms"]) == {"50", "95", "99", "99.9"}
    for asked in Server.asked:
        assert (asked["path"], asked["key"], asked["model"]) == ("/v1/completions", "Bearer k", "listed")
        assert (asked["temperature"], asked["ignore_eos"], asked["stream"]) == (0, True, True)
        assert len(asked["prompt"]) == 6
        assert max(asked["prompt"]) < 50
    assert len({tuple(asked["prompt"]) for asked in Server.asked}) == load["n"], "no prompt begins as another"


@soak
@pytest.mark.parametrize(("tokens", "error"), [("7", "400"), ("9", "WRONG_LENGTH"), ("11", "property name")])
def test_what_is_no_whole_answer_is_an_error(
    tokens: str, error: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A load of which nothing was answered ends the run, after its figures are printed."""
    with pytest.raises(SystemExit, match=f"no request was answered: .*{error}"):
        result_of(url, capsys, "--new-tokens", tokens)
    load = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert load["errors"] == load["n"]
    assert (load["tok_s"], load["good_1000_25"], load["ttft_ms"]) == (0.0, 0.0, {})


def test_a_server_that_lists_no_model_is_named(url: str) -> None:
    with pytest.raises(SystemExit, match="answered 404"):
        main(["--url", url.removesuffix("/v1") + "/v2"])


def test_figures_are_of_each_requests_own_gaps() -> None:
    workload = Synthetic(Lengths(6), Lengths(3)).at(9, 1, 0)
    good = RequestRecord(0, 0.0, 0.001, 0.1, (0.05, 0.06, 0.08), 3, 3, completion_tokens=3)
    slow = RequestRecord(1, 0.5, 0.5, 1.0, (0.9, 0.95, 1.0), 3, 3, completion_tokens=3)
    lost = RequestRecord(2, 0.6, 0.6, 2.0, (), 3, error="TimeoutError")
    row = figures(make_report(workload, [good, slow, lost], CELLS, 0.01))
    assert row["ttft_ms"] == {"50": 50.0, "90": 400.0, "99": 400.0}
    assert row["gap_ms"] == {"50": 20.0, "95": 50.0, "99": 50.0, "99.9": 50.0}
    assert (row["tok_s"], row["errors"], row["late_max"]) == (3.0, 1, 0.001)
    assert (row["good_1000_25"], row["good_300_60"]) == (0.333, 0.333)
    assert "joules_per_token" not in row
    assert figures(make_report(workload, [good, slow, lost], CELLS, 0.01), 12.0)["joules_per_token"] == 2.0


def test_a_server_that_is_not_there_ends_the_run_before_a_load() -> None:
    with pytest.raises(SystemExit, match="does not answer"):
        main(["--url", "http://127.0.0.1:9/v1", "--device", "cpu", "--clients", "1"])


@soak
def test_the_knee_of_a_level_that_is_never_met_is_0(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = result_of(url, capsys, "--new-tokens", "2", "--rates", "9", "--slo", "never:0.001:0.001")
    assert result["knee_goodput_per_s"]["never"] == 0.0
    assert result["knee_goodput_per_s"]["good_1000_25"] > 0


def test_a_source_is_a_trace_or_drawn() -> None:
    given = ["--url", "http://h", "--prompt-tokens", "lognormal:90:1", "--new-tokens", "128", "--cv", "2"]
    assert make_source(parse_arguments(given)) == Synthetic(Lengths(90, 1), Lengths(128), 2.0)
    trace = make_source(parse_arguments(["--url", "http://h", "--trace", str(EXCERPT), "--length-scale", "0.1"]))
    assert isinstance(trace, Trace)
    assert trace.requests[0].prompt[0].tokens == 51


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host/v1", "http:///v1", "http://host:port/v1"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument, match="no address like"):
        address_of(url)
