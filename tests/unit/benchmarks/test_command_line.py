"""Benchmarks of GPUs on a machine without one, and the sizes that the attention tuner measures."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.command_line import exit_on_error
from benchmarks.load import served_model
from benchmarks.tuning.tune_attention import sizes_of
from tandem.protocol.errors import InvalidArgument


@pytest.mark.parametrize(
    "name",
    [
        "experts",
        "fused_kernels",
        "kv_transfer",
        "latent_attention",
        "tuning.tune_attention",
        "tuning.tune_gated",
        "tuning.tune_linear",
    ],
)
def test_no_gpu_is_said_in_one_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [name, "--device", "cuda"] if name == "kv_transfer" else [name])
    with pytest.raises(SystemExit, match="PyTorch sees none"):
        importlib.import_module(f"benchmarks.{name}").main()


@pytest.mark.parametrize("name", ["fused_kernels", "tuning.tune_attention", "tuning.tune_linear"])
def test_an_unknown_shape_lists_the_known(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    option = "--shape" if name == "fused_kernels" else "--models"
    monkeypatch.setattr(sys, "argv", [name, option, "nope"])
    with pytest.raises(SystemExit):
        importlib.import_module(f"benchmarks.{name}").main()
    assert "llama-3-8b" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "cuda"], "^device: 'cuda' is not there: PyTorch sees 0 CUDA devices"),
        (["--device", "gpu"], "^--device: 'gpu' is none of cpu, cuda and cuda:N$"),
        (["--dtype", "float8"], "^--dtype: 'float8' is none of auto, float32, bfloat16, float16$"),
        (["--shape", "nope"], "'nope' is no known shape; choose deepseek-v2-lite"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_sentence(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["serving", *arguments])
    monkeypatch.setattr(served_model, "find_default_model", lambda: Path("nowhere"))
    monkeypatch.setattr(served_model, "prepare_model", lambda path: path)
    with pytest.raises(SystemExit, match=words):
        importlib.import_module("benchmarks.serving").main()


def test_an_error_ends_with_its_message() -> None:
    with pytest.raises(SystemExit, match=r"^device: is too old$"), exit_on_error():
        raise InvalidArgument("device", "is too old")


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
    ("name", "given", "message"),
    [
        ("placement", ("--workers", "0"), "--workers: 0 is less than 2"),
        ("placement", ("--pages", "0"), "--pages: 0 is less than 1"),
        ("placement", ("--requests", "0"), "--requests: 0 is less than 100"),
        ("scheduling", ("--steps", "0"), "--steps: 0 is less than 1"),
        ("scheduling", ("--step-ms", "-1"), "--step-ms: -1 is not above 0"),
        ("serving", ("--streams", "0"), "--streams: 0 is less than 1"),
        ("serving", ("--rounds", "x"), "--rounds: 'x' is no whole number"),
        ("simulation.scale", ("--workers", "1"), "--workers: 1 is less than 2"),
        ("simulation.scale", ("--rate", "0"), "--rate: 0 is not above 0"),
        ("simulation.scale", ("--rate", "x"), "--rate: 'x' is no number"),
    ],
)
def test_a_number_that_measures_nothing_is_named(
    name: str,
    given: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [name, *given])
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(f"benchmarks.{name}").main()
    assert message in capsys.readouterr().err
