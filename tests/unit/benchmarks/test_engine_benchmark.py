"""The engine benchmark's arithmetic and output on a tiny model; no timing."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.command_line import run_case
from benchmarks.engine.__main__ import CASES
from benchmarks.engine.cpu_comparison import Comparison, Engine, Settings, as_result, compare
from benchmarks.engine.transformers_peer import TransformersPeer
from benchmarks.results import run_facts, save_result
from tandem.engine.config import EngineConfig
from tandem.engine.model_runner import ModelRunner
from tests.factories import write_tiny_model
from tests.soak import soak
from tests.unit.engine.weights.quantized_folders import write_quantized

SMALL = Settings(batches=(1, 3), prompt=5, new_tokens=4, prefill=20, rounds=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny", "smollm2")


@pytest.fixture
def sides(folder: Path) -> tuple[Engine, TransformersPeer]:
    runner = ModelRunner.load(EngineConfig.of(folder, threads=1, kv_cache_bytes=1 << 20))
    return Engine(runner), TransformersPeer(folder, "float32", threads=1)


def test_both_sides_answer_the_same(sides: tuple[Engine, TransformersPeer]) -> None:
    engine, peer = sides
    prompts = [[5, 9, 30, 7], [11, 12, 13, 14]]
    seconds, ours = engine.decode(prompts, 6)
    peer_seconds, theirs = peer.decode(prompts, 6)
    assert ours == theirs
    assert [len(answer) for answer in ours] == [6, 6]
    assert seconds > 0
    assert peer_seconds > 0


def test_every_quantity_is_compared_in_turns(sides: tuple[Engine, TransformersPeer]) -> None:
    compared = compare(*sides, SMALL)
    assert [comparison.name for comparison in compared] == ["decode_ratio_b1", "decode_ratio_b3", "prefill_ratio_20"]
    assert all(len(comparison.engine) == len(comparison.peer) == SMALL.rounds for comparison in compared)
    assert [comparison.same_tokens for comparison in compared] == ["1 of 1", "3 of 3", ""]
    assert compared[1].bytes_read > compared[0].bytes_read > 0


def test_a_decode_step_reads_the_output_layer_but_no_separate_embedding(tmp_path: Path) -> None:
    tied = TransformersPeer(write_tiny_model(tmp_path / "tied", "smollm2"), "float32", threads=1)
    apart = TransformersPeer(
        write_tiny_model(tmp_path / "apart", "smollm2", tie_word_embeddings=False), "float32", threads=1
    )
    assert tied.weight_bytes() == apart.weight_bytes()


def test_ratios_are_of_medians_and_named_by_dtype() -> None:
    comparison = Comparison("decode_ratio_b1", [1.0, 1.1, 9.0], [3.3, 0.1, 4.0], bytes_read=11 * 10**8)
    result = as_result([comparison], 50.0, "_bf16")
    assert result["decode_ratio_b1_bf16"] == 3.0
    assert result["decode_b1_bf16_gb_per_s"] == 1.0
    assert result["read_gb_per_s_bf16"] == 50.0


@soak
def test_the_last_line_is_the_result(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--prompt-tokens", "5", "--new-tokens", "3", "--prefill-tokens", "8", "--rounds", "1"]
    run_case("engine", "", CASES, ["--model", str(folder), "--dtype", "both", "--threads", "1", *sizes])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    for key in ("decode_ratio_b1", "decode_ratio_b8", "prefill_ratio_8"):
        assert result[key] > 0
        assert result[f"{key}_bf16"] > 0
    assert result["dtype"] == "both"
    assert {"hardware", "versions", "commit", "command", "date"} <= result.keys()


def test_files_of_results_are_named_after_subject_and_dtype(tmp_path: Path) -> None:
    result = {"dtype": "float32", "answer": 42} | run_facts("cpu")
    file = save_result("engine-Tiny", result, tmp_path / "results")
    assert file.name.startswith("engine-Tiny-")
    assert file.name.endswith("-float32.json")
    assert json.loads(file.read_text()) == result


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "nowhere"], "nowhere does not exist"),
        (["--device", "cuda", "--rounds", "5"], "--rounds: is only with --device cpu"),
        (["--profile", "--eager"], "--eager: a profile measures no steps without CUDA graphs"),
        (["--device", "cuda"], "PyTorch sees 0 CUDA devices"),
        (["--profile"], "measures a CUDA GPU and PyTorch sees none; run it on a machine with one"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_sentence(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=words) as ended:
        run_case("engine", "", CASES, arguments)
    assert "\n" not in str(ended.value)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_codes_are_compared_with_bfloat16(tmp_path: Path) -> None:
    packed, plain = write_quantized(tmp_path, "W4A16")
    sides = [
        Engine(ModelRunner.load(EngineConfig.of(model, dtype="bfloat16", threads=1, kv_cache_bytes=1 << 20)))
        for model in (packed, plain)
    ]
    compared = compare(sides[0], sides[1], SMALL)
    assert [comparison.bytes_read for comparison in compared] == [0, 0, 0]
    assert all(comparison.ratio > 0 for comparison in compared)


def test_a_model_without_codes_is_refused(folder: Path) -> None:
    with pytest.raises(SystemExit, match="take a quantized GGUF"):
        run_case("engine", "", CASES, ["--peer", "bfloat16", "--model", str(folder)])
