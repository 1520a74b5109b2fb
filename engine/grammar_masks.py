"""Masks of answers that follow a grammar: tokens that may not come next have no probability, as in vLLM."""

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from engine.steps.draws import Draws, History
from vocabulary.grammars import AnswerGrammar, LazyGrammars
from wire.errors import InvalidArgument

AllowedDrafts = Callable[[History, str, Sequence[int]], int]
"""See `GrammarMasks.allowed_drafts`."""


class GrammarMasks:
    """The tokens that the draws of a step may take. Engine thread only."""

    def __init__(self, grammars: LazyGrammars, eos_token_ids: Sequence[int]) -> None:
        """An answer whose grammar fails ends with one of `eos_token_ids`, and `History.failure` says why."""
        self._grammars = grammars
        self._eos_token_ids = eos_token_ids
        self._states: WeakKeyDictionary[History, AnswerGrammar] = WeakKeyDictionary()

    def forbidden(self, draws: Draws, vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the rows [n] int64 of draws that follow a grammar, and the tokens [n, vocab] bool that they forbid.

        Both are on the device; no launch waits for it.
        """
        rows = [row for row, sampling in enumerate(draws.samplings) if sampling.grammar]
        first: dict[History | None, int] = {}
        # The rows of drafts have the history of the row before the first of them, whose draw they follow.
        newest = [first.setdefault(draws.histories[row], row) for row in rows]
        drafts = (draws.indices[rows] - draws.indices[newest]).tolist()
        bits = np.stack([self._allowed(draws, row, each, vocab_size) for row, each in zip(rows, drafts, strict=True)])
        words = _sent(torch.from_numpy(bits), device)
        shifts = torch.arange(32, dtype=torch.int32, device=device)
        forbidden = ((words.unsqueeze(-1) >> shifts) & 1 == 0).flatten(1)[:, :vocab_size]
        return _sent(torch.tensor(rows), device), forbidden

    def allowed_drafts(self, history: History, grammar: str, drafts: Sequence[int]) -> int:
        """Return how many of the first `drafts` may follow an answer; the next step may have rows for them."""
        try:
            return self._state(history, grammar).follow(history.answer, drafts)
        except InvalidArgument:  # of another version, perhaps: the step without drafts says so
            return 0

    def _state(self, history: History, grammar: str) -> AnswerGrammar:
        state = self._states.get(history)
        if state is None:
            state = self._states[history] = self._grammars.get().begin(grammar)
        return state

    def _allowed(
        self, draws: Draws, row: int, drafts: int, vocab_size: int
    ) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """Return the bits [ceil(vocab / 32)] of the tokens that a row may draw behind so many drafts."""
        history = draws.histories[row]
        assert history is not None
        try:
            state = self._state(history, draws.samplings[row].grammar)
            return state.allowed(history.answer, drafts)[: -(-vocab_size // 32)]
        except InvalidArgument as error:
            history.failure = error
            ends = np.zeros(-(-vocab_size // 32) * 32, dtype=np.bool_)
            ends[list(self._eos_token_ids)] = True
            return np.packbits(ends, bitorder="little").view(np.int32)


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the device, which to a GPU is made from pinned memory without a wait."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
