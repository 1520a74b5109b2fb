"""Masks of grammars on logits: which tokens are drawn, beside whom, and what becomes of a grammar that fails."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tandem.engine.grammar_masks import GrammarMasks
from tandem.engine.logits_mask import MaskedLogits
from tandem.engine.logprobs import score
from tandem.engine.sampler import sample
from tandem.engine.steps.sampling_metadata import History, SamplingInput, SamplingMetadata
from tandem.protocol.errors import InvalidArgument
from tandem.tokenizers.grammars import AnswerGrammar, Grammars, LazyGrammars, of_choices, of_regex
from tests.factories import draw
from tests.fake_engine import VOCAB, small_grammars
from tests.small_tokenizer import EOS

DIGITS = of_regex("[0-9]{3}")


@pytest.fixture
def masks() -> GrammarMasks:
    return GrammarMasks(LazyGrammars(small_grammars), [EOS], step_wait_s=None)


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
        draws = SamplingMetadata.of([free, SamplingInput(asked, len(history.answer), history), free])
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
    digits = [
        token for token in range(VOCAB) if small_grammars().begin(DIGITS).count_allowed((), [token, token, token]) == 3
    ]
    history, refused = History([5], digits[:1]), VOCAB - 1
    assert masks.allowed_drafts(history, DIGITS, [digits[1], refused, digits[2]]) == 1
    assert masks.allowed_drafts(history, DIGITS, [digits[1], digits[2], digits[3]]) == 2
    logits = random_logits(4)
    rows = [
        SamplingInput(asked, 1, history),
        draw(seed=1),
        SamplingInput(asked, 2, history),
        SamplingInput(asked, 3, history),
    ]
    tokens = sample(logits, SamplingMetadata.of(rows), [EOS], masks)
    for drafts, row in enumerate((0, 2, 3)):
        alone = History([5], digits[: 1 + drafts])
        assert tokens[row] == sample(logits[row : row + 1], [SamplingInput(asked, 1 + drafts, alone)], [EOS], masks)
    assert tokens[3] == EOS


def test_masked_logits_are_restored(masks: GrammarMasks) -> None:
    """Also those of a row that may not end, and of a row with both masks."""
    logits = random_logits(4)
    own = logits.clone()
    kinds = ({"grammar": DIGITS}, {"min_tokens": 3}, {}, {"grammar": of_choices(["a", "b"]), "min_tokens": 3})
    draws = SamplingMetadata.of(
        [replace(draw(**kind), history=History([5], []) if "grammar" in kind else None) for kind in kinds]
    )
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
    draws = [SamplingInput(asked, len(history.answer), history) for history in (wrong, right)]
    tokens = sample(random_logits(2), draws, [EOS], masks)
    assert tokens[0] == EOS
    assert wrong.failure is not None
    assert right.failure is None
    assert tokens[1] == sample(random_logits(2)[1:], draws[1:], [EOS], masks)[0]


def test_states_end_with_their_requests(masks: GrammarMasks) -> None:
    histories = [History([5], []) for _ in range(3)]
    asked = draw(grammar=DIGITS).sampling
    sample(random_logits(3), [SamplingInput(asked, 0, history) for history in histories], [EOS], masks)
    assert len(masks._answers) == 3
    del histories
    gc.collect()
    assert not masks._answers


class SlowMasks:
    """Has the masks of one grammar wait for `go`, and notes the threads that compute any."""

    def __init__(self, grammar: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.threads: set[str] = set()
        allowed, begin = AnswerGrammar.allowed, Grammars.begin
        slow: set[int] = set()

        def noting(grammars: Grammars, text: str) -> AnswerGrammar:
            state = begin(grammars, text)
            if text == grammar:
                slow.add(id(state))
            self.states.append(state)
            return state

        def waiting(state: AnswerGrammar, answer: Sequence[int], drafts: int = 0) -> np.ndarray[Any, Any]:
            if not state.known(answer):
                self.threads.add(threading.current_thread().name)
                assert id(state) not in slow or self.go.wait(60)
            return allowed(state, answer, drafts)

        self.states: list[AnswerGrammar] = []
        monkeypatch.setattr(Grammars, "begin", noting)
        monkeypatch.setattr(AnswerGrammar, "allowed", waiting)


def test_an_answer_whose_mask_takes_long_waits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of others are drawn in the same step, those that come after it in the order as well."""
    slow_grammar, masks = of_regex("[a-f]{3}"), GrammarMasks(LazyGrammars(small_grammars), [EOS], step_wait_s=0.01)
    slow = SlowMasks(slow_grammar, monkeypatch)
    histories = [History([5], [], may_wait=True) for _ in range(3)]
    asked = [draw(grammar=grammar).sampling for grammar in (slow_grammar, DIGITS, DIGITS)]

    def step() -> list[int]:
        rows = [SamplingInput(sampling, 0, history) for sampling, history in zip(asked, histories, strict=True)]
        return sample(random_logits(3), rows, [EOS], masks).tolist()

    drawn = step()
    while any(history.waiting for history in histories[1:]):
        drawn = step()
    assert histories[0].waiting
    assert masks.allowed_drafts(histories[0], slow_grammar, [5]) == 0
    assert drawn[1:] == step()[1:]
    slow.go.set()
    while histories[0].waiting:
        drawn = step()
    assert all(history.failure is None for history in histories)
    allowed = small_grammars().begin(slow_grammar).allowed(())
    assert allowed[drawn[0] // 32] >> (drawn[0] % 32) & 1
    assert threading.current_thread().name not in slow.threads


def test_a_row_that_cannot_wait_gets_its_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    masks, history = GrammarMasks(LazyGrammars(small_grammars), [EOS], step_wait_s=0.0), History([5], [])
    threading.Timer(0.1, SlowMasks(DIGITS, monkeypatch).go.set).start()
    token = sample(random_logits(1), [SamplingInput(draw(grammar=DIGITS).sampling, 0, history)], [EOS], masks)
    assert not history.waiting
    assert token != EOS


def test_a_mask_that_took_too_much_processor_time_ends_its_answer(
    masks: GrammarMasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History([5], [], may_wait=True)
    monkeypatch.setattr("tandem.tokenizers.grammars._TOKEN_S", -1.0)
    token = sample(random_logits(1), [SamplingInput(draw(grammar=of_regex("b{3}")).sampling, 0, history)], [EOS], masks)
    assert token == EOS
    assert isinstance(history.failure, InvalidArgument)
    assert "simplify it" in str(history.failure)


def test_an_answer_with_slow_masks_gets_no_drafts(masks: GrammarMasks, monkeypatch: pytest.MonkeyPatch) -> None:
    history, digits = History([5], [], may_wait=True), small_grammars().begin(DIGITS).allowed(())
    digit = int(np.flatnonzero(np.unpackbits(digits.view(np.uint8), bitorder="little"))[0])
    assert masks.allowed_drafts(history, DIGITS, [digit]) == 1
    monkeypatch.setattr("tandem.engine.grammar_masks.STEP_WAIT_S", -1.0)
    assert masks.allowed_drafts(history, DIGITS, [digit]) == 1
    assert masks.allowed_drafts(history, DIGITS, [digit]) == 0
    sample(random_logits(1), [SamplingInput(draw(grammar=DIGITS).sampling, 0, history)], [EOS], masks)
    assert history.slow


def test_no_step_compiles_a_grammar(masks: GrammarMasks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that was dropped from the cache, nor one whose answer was begun before."""
    threads: list[str] = []
    compile_before = Grammars._compile

    def noting(grammars: Grammars, grammar: str) -> Any:
        threads.append(threading.current_thread().name)
        return compile_before(grammars, grammar)

    monkeypatch.setattr(Grammars, "_compile", noting)
    grammar, begun, new = of_regex("[a-f]{7}"), History([5], []), History([5], [])
    masks.begin(begun, grammar)
    small_grammars()._compiled.clear()
    asked = draw(grammar=grammar).sampling
    sample(random_logits(2), [SamplingInput(asked, 0, history) for history in (begun, new)], [EOS], masks)
    assert len(threads) == 2
    assert threads[0] == threading.current_thread().name != threads[1]
    with pytest.raises(InvalidArgument):
        masks.begin(History([5], []), of_regex("(("))


def test_a_defect_in_a_mask_ends_its_answer_alone(masks: GrammarMasks, monkeypatch: pytest.MonkeyPatch) -> None:
    histories, grammars = [History([5], []) for _ in range(2)], (of_regex("c{3}"), DIGITS)
    begin = Grammars.begin

    def failing(known: Grammars, grammar: str) -> AnswerGrammar:
        assert grammar == DIGITS
        return begin(known, grammar)

    monkeypatch.setattr(Grammars, "begin", failing)
    rows = [
        SamplingInput(draw(grammar=grammar).sampling, 0, history)
        for grammar, history in zip(grammars, histories, strict=True)
    ]
    sample(random_logits(2), rows, [EOS], masks)
    assert isinstance(histories[0].failure, AssertionError)
    assert histories[1].failure is None
