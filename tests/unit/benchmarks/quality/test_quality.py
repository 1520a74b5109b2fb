"""The quality benchmark on a tiny model: its table, its needles and its last line."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.command_line import run_case
from benchmarks.quality import predictions
from benchmarks.quality.__main__ import CASES
from benchmarks.quality.needle import found_needles, make_needles
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tests.factories import tiny_engine_config, write_tiny_model


class Characters:
    """A tokenizer of one token a character, after a first token of its own."""

    def __init__(self, _folder: Path | None = None) -> None:
        pass

    def encode(self, text: str) -> list[int]:
        return [1, *(ord(character) % 159 + 1 for character in text)]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(token_id) for token_id in ids)


def test_needles_have_their_length_number_and_depth() -> None:
    made = make_needles(Characters().encode, "hay " * 10, 500)
    assert [len(prompt) for prompt in made.prompts] == [500] * 3
    texts = ["".join(chr(token_id - 1) for token_id in prompt[1:]) for prompt in made.prompts]
    places = [text.index(number) for text, number in zip(texts, made.numbers, strict=True)]
    assert places == sorted(places)
    assert [text.count(number) for text, number in zip(texts, made.numbers, strict=True)] == [1] * 3


def test_an_answer_is_read_in_chunks(tmp_path: Path) -> None:
    runner = ModelRunner.load(tiny_engine_config(write_tiny_model(tmp_path)), kernels=ReferenceKernels())
    made = make_needles(Characters().encode, "hay ", 300)
    answers: list[list[int]] = []

    def decode(ids: Sequence[int]) -> str:
        answers.append(list(ids))
        return made.numbers[0]

    assert found_needles(runner, decode, made, 64) == 1
    assert found_needles(runner, decode, made, 512) == 1
    assert answers[:3] == answers[3:]


def test_the_last_line_is_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(predictions, "Tokenizer", Characters)
    folder = write_tiny_model(tmp_path / "tiny")
    other = write_tiny_model(tmp_path / "other", seed=1)
    options = ["--candidate", str(other), "--samples", "2", "--tokens", "12", "--needle", "300,4096"]
    run_case("quality", "", CASES, [str(folder), *options])
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    assert "no needles in 4096 tokens: the model's context is 512 tokens" in printed
    assert result["needles"].keys() == {"300"}
    assert result["decode"]["kl"] > 0.01
    assert result["prefill"]["positions"] == 2 * 6
    assert {"text", "candidate", "reference_dtype", "hardware", "commit"} <= result.keys()
