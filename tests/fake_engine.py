"""An engine without a model: a token's KV is the token itself, and the next token is a hash of the KV read back.

A token is therefore right only if every page of the context holds the right tokens at the right positions. The engine
asserts that it never writes to a shared or cached page.
"""

import hashlib
import threading
import time
import zlib
from collections.abc import Hashable, Sequence, Set
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import torch

from decode_worker.request import DecodeRequest
from kv_transfer.layout import KVLayout
from tandem.cost_model.roofline import ModelSizes, Roofline
from tandem.engine.adapters.slots import AdapterSlots
from tandem.engine.cache.page_checksums import page_checksums
from tandem.engine.cache.page_pool import PagePool
from tandem.engine.cache.tiers.page_copies import PageCopies
from tandem.engine.kernels.kv_cache import StateCache
from tandem.engine.speculation.load_draft import MakeProposer
from tandem.engine.steps.batch import ModelRunnerOutput, PendingStep, StepBatch, StepRow
from tandem.engine.steps.draft_groups import accepted_in
from tandem.engine.steps.prompt_scoring import PromptScores
from tandem.engine.steps.sampling_metadata import History
from tandem.protocol.cost_parameters import UNMEASURED
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.kv_pages import STATE, KvPages
from tandem.protocol.messages import LOGIT_BIAS_MAX, ModelFacts, SamplingParams, TokenLogprobs
from tandem.settings.ceilings import Ceilings
from tandem.tokenizers.grammars import Grammars
from tests.small_tokenizer import save_tokenizer

PAGE_TOKENS = 4
VOCAB = 1000
EOS = 2
FACTS = ModelFacts("fake", VOCAB, max_context=256, eos_token_ids=(EOS,), dtype="int32")


class ComputedStep(NamedTuple):
    """The rows of a computed step, without the objects that would keep requests in memory."""

    rows: Sequence[StepRow]
    """The rows, without histories and scores."""
    newest_rows: int
    """Number of decode rows, without the rows that verify draft tokens."""

    @classmethod
    def of(cls, batch: StepBatch) -> "ComputedStep":
        rows = [
            row._replace(draw=row.draw and replace(row.draw, history=None), page_ids=tuple(row.page_ids), scores=None)
            for row in batch.rows
        ]
        return cls(rows, len(batch.tokens.newest))


