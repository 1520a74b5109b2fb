"""Training of heads: what their guesses gain, what they can guess, and that answers keep the states that drew them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tandem.engine.draft_training.answers import Answer, AnswerGenerator, tokens_a_step
from tandem.engine.draft_training.train_draft import base_weights
from tandem.engine.draft_training.train_heads import frequent_tokens
from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.allocation import allocate_parameters
from tandem.engine.models.load_spec import load_spec
from tandem.engine.weights import checkpoint
from tandem.engine.weights.checkpoint import load_weights
from tandem.engine.weights.tensor_reader import read_tensors
from tests.eagle_heads import write_eagle
from tests.factories import tiny_engine_config, write_tiny_model
from tests.medusa_heads import write_heads
from tests.unit.engine.speculation.heads_acceptance import heads_tokens_a_step

ANSWER = [7, 8, 9, 10, 11, 12]
RIGHT = [[8, 9], [9, 10], [10, 11], [11, 12], [12, 0], [0, 0]]
PROMPTS = [[5, 17, 2], [40, 90, 33, 1, 6]]


@pytest.mark.parametrize(
    ("guesses", "drafts", "gain"),
    [
        (RIGHT, 1, 5 / 3),  # 8 plain, 9 + 10, 11 + 12
        (RIGHT, 2, 5 / 3),  # 8 plain, 9 + 10 + 11, 12 plain: the last token needs no draft
        ([[0, 0]] * 6, 2, 1.0),
        ([[0, 0], [9, 0], [0, 11], [0, 12], [0, 0], [0, 0]], 2, 5 / 4),  # 8, 9 + 10, 11, 12
        (RIGHT, 0, 1.0),
    ],
)
def test_guesses_gain_tokens_up_to_the_first_wrong_one(guesses: list[list[int]], drafts: int, gain: float) -> None:
    assert tokens_a_step([guesses], [ANSWER], drafts) == pytest.approx(gain)


def test_an_answer_of_one_token_has_no_step() -> None:
    assert tokens_a_step([[[1]]], [[7]], 1) == 1.0


def test_heads_guess_the_tokens_that_answers_have_most() -> None:
    answers = [Answer([5, 5, 9, 9, 9, 1], torch.zeros(6, 4))]
    assert frequent_tokens(answers, 2, 12).tolist() == [5, 9]  # type: ignore[union-attr]
    assert frequent_tokens(answers, 4, 12).tolist() == [0, 1, 5, 9]  # type: ignore[union-attr]
    assert frequent_tokens(answers, 12, 12) is None


def test_each_token_of_an_answer_has_the_state_that_drew_it(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    runner = ModelRunner.load(tiny_engine_config(model, keep_hidden=True))
    together = next(AnswerGenerator(runner, 0.0, 0).answers(PROMPTS, 12))
    for prompt, answer in zip(PROMPTS, together, strict=True):
        (alone,) = next(AnswerGenerator(runner, 0.0, 0).answers([prompt], 12))
        assert alone.token_ids == answer.token_ids
        assert len(answer.hidden) == len(answer.token_ids)
        torch.testing.assert_close(alone.hidden, answer.hidden)
    with pytest.raises(ValueError, match="no hidden states"):
        AnswerGenerator(ModelRunner.load(tiny_engine_config(model)), 0.0, 0)


@pytest.mark.parametrize("write", [partial(write_heads, own=False), write_eagle], ids=["Medusa", "EAGLE"])
def test_heads_are_measured_while_the_model_answers(write: Callable[..., Path], tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    spec = load_spec(model)
    heads = write(tmp_path / "heads", spec.hidden_size, spec.vocab_size)
    runner = ModelRunner.load(tiny_engine_config(model, draft=heads))
    rates = heads_tokens_a_step(runner, PROMPTS, 12, (1, 2))
    assert 1.0 <= rates[1] <= rates[2] <= 3.0


@pytest.mark.parametrize("family", ["llama3", "smollm2", "gemma3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_reads_only_the_ends_of_the_model(
    family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_engine_config(write_tiny_model(tmp_path / "model", family), dtype=dtype)
    spec = load_spec(config.served.model)
    whole = allocate_parameters(spec, getattr(torch, dtype), torch.device("cpu"))
    load_weights(config.served.model, spec, whole)
    read: list[str] = []
    monkeypatch.setattr(checkpoint, "read_tensors", lambda *given: read.extend(given[0]) or read_tensors(*given))
    base = base_weights(config, spec)
    assert len(read) == (2 if spec.tied_embeddings else 3)
    assert base.norm.dtype == whole.final_norm.dtype
    assert base.projection.dtype == getattr(torch, dtype)
    assert torch.equal(base.norm, whole.final_norm)
    assert torch.equal(base.projection, whole.lm_head)  # type: ignore[arg-type]
    assert torch.equal(base.embedding, whole.embedding)  # type: ignore[arg-type]
