"""The comparison of heads on a tiny model, with heads that are right from the second token of a context on."""

import json
from pathlib import Path

import pytest

import benchmarks.speculation.trained_heads as comparison
from tandem.engine.draft_training.answers import Answer
from tandem.engine.draft_training.train_draft import Learned
from tests.factories import write_tiny_model
from tests.small_tokenizer import save_tokenizer


def guess(answer: Answer) -> list[list[int]]:
    """Returns two right guesses behind each token but the first of the context, as far as the context goes."""
    tokens = [*answer.token_ids, -1, -1]
    return [[-1, -1] if n == 0 else tokens[n + 1 : n + 3] for n in range(len(answer.token_ids))]


def test_contexts_that_begin_anew_cost_guesses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, text = write_tiny_model(tmp_path / "model", vocab_size=300), tmp_path / "prompts.txt"
    save_tokenizer(model, tokens=300)
    text.write_text("\n\n".join(f"A paragraph about the number {n} and what it is good for." for n in range(12)))
    learned = Learned([2.0, 1.0], guess, lambda folder, _: folder.mkdir(parents=True))
    monkeypatch.setattr(comparison, "learn", lambda *_: learned)
    options = ["--text", str(text), "--tokens", "200", "--threads", "1", "--medusa-epochs", "1", "--eagle-epochs", "2"]
    comparison.main(["--model", str(model), "--out", str(tmp_path / "out"), *options])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["taught_tokens"] + result["held_out_tokens"] >= 200
    medusa, eagle = result["rows"]
    assert (medusa["kind"], eagle["kind"]) == ("medusa", "eagle")
    assert medusa["tokens_a_step"] == eagle["tokens_a_step"]
    whole = eagle["tokens_a_step"][1]
    anew = [eagle["with_contexts_of"][str(most)][1] for most in comparison.CONTEXTS]
    assert [1.0, *anew[1:], whole] == sorted([*anew, whole])
    assert whole > 2.5
    assert {each.name for each in (tmp_path / "out").iterdir()} == {"medusa-1", "eagle-2"}
