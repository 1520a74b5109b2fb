"""Masks of grammars on logits: which tokens are drawn, beside whom, and what becomes of a grammar that fails."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from engine.grammar_masks import GrammarMasks
from engine.logits_mask import MaskedLogits
from engine.logprobs import score
from engine.sampler import sample
from engine.steps.draws import Draw, Draws, History
from tests.factories import draw
from tests.fake_engine import VOCAB, small_grammars
from tests.small_tokenizer import EOS
from vocabulary.grammars import LazyGrammars, of_choices, of_regex

DIGITS = of_regex("[0-9]{3}")


@pytest.fixture
def masks() -> GrammarMasks:
    return GrammarMasks(LazyGrammars(small_grammars), [EOS])


def random_logits(rows: int) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_allowed_tokens_are_drawn(masks: GrammarMasks, temperature: float, dtype: torch.dtype) -> None:
    asked = draw(temperature=temperature, seed=4, grammar=DIGITS, logprobs=2).sampling
    free = draw(temperature=temperature, seed=9)
    history = History([5], [])
    while history.answer[-1:] != [EOS]:
        assert isinstance(history.answer, list)
        logits = random_logits(3).to(dtype)
        own = logits.clone()
        draws = Draws.of([free, Draw(asked, len(history.answer), history), free])
        tokens = sample(logits, draws, [EOS], masks)
        assert torch.equal(logits, own), "log probabilities are those of the model's own logits"
        assert tokens[[0, 2]].tolist() == sample(logits[[0, 2]], [free, free]).tolist()
        allowed = small_grammars().begin(DIGITS).allowed(history.answer)
        assert allowed[tokens[1] // 32] >> (int(tokens[1]) % 32) & 1
        assert score(logits, draws, tokens)[1] is not None
        history.answer.append(int(tokens[1]))
    assert history.failure is None
    assert 2 <= len(history.answer) <= 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_of_drafts_draw_as_if_the_drafts_were_in_the_answer(masks: GrammarMasks, temperature: float) -> None:
    """Those that the grammar refuses have no rows; a row of another request lies between."""
    asked = draw(temperature=temperature, seed=4, grammar=DIGITS).sampling
    digits = [token for token in range(VOCAB) if small_grammars().begin(DIGITS).follow((), [token, token, token]) == 3]
    history, refused = History([5], digits[:1]), VOCAB - 1
    assert masks.allowed_drafts(history, DIGITS, [digits[1], refused, digits[2]]) == 1
    assert masks.allowed_drafts(history, DIGITS, [digits[1], digits[2], digits[3]]) == 2
    logits = random_logits(4)
    rows = [Draw(asked, 1, history), draw(seed=1), Draw(asked, 2, history), Draw(asked, 3, history)]
    tokens = sample(logits, Draws.of(rows), [EOS], masks)
    for drafts, row in enumerate((0, 2, 3)):
        alone = History([5], digits[: 1 + drafts])
        assert tokens[row] == sample(logits[row : row + 1], [Draw(asked, 1 + drafts, alone)], [EOS], masks)
    assert tokens[3] == EOS


def test_masked_logits_are_restored(masks: GrammarMasks) -> None:
    """Also those of a row that may not end, and of a row with both masks."""
    logits = random_logits(4)
    own = logits.clone()
    kinds = ({"grammar": DIGITS}, {"min_tokens": 3}, {}, {"grammar": of_choices(["a", "b"]), "min_tokens": 3})
    draws = Draws.of([replace(draw(**kind), history=History([5], []) if "grammar" in kind else None) for kind in kinds])
    masked = MaskedLogits(logits, draws, [EOS], masks)
    forbidden = logits.isinf()
    assert forbidden[:, EOS].tolist() == [True, True, False, True]
    assert forbidden.sum(dim=1).tolist()[1:3] == [1, 0]
    assert (forbidden[[0, 3]].sum(dim=1) > VOCAB - 100).all()
    assert torch.equal(logits[~forbidden], own[~forbidden])
    masked.restore()
    assert torch.equal(logits, own)


def test_a_grammar_that_fails_ends_its_answer_with_the_reason(masks: GrammarMasks) -> None:
    """The answer does not follow it, as if another version had made it; the other row does not notice."""
    wrong, right = History([5], [300]), History([5], [])
    asked = draw(grammar=DIGITS).sampling
    draws = [Draw(asked, len(each.answer), each) for each in (wrong, right)]
    tokens = sample(random_logits(2), draws, [EOS], masks)
    assert tokens[0] == EOS
    assert wrong.failure is not None
    assert right.failure is None
    assert tokens[1] == sample(random_logits(2)[1:], draws[1:], [EOS], masks)[0]


def test_states_end_with_their_requests(masks: GrammarMasks) -> None:
    histories = [History([5], []) for _ in range(3)]
    asked = draw(grammar=DIGITS).sampling
    sample(random_logits(3), [Draw(asked, 0, each) for each in histories], [EOS], masks)
    assert len(masks._states) == 3
    del histories
    gc.collect()
    assert not masks._states
