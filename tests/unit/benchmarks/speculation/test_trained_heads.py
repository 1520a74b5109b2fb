"""The comparison of heads on a tiny model: both kinds learn from the same answers, and what they wrote serves."""

import json
from pathlib import Path

import pytest

from benchmarks.speculation.trained_heads import CONTEXTS, DRAFTS, main
from engine.models.load_spec import load_spec
from engine.speculation.draft_folder import DraftKind, check_draft_folder, draft_kind
from tests.factories import write_tiny_model
from tests.small_tokenizer import save_tokenizer


def test_both_kinds_learn_from_the_same_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = write_tiny_model(tmp_path / "model", vocab_size=300), tmp_path / "out"
    save_tokenizer(model, tokens=300)
    text = tmp_path / "prompts.txt"
    text.write_text("\n\n".join(f"A paragraph about the number {n} and what it is good for." for n in range(12)))
    options = [
        "--text",
        str(text),
        "--tokens",
        "400",
        "--vocabulary",
        "64",
        "--threads",
        "1",
        "--medusa-epochs",
        "1",
        "--eagle-epochs",
        "2",
    ]
    main(["--model", str(model), "--out", str(out), *options])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["taught_tokens"] + result["held_out_tokens"] >= 200
    medusa, eagle = result["rows"]
    assert (medusa["kind"], eagle["kind"], len(eagle["losses"])) == ("medusa", "eagle", 2)
    for gains in (medusa["tokens_a_step"], eagle["tokens_a_step"], *eagle["with_contexts_of"].values()):
        assert len(gains) == DRAFTS
        assert all(1 <= gain <= DRAFTS + 1 for gain in gains)
    assert list(map(int, eagle["with_contexts_of"])) == list(CONTEXTS)
    for name, kind in (("medusa-1", DraftKind.HEADS), ("eagle-2", DraftKind.EAGLE)):
        assert draft_kind(out / name) is kind
        check_draft_folder(out / name, load_spec(model), model)
