"""The command around a load: settings by name, one JSON object, and pictures from it."""

import json
from multiprocessing import Pipe
from pathlib import Path

import pytest

from benchmarks import pictures, results
from benchmarks.load.command import as_result, make_source, measure, parse_arguments, without_curves
from benchmarks.load.stage import parse_setting
from tandem.cli.load.record import RequestRecord
from tandem.cli.load.report import LoadReport, make_report
from tandem.cli.load.run import _receive
from tandem.cli.load.slo import standard_cells
from tandem.cli.load.synthetic import Lengths, Synthetic
from tandem.cli.load.trace import Trace
from tandem.protocol.errors import Internal, InvalidArgument

CELLS = standard_cells(0.01)
EXCERPT = Path(__file__).parents[1] / "traces" / "mooncake_excerpt.jsonl"


def load(rate: float) -> LoadReport:
    """A load whose first tokens arrive 500 ms after the due time, and each further token 15 ms later."""
    workload = Synthetic(Lengths(8), Lengths(4)).at(rate, 10, 0)
    records = []
    for index, arrival in enumerate(workload.arrivals):
        moments = tuple(arrival.due_s + 0.5 + 0.015 * i for i in range(4))
        records.append(RequestRecord(index, arrival.due_s, arrival.due_s, moments[-1], moments, 4, 4, "LENGTH"))
    return make_report(workload, records, CELLS, 0.01)


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("max_step_tokens=512", ("max_step_tokens", 512)),
        ("page_tokens=16", ("page_tokens", 16)),
        ("kv_checksum_rate=0", ("kv_checksum_rate", 0.0)),
        ("random_weights=true", ("random_weights", True)),
        ("dtype=bfloat16", ("dtype", "bfloat16")),
        ("log_folder=logs", ("log_folder", Path("logs"))),
    ],
)
def test_any_field_of_a_cluster_can_be_set(text: str, setting: tuple[str, object]) -> None:
    assert parse_setting(text) == setting
    assert type(parse_setting(text)[1]) is type(setting[1]) or isinstance(setting[1], Path)


@pytest.mark.parametrize(
    ("text", "message"),
    [("nonsense=1", "'nonsense' is none of .*decode, "), ("decode=x", "decode='x' is no int"), ("decode", "decode=''")],
)
def test_a_setting_that_is_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=f"--set: {message}"):
        parse_setting(text)


def test_a_source_is_a_trace_or_drawn() -> None:
    assert make_source(parse_arguments(["--prompt-tokens", "lognormal:90:1", "--cv", "2"])) == Synthetic(
        Lengths(90, 1), Lengths(128), 2.0
    )
    trace = make_source(parse_arguments(["--trace", str(EXCERPT), "--length-scale", "0.1"]))
    assert isinstance(trace, Trace)
    assert trace.requests[0].prompt[0].tokens == 51


def test_a_result_is_json_whose_curves_a_terminal_is_spared() -> None:
    result = as_result([load(1), load(2)], CELLS, 0.01)
    shown = json.loads(json.dumps(without_curves(result)))
    assert "curve" not in json.dumps(shown)
    first, second = shown["loads"]
    assert (first["rate"], second["rate"]) == (1, 2)
    assert first["gap_ms"]["p50"] == pytest.approx(15)
    assert first["goodput"]["quick"]["missed_ttft"] == first["requests"]
    assert first["goodput"]["strict"]["share"] == 1
    assert shown["knee_goodput_per_s"] == {"strict": second["offered_per_s"], "balanced": second["offered_per_s"]} | {
        "quick": 0
    }
    assert shown["cells"]["strict"] == {"ttft_ms": 2000.0, "gap_ms": 20.0, "gap_percent": 99.0}


def test_a_client_that_dies_or_babbles_ends_the_load() -> None:
    ours, theirs = Pipe()
    theirs.send(1.5)
    with pytest.raises(Internal, match="sent float, not str"):
        _receive(ours, str)
    theirs.close()
    with pytest.raises(Internal, match="a client process of the load died"):
        _receive(ours, str)
    ours.close()


def test_pictures_are_drawn_from_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    for file, rate in zip(files, (1.0, 2.0), strict=True):
        file.write_text(json.dumps(as_result([load(rate), load(2 * rate)], CELLS, 0.01)))
    pictures.main([*map(str, files), "--labels", "a,b", "--out", str(tmp_path / "drawn")])
    drawn = {file.name: file.read_text() for file in (tmp_path / "drawn").iterdir()}
    assert drawn.keys() == {"latency-a.svg", "latency-b.svg", "goodput-8-to-4-cv1.svg"}
    assert sorted(capsys.readouterr().out.split()[1::2]) == sorted(drawn)
    again = tmp_path / "again"
    pictures.main([str(files[0]), "--labels", "a", "--out", str(again)])
    assert (again / "latency-a.svg").read_text() == drawn["latency-a.svg"]
    assert (again / "goodput-8-to-4-cv1.svg").read_text() != drawn["goodput-8-to-4-cv1.svg"], "one curve less"


@pytest.mark.parametrize(("text", "message"), [("{}", "is no result"), ("x", "is no result"), (None, "cannot be read")])
def test_other_files_are_refused(text: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit, match=f"result.json: {message}"):
        pictures.main([str(file)])


def test_a_command_names_the_module_and_no_machine_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sys.argv", ["/somewhere/benchmarks/load/__main__.py", "--trace", "/data/trace.jsonl", "--save"]
    )
    assert results.run_facts("cpu")["command"] == "python -m benchmarks.load --trace trace.jsonl --save"
    monkeypatch.setattr("sys.argv", ["/somewhere/benchmarks/serving.py", "--device", "cpu"])
    assert results.run_facts("cpu")["command"] == "python -m benchmarks.serving --device cpu"
    monkeypatch.setattr("sys.argv", ["/some/where/benchmarks/planner/live.py", "--save"])
    assert results.run_facts("cpu")["command"] == "python -m benchmarks.planner.live --save"
    monkeypatch.setattr("sys.argv", ["/some/where/tandem", "plan"])
    assert results.run_facts("cpu")["command"] == "tandem plan"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--rates", "2,0"), "--rates: '2,0' has a rate that is not above 0"),
        (("--sweep", "0"), "--rates: 0 is not above 0"),
        (("--seconds", "-1"), "--seconds: -1 is not above 0"),
        (("--clients", "0"), "--clients: 0 is less than 1"),
        (("--speed", "2"), "--speed: is a trace's"),
        (("--records", "nowhere/records"), "--records: nowhere is no folder"),
    ],
)
def test_what_cannot_be_sent_is_said_before_a_cluster_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match=message):
        measure(parse_arguments([*given, "--address", "nobody:1"]))
