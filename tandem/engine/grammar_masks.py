"""Masks for requests whose output follows a grammar: tokens that may not come next get no probability, as in vLLM.

Threads compute the masks, and a step waits for them for a bounded time. If the mask of a request is late, the step runs
without it, so that other requests are not delayed: the tokens of the request's rows are discarded, and the rows are
repeated in later steps until the mask is ready. If the mask takes too much CPU time, the request fails.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine.steps.sampling_metadata import History, SamplingMetadata
from tandem.protocol.errors import Internal
from tandem.tokenizers.grammars import AnswerGrammar, LazyGrammars

AllowedDrafts = Callable[[History, str, Sequence[int]], int]
"""A function with the signature of `GrammarMasks.allowed_drafts`."""

STEP_WAIT_S = 0.02
"""The time in seconds that a step waits for masks. Computing the mask of a common grammar takes 0.1 to 10 ms."""
_THREADS = 16
"""The number of threads that compute masks.

If late masks occupy all of them, other requests with a grammar wait too.
"""


class GrammarMasks:
    """Computes which tokens the rows of a step may sample. Only the engine's thread calls it, except for `begin`."""

    def __init__(
        self, grammars: LazyGrammars, eos_token_ids: Sequence[int], step_wait_s: float | None = STEP_WAIT_S
    ) -> None:
        """Create the masks for the grammars of a model's requests.

        A step waits for masks for up to `step_wait_s` seconds; None = until all masks are ready. The output of a
        request whose grammar fails ends with one of `eos_token_ids`, and `History.failure` has the error.
        """
        self._grammars = grammars
        self._eos_token_ids = eos_token_ids
        self._step_wait_s = step_wait_s
        self._answers: WeakKeyDictionary[History, _Answer] = WeakKeyDictionary()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar-masks")

    def begin(self, history: History, grammar: str) -> None:
        """Compile the grammar of a request and compute the mask of its next token, before a step needs them.

        Raises InvalidArgument if that fails. Any thread may call it, before any step has a row of the request.
        """
        answer = _Answer(self._grammars, grammar)
        answer.compute(history.answer)
        answer.allowed(history.answer)
        self._answers[history] = answer

    def forbidden(self, draws: SamplingMetadata, vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the rows [n] int64 that have a grammar, and the tokens [n, vocab] bool that their grammars forbid.

        Both are on the device, and the call does not wait for the device.
        """
        rows = [row for row, sampling in enumerate(draws.samplings) if sampling.grammar]
        first: dict[History, int] = {}
        # Rows of draft tokens have the same history as the row of the newest token, which comes before them.
        newest = [first.setdefault(_history(draws, row), row) for row in rows]
        self._compute({history: draws.samplings[row].grammar for history, row in first.items()})
        drafts = (draws.indices[rows] - draws.indices[newest]).tolist()
        words = -(-vocab_size // 32)
        bits = [
            self._bits(_history(draws, row), row_drafts, words) for row, row_drafts in zip(rows, drafts, strict=True)
        ]
        sent = _sent(torch.from_numpy(np.stack(bits)), device)
        shifts = torch.arange(32, dtype=torch.int32, device=device)
        forbidden = ((sent.unsqueeze(-1) >> shifts) & 1 == 0).flatten(1)[:, :vocab_size]
        return _sent(torch.tensor(rows), device), forbidden

    def allowed_drafts(self, history: History, grammar: str, drafts: Sequence[int]) -> int:
        """Return the number of leading draft tokens of `drafts` that the grammar allows after the output so far.

        The masks after these draft tokens are then ready, so the next step may have rows for them. Returns 0 if the
        request's masks are slow or not ready in time.
        """
        answer = self._answer(history, grammar)
        if answer.busy or answer.slow:
            return 0
        self._launch(deque([_Work(answer, list(history.answer), drafts)]))
        self._await((answer,))
        return 0 if answer.busy else answer.drafts

    def _answer(self, history: History, grammar: str) -> "_Answer":
        answer = self._answers.get(history)
        if answer is None:
            answer = self._answers[history] = _Answer(self._grammars, grammar)
        return answer

    def _compute(self, grammars: Mapping[History, str]) -> None:
        """Compute the masks of a step's requests, and mark those that are not ready in time."""
        answers = {history: self._answer(history, grammar) for history, grammar in grammars.items()}
        late = {history for history, answer in answers.items() if answer.busy}
        works = deque(
            _Work(answer, list(history.answer))
            for history, answer in answers.items()
            if history not in late and not answer.known(history.answer)
        )
        self._launch(works)
        # Requests that are late from an earlier step must not delay this step again, unless all of its requests are
        # late.
        if late and len(late) < len(answers):
            self._await([answers[history] for history in answers if history not in late])
        else:
            self._await(answers.values())
        self._spread(works)
        wait([answer.computing for history, answer in answers.items() if answer.computing and not history.may_wait])
        for history, answer in answers.items():
            history.waiting, history.slow = answer.busy, answer.slow

    def _launch(self, works: "deque[_Work]") -> None:
        """Let one thread compute the masks one after another, because nearly all of them take little time."""
        if not works:
            return
        answers = [work.answer for work in works]
        for answer in answers:
            answer.busy = True
        computing = self._threads.submit(_do_all, works)
        for answer in answers:
            answer.computing = computing

    def _await(self, answers: Iterable["_Answer"]) -> None:
        wait([answer.computing for answer in answers if answer.busy and answer.computing], self._step_wait_s)

    def _spread(self, works: "deque[_Work]") -> None:
        """Let separate threads compute the masks that are not begun, because the mask before them may take long."""
        while (work := _next(works)) is not None:
            work.answer.computing = self._threads.submit(work.do)

    def _bits(self, history: History, drafts: int, words: int) -> NDArray[np.int32]:
        """Return the mask, as bits [words], of the tokens that a row may sample after `drafts` draft tokens.

        If the mask is not ready or the grammar failed, only end-of-sequence tokens are allowed.
        """
        answer = self._answers[history]
        if not history.waiting:
            try:
                return answer.allowed(history.answer, drafts)[:words]
            except Exception as error:
                history.failure = error
        ends = np.zeros(words * 32, dtype=np.bool_)
        ends[list(self._eos_token_ids)] = True
        return np.packbits(ends, bitorder="little").view(np.int32)


class _Answer:
    """The grammar state of one request.

    While `busy`, it belongs to the thread that computes its mask, otherwise to the engine's thread.
    """

    def __init__(self, grammars: LazyGrammars, grammar: str) -> None:
        self._grammars = grammars
        self._grammar = grammar
        self._state: AnswerGrammar | None = None
        self._error: Exception | None = None
        self.busy = False
        self.computing: Future[None] | None = None
        """The future of the thread that computes the mask.

        `busy` may become False before the future is done, because one thread computes several masks.
        """
        self.slow = False
        """True once a mask took more than `STEP_WAIT_S` seconds of CPU time."""
        self.drafts = 0
        """The number of leading tokens of the latest draft that the grammar allows."""

    def known(self, tokens: Sequence[int]) -> bool:
        """Return True if the mask after `tokens` has been computed, or an error is stored for `allowed` to raise."""
        return self._error is not None or (self._state is not None and self._state.known(tokens))

    def allowed(self, tokens: Sequence[int], drafts: int = 0) -> NDArray[np.int32]:
        """Return the mask of the next token (`AnswerGrammar.allowed`), or raise the error of `compute`."""
        if self._error is not None:
            raise self._error
        assert self._state is not None
        return self._state.allowed(tokens, drafts)

    def compute(self, tokens: Sequence[int], drafts: Sequence[int] = ()) -> None:
        """Compute the mask of the next token, and the masks after each draft token that the grammar allows.

        An error is stored, and raised by `allowed`.
        """
        began = time.thread_time()
        try:
            if self._state is None:
                self._state = self._grammars.get().begin(self._grammar)
            if drafts:
                self.drafts = self._state.count_allowed(tokens, drafts)
            else:
                self._state.allowed(tokens)
        # A panic in the grammar library raises a BaseException that is not an Exception.
        except BaseException as error:
            self._error = error if isinstance(error, Exception) else Internal(f"the grammar's library failed: {error}")
            self.drafts = 0
        self.slow = self.slow or time.thread_time() - began > STEP_WAIT_S


class _Work(NamedTuple):
    answer: _Answer
    tokens: Sequence[int]
    drafts: Sequence[int] = ()

    def do(self) -> None:
        self.answer.compute(self.tokens, self.drafts)
        self.answer.busy = False


def _next(works: deque[_Work]) -> _Work | None:
    # Another thread may take the last entry between a check and the call.
    try:
        return works.popleft()
    except IndexError:
        return None


def _do_all(works: deque[_Work]) -> None:
    while (work := _next(works)) is not None:
        work.do()


def _history(draws: SamplingMetadata, row: int) -> History:
    history = draws.histories[row]
    assert history is not None
    return history


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the device; to a GPU it is copied from pinned memory, without waiting."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