class FakeEngine:
    """A fake engine whose steps tests can hold and fail.

    `asynchronous` applies to engines created afterwards. `hold` stops the engine before its next step, or after `after`
    more steps, even if it is already held; `resume` lets it continue. `error` is raised by every step from then on,
    `launch_error` by every launch. `windows` and `step_tokens` are those of `KvPages`, for engines created afterwards;
    the KV of a token is the same in each group of layers.
    """

    asynchronous = False
    windows: tuple[int | None, ...] = (None,)
    step_tokens = 16
    draft_proposer: MakeProposer | None = None

    def __init__(self, pages: int = 64, facts: ModelFacts = FACTS) -> None:
        self.facts = replace(facts, kv_windows=self.windows, kv_step_tokens=self.step_tokens)
        self.adapters = AdapterSlots()
        self.page_tokens = PAGE_TOKENS
        self.kv_pages = KvPages(PAGE_TOKENS, self.windows, self.step_tokens)
        self.pool = PagePool(pages)
        self.memory = np.zeros((pages, PAGE_TOKENS, 2), dtype="<i4")
        self.layout = KVLayout(self.memory.ctypes.data, pages, 1, 1, PAGE_TOKENS, (1, 1), 4, "int32")
        view = torch.from_numpy(self.memory).view(-1, 1, 1, 1, PAGE_TOKENS, 2)
        states = StateCache(None, view.view(-1, 1, 1, PAGE_TOKENS, 2))
        self._views = tuple(states if window == STATE else view for window in self.windows)
        self.page_sums = page_checksums(*self._views)
        self.cost_guess = UNMEASURED
        self.roofline = Roofline(ModelSizes(1000, 4000, 8, 4), Ceilings(1e9, 1e9, 1e-4))
        self.batches: list[ComputedStep] = []
        self.waiting = threading.Event()
        """Set while a step is held."""
        self.error: Exception | None = None
        self.launch_error: Exception | None = None
        self._hold_at = 0
        self._written: list[tuple[int, list[int]]] = []
        """The state pages that the newest step wrote, with the states, by row and group."""
        self.drawn: Sequence[int | None] = []
        """The tokens that the rows of the newest step sampled."""
        self._go = threading.Event()
        self._go.set()

    def page_copies(self) -> PageCopies:
        storage = torch.from_numpy(self.memory).view(len(self.memory), -1)
        return PageCopies(storage, page_checksums(*self._views), PAGE_TOKENS)

    def hold(self, *, after: int = 0) -> None:
        self._hold_at = len(self.batches) + after
        self._go.clear()

    def resume(self) -> None:
        self._go.set()

    def begin_answer(self, history: History, grammar: str) -> None:
        small_grammars().begin(grammar).allowed(history.answer)

    def allowed_drafts(self, history: History, grammar: str, drafts: Sequence[int]) -> int:
        return small_grammars().begin(grammar).count_allowed(history.answer, drafts)

    def compatibility_facts(self) -> tuple[tuple[str, str], ...]:
        return (("model", "fake"),)

    def launch(self, batch: StepBatch) -> PendingStep:
        """Launch a step. An asynchronous step runs when its result is requested, after the next one is planned.

        One with grammars runs in `draw`, before the next one is planned.
        """
        if self.launch_error is not None:
            raise self.launch_error
        masked = any(draw.index < draw.sampling.masked_tokens for draw in batch.draws)
        assert batch.draws.masked == masked, "draws may end an answer before its least length, or may not behind it"
        if not self.asynchronous:
            result = self.run(batch)
            return PendingStep(lambda: result)

        def run() -> ModelRunnerOutput:
            rows = [
                row if row.source is None else row._replace(token_ids=[self._drew(row.source)]) for row in batch.rows
            ]
            return self.run(batch if batch.verifies else StepBatch(rows))

        if not batch.draws.constrained:
            return PendingStep(run)
        sampled: list[ModelRunnerOutput] = []
        return PendingStep(lambda: sampled[0], lambda: sampled.append(run()))

    def _drew(self, source: int) -> int:
        token = self.drawn[source]
        assert token is not None
        return token

    def run(self, batch: StepBatch) -> ModelRunnerOutput:
        deadline_s = time.monotonic() + 120
        while len(self.batches) >= self._hold_at and not self._go.is_set():
            self.waiting.set()
            self._go.wait(0.01)
            assert time.monotonic() < deadline_s
        self.waiting.clear()
        if self.error is not None:
            raise self.error
        self.batches.append(ComputedStep.of(batch))
        self._written.clear()
        self.drawn = token_ids = [self._row(row) for row in batch.rows]
        if batch.verifies and STATE in self.windows:
            self._roll_back(batch, [token for token in token_ids if token is not None])
        for row in batch.chunks:
            if row.scores is not None:
                _score_row(row, row.scores)
        return ModelRunnerOutput(token_ids, fake_logprobs(batch, token_ids))

    def _roll_back(self, batch: StepBatch, drawn: Sequence[int]) -> None:
        """Leave in each state page the state after the newest accepted token in it, and none after rejected ones."""
        groups, slots = self.windows.count(STATE), batch.tokens.columns.slot_indices.tolist()
        for request, count in enumerate(accepted_in(batch.tokens, drawn)):
            rows = [row for row, slot in enumerate(slots) if slot == slots[request]]
            written = [self._written[row * groups : (row + 1) * groups] for row in rows]
            pages = {page for page, _ in chain.from_iterable(written)}
            assert len(pages) == groups, "the draft tokens of a request are in several pages"
            for page, _ in chain.from_iterable(written[count + 1 :]):
                self.memory[page, 0] = 0
            for page, state in chain.from_iterable(written[: count + 1]):
                self.memory[page, 0] = state

    def _row(self, row: StepRow) -> int | None:
        known = self.pool.readers()
        end = row.start + len(row.token_ids)
        context: list[int] = []
        for group, window in enumerate(self.windows):
            pages = row.page_ids[group :: len(self.windows)]
            if window == STATE:
                if row.start:
                    read = self.memory[pages[(row.start - 1) // PAGE_TOKENS], 0].tolist()
                    assert read == state_after(context[: row.start]), "a group has the state after other tokens"
                written = pages[(end - 1) // PAGE_TOKENS]
                assert written not in known, "a step writes a state that others may read"
                self.memory[written, 0] = state = state_after(context)
                self._written.append((written, state))
                continue
            for position, token in enumerate(row.token_ids, row.start):
                assert pages[position // PAGE_TOKENS] not in known, "a step writes to a page that others may read"
                self.memory[pages[position // PAGE_TOKENS], position % PAGE_TOKENS, 0] = token
            first = 0 if window is None else max(0, row.start - window + 1)
            seen = [int(self.memory[pages[p // PAGE_TOKENS], p % PAGE_TOKENS, 0]) for p in range(first, end)]
            assert not context or context[-len(seen) :] == seen, "a group has the KV of other tokens"
            context = context or seen
        if row.draw is None:
            return None
        history = row.draw.history
        assert (history is not None) == row.draw.sampling.needs_history
        answer = [] if history is None else context[len(history.prompt) :]
        if history is not None and row.source is not None:
            # When a step with a grammar is sampled, the history has the token that was in flight at the step's launch.
            answer = list(history.answer)
        try:
            barred = _barred(row.draw.sampling, row.draw.index, answer)
        except InvalidArgument as error:  # as when an answer has ended in the step before
            assert history is not None
            history.failure, barred = error, frozenset(range(VOCAB)) - {EOS}
        if history is None:
            return next_token(context, row.draw.index, barred=barred)
        known = [*history.prompt, *history.answer]
        assert context[: len(known)] == known, "the history is that of another request"
        assert len(context) == len(known) or not row.draw.sampling.penalized, "the penalties depend on drafts"
        counted = len(history.prompt) if row.draw.sampling.penalized else 0
        return next_token(context, row.draw.index, counted, barred=barred)


def state_after(context: list[int]) -> list[int]:
    """Return the state of a state layer after these tokens: their number, and a hash of them."""
    return [len(context), zlib.crc32(repr(context).encode()) >> 1]


def next_token(context: list[int], draw: int, prompt_tokens: int = 0, *, barred: Set[int] = frozenset()) -> int:
    """Return the token after `context`, a hash of the arguments.

    `prompt_tokens` is the prompt's length if there are penalties, else 0.

    EOS is returned only if all other tokens are barred, as at the end of a grammar; otherwise tests end an answer by
    `stop_token_ids`.
    """
    if len(barred) >= VOCAB - 3 and barred >= frozenset(range(3, VOCAB)):
        return EOS
    digest = hashlib.sha256(repr((context, draw, prompt_tokens)).encode()).digest()
    token = int.from_bytes(digest[:4], "little") % (VOCAB - 3)
    while token + 3 in barred:
        token = (token + 1) % (VOCAB - 3)
    return token + 3


def _barred(sampling: SamplingParams, draw: int, answer: Sequence[int]) -> Set[int]:
    """Return the token ids that may not be sampled after `answer`; in a grammar that may end, all tokens except EOS."""
    if sampling.grammar:
        bits = small_grammars().begin(sampling.grammar).allowed(answer).view(np.uint8)
        allowed = set(np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist())
        return frozenset(range(VOCAB)) - ({EOS} if EOS in allowed else allowed)
    forbidden = {token_id for token_id, bias in sampling.logit_bias if bias == -LOGIT_BIAS_MAX}
    return frozenset(forbidden.union(sampling.stop_token_ids if draw < sampling.min_tokens else ()))


@cache
def small_grammars() -> Grammars:
    """Return the grammars over the tokens of `tests/small_tokenizer.py`."""
    with TemporaryDirectory() as folder:
        save_tokenizer(Path(folder))
        return Grammars(Path(folder), VOCAB, [EOS])


def answer_to(prompt: list[int], sampling: SamplingParams) -> list[int]:
    """Return the tokens that the fake engine must generate, independently of chunks and workers."""
    tokens = list(prompt)
    for draw in range(min(sampling.max_tokens, FACTS.max_context - len(prompt))):
        counted = len(prompt) if sampling.penalized else 0
        tokens.append(next_token(tokens, draw, counted, barred=_barred(sampling, draw, tokens[len(prompt) :])))
        if tokens[-1] == EOS:
            break
        if tokens[-1] in sampling.stop_token_ids and draw >= sampling.min_tokens:
            break
    return tokens[len(prompt) :]


def whole_text(key: Hashable) -> Sequence[int]:
    """Return the prompt and the answer of a decode worker's request, for oracles that propose draft tokens."""
    assert isinstance(key, DecodeRequest)
    return _whole_text(tuple(key.reservation.original_prompt), key.reservation.sampling)


@cache
def _whole_text(prompt: tuple[int, ...], sampling: SamplingParams) -> Sequence[int]:
    return [*prompt, *answer_to(list(prompt), sampling)]


def logprobs_of(token_id: int, top: int) -> TokenLogprobs:
    """Return the log probabilities that the fake engine reports for a token that it sampled."""
    return TokenLogprobs(-token_id / VOCAB, tuple(range(token_id, token_id + top)), (-0.5,) * top)


def _score_row(row: StepRow, scores: PromptScores) -> None:
    assert len(scores.chosen) == row.start, "the prompt's tokens are not scored one after the other"
    logprobs = [logprobs_of(token, scores.top_count) for token in scores.next_tokens(row.start, len(row.token_ids))]
    values = torch.tensor([(logprob.chosen, *logprob.top) for logprob in logprobs], dtype=torch.float64).reshape(
        -1, 1 + scores.top_count
    )
    scores.take(values, torch.tensor([logprob.top_ids for logprob in logprobs]).reshape(-1, scores.top_count))


def fake_logprobs(batch: StepBatch, token_ids: Sequence[int | None]) -> list[TokenLogprobs | None]:
    asked = [None if row.draw is None else row.draw.sampling.logprobs for row in batch.rows]
    if all(top is None for top in asked):
        return []
    return [
        None if top is None or token_id is None else logprobs_of(token_id, top)
        for top, token_id in zip(asked, token_ids, strict=True)
    ]
