"""The benchmarks' command lines: cases, errors in one sentence, and the sizes that the attention case measures."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import cluster, results
from benchmarks.cluster import parse_setting
from benchmarks.command_line import exit_on_error, need_gpu, run_case
from benchmarks.kernels.attention import sizes_of
from benchmarks.router import __main__ as router
from benchmarks.serving import __main__ as serving
from tandem.protocol.errors import InvalidArgument


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Two cases, whose results are their name and option."""
    for name in ("first", "second"):
        made: Any = SimpleNamespace(
            __doc__=name,
            add_options=lambda parser: parser.add_argument("--size", type=int, default=1),
            measure=lambda options, name=name: (name, {"case": name, "size": options.size}),
        )
        monkeypatch.setitem(sys.modules, f"cases.{name}", made)
    return {name: f"cases.{name}" for name in ("first", "second")}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], {"case": "first", "size": 1}),
        (["--size", "3"], {"case": "first", "size": 3}),
        (["second", "--size", "2"], {"case": "second", "size": 2}),
    ],
)
def test_the_first_case_is_measured_unless_another_is_named(
    given: list[str], expected: dict[str, object], case: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    run_case("something", "", case, given)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == expected


def test_help_lists_the_cases(case: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    run_case("something", "What it measures.", case, ["--help"])
    assert capsys.readouterr().out.startswith("What it measures.\n\n    python -m benchmarks.something [first|second]")


def test_no_gpu_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="PyTorch sees none"):
        need_gpu()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "cuda"], "^device: 'cuda' is not there: PyTorch sees 0 CUDA devices"),
        (["--device", "gpu"], "^--device: 'gpu' is not one of auto, cpu, cuda and cuda:N$"),
        (["--device", "auto"], "^--device: auto is for `tandem up` and `tandem serve`; give cpu, cuda or cuda:N$"),
        (["--dtype", "float8"], "^--dtype: 'float8' is not one of auto, float32, bfloat16, float16$"),
        (["--shape", "nope"], "'nope' is no known shape; choose deepseek-v2-lite"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_sentence(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cluster, "find_default_model", lambda: Path("nowhere"))
    monkeypatch.setattr(cluster, "prepare_model", lambda path: path)
    with pytest.raises(SystemExit, match=words):
        run_case("serving", "", serving.CASES, arguments)


def test_an_error_ends_with_its_message() -> None:
    with pytest.raises(SystemExit, match=r"^device: is too old$"), exit_on_error():
        raise InvalidArgument("device", "is too old")


@pytest.mark.parametrize(
    ("cases", "given", "message"),
    [
        (router.CASES, ("placement", "--workers", "0"), "--workers: 0 is less than 2"),
        (serving.CASES, ("steps", "--step-ms", "-1"), "--step-ms: -1 is not above 0"),
        (serving.CASES, ("--rounds", "x"), "--rounds: 'x' is no whole number"),
    ],
)
def test_a_number_that_measures_nothing_is_named(
    cases: dict[str, str], given: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_case("any", "", cases, given)
    assert message in capsys.readouterr().err


def test_models_of_the_same_heads_are_measured_once() -> None:
    sizes = sizes_of(["llama-3-8b", "qwen3-8b", "llama-3.2-1b"])
    assert {(size.shape.heads, size.shape.kv_heads, size.shape.head_dim) for size in sizes} == {
        (32, 8, 128),
        (32, 8, 64),
    }
    assert len({size.name for size in sizes}) == len(sizes)


def test_rows_of_all_kinds_are_measured() -> None:
    lengths = {size.name: size.lengths for size in sizes_of(["llama-3-8b"])}
    assert lengths["64x2048 h32/8 d128"] == (2048,) * 64
    assert len(set(lengths["44x2048 uneven h32/8 d128"])) == 44
    assert abs(sum(lengths["44x2048 uneven h32/8 d128"]) / 44 - 2048) < 1
    assert sorted(lengths["12x1024 and 32768 h32/8 d128"]) == [*[1024] * 11, 32768]


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("max_step_tokens=512", ("max_step_tokens", 512)),
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
    [
        ("nonsense=1", "'nonsense' is not one of .*decode, "),
        ("decode=x", "decode='x' is no int"),
        ("decode", "decode=''"),
    ],
)
def test_a_setting_that_is_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=f"--set: {message}"):
        parse_setting(text)


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/somewhere/benchmarks/load.py", "--trace", "/data/t.jsonl"], "python -m benchmarks.load --trace t.jsonl"),
        (["/somewhere/benchmarks/serving/__main__.py", "steps"], "python -m benchmarks.serving steps"),
        (["/some/where/tandem", "plan"], "tandem plan"),
    ],
)
def test_a_command_names_the_module_and_no_machine_paths(
    argv: list[str], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", argv)
    assert results.run_facts("cpu")["command"] == command
