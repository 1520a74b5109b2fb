"""A small complete model with the target's vocabulary, which guesses the tokens that follow (arXiv 2211.17192).

It has weights, KV pages and steps of its own: a second `ModelRunner`. Its KV of a request is computed where the request
decodes; nothing of it is handed over. The tokens of the answer whose KV is stored follow from those that were drafted:
of a draft, the KV of the accepted tokens stays, and that of the others is overwritten.
"""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Protocol, cast

from tandem.cost_model.step_cost import CostParameters, StepCost
from tandem.cost_model.step_fit import StepFit
from tandem.cost_model.step_work import StepWork, chunk_pairs
from tandem.engine.cache.page_pool import PagePool
from tandem.engine.speculation.proposer import BatchProposer, DraftSource, ProposerName, WantedDraft
from tandem.engine.steps.batch import ModelRunnerOutput, StepBatch, StepRow
from tandem.engine.steps.sampling_metadata import History, SamplingInput
from tandem.protocol.kv_pages import KvPages
from tandem.protocol.messages import ModelFacts, RequestRef, SamplingParams

_UNUSED = SamplingInput(SamplingParams(max_tokens=1), 0)
"""The draw of a row behind which the token is known."""


class DraftRunner(Protocol):
    """The part of a `ModelRunner` that drafts need."""

    @property
    def pool(self) -> PagePool:
        """The pages of the model's KV."""

    @property
    def kv_pages(self) -> KvPages:
        """The KV pages that requests hold."""

    @property
    def facts(self) -> ModelFacts:
        """The facts of the model."""

    @property
    def cost_guess(self) -> CostParameters:
        """The predicted cost of steps, before one was measured."""

    def run(self, batch: StepBatch) -> ModelRunnerOutput:
        """Store the KV of every row and draw where a draw is asked for."""


@dataclass(slots=True, eq=False)
class _Request:
    """The tokens of a request, and how far their KV is stored."""

    owner: RequestRef
    tokens: list[int]
    """Prompt and answer."""
    pages: list[int] = field(default_factory=list)
    """The pages of all positions as `KvPages` lists them: those behind a window stay as well."""
    stored: int = 0
    """The number of first positions whose KV is that of `tokens` and, behind them, of `drafted`."""
    drafted: Sequence[int] = ()
    """The newest draft, until tokens join the answer."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens; the KV of drafts that they differ from is stored no longer."""
        right = 0
        for drafted, token in zip(self.drafted, token_ids, strict=False):
            if drafted != token:
                break
            right += 1
        self.stored = min(self.stored, len(self.tokens) + right)
        self.tokens += token_ids
        self.drafted = ()


class DraftModel(BatchProposer):
    """Proposes what the model draws with the number that the target will draw with: equal models draw equal tokens.

    Owns the pages of its requests; the runner is used, not owned.
    """

    source = DraftSource(ProposerName.DRAFT_MODEL)

    def __init__(
        self,
        runner: DraftRunner,
        memory: Mapping[str, int] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`memory`: see `BatchProposer`; `clock` returns seconds."""
        self._runner = runner
        self.memory = memory or {}
        self.max_step_tokens = runner.kv_pages.step_tokens
        self._clock = clock
        self._fit = StepFit(runner.cost_guess)
        self._requests: dict[Hashable, _Request] = {}
        self._numbers = count()

    @property
    def cost(self) -> StepCost:
        """See `BatchProposer`."""
        return StepCost(self._fit.parameters)

    def begin(self, key: Hashable, token_ids: Sequence[int], cache_salt: str = "") -> None:
        """See `Proposer`; nothing is computed yet."""
        if key in self._requests:
            raise ValueError(f"{key} is known already")
        self._requests[key] = _Request(RequestRef(f"draft {next(self._numbers)}", 1), list(token_ids))

    def extend(self, key: Hashable, token_ids: Sequence[int]) -> None:
        """See `Proposer`."""
        self._requests[key].extend(token_ids)

    def leave(self, key: Hashable) -> None:
        """See `Proposer`; the pages are free."""
        self._runner.pool.free(self._requests.pop(key).owner)

    def missing(self, key: Hashable) -> int:
        """See `BatchProposer`."""
        request = self._requests[key]
        return len(request.tokens) - min(request.stored, len(request.tokens) - 1)

    def room(self, key: Hashable, drafts: int) -> int:
        """See `BatchProposer`; pages that are missing are taken from the pool while it has some."""
        request, kv, pool = self._requests[key], self._runner.kv_pages, self._runner.pool
        # The last draft is drawn and not fed: it takes no position.
        fed = len(request.tokens) - 1
        drafts = min(drafts, self._runner.facts.max_context - fed)
        more = kv.numbers(fed + drafts) * kv.groups - len(request.pages)
        if drafts > 0 and more > 0:
            whole = min(more, pool.unreserved) // kv.groups * kv.groups
            # A part of the context is of no use.
            if whole and kv.tokens_of(request.pages) + whole // kv.groups * kv.page_tokens > fed:
                request.pages += pool.allocate(request.owner, whole)
        return max(0, min(drafts, kv.tokens_of(request.pages) - fed))

    def store_context(self, pieces: Mapping[Hashable, int]) -> None:
        """See `BatchProposer`."""
        rows, pairs = [], 0.0
        for key, tokens in pieces.items():
            request = self._requests[key]
            start = request.stored
            rows.append(StepRow(request.tokens[start : start + tokens], start, request.pages, None))
            pairs += chunk_pairs(tokens, start)
            request.stored += tokens
        self._run(rows, StepWork(sum(pieces.values()), pairs))

    def compute(self, wanted: Sequence[WantedDraft]) -> Sequence[Sequence[int]]:
        """See `BatchProposer`: one step for the first draft of all requests, one for the second of those that have one.

        Tokens are rows of their own, as drafts are when they are verified.
        """
        draws = {each.key: self._own_draws(each.draws) for each in wanted}
        found: dict[Hashable, list[int]] = {key: [] for key in draws}
        fed = {}
        for key in draws:
            tokens = self._requests[key].tokens
            start = len(tokens) - self.missing(key)
            fed[key] = list(enumerate(tokens[start:], start))
        while fed:
            for key, token in self._draw(fed, {key: draws[key][len(found[key])] for key in fed}).items():
                found[key].append(token)
                if (history := draws[key][0].history) is not None:
                    cast("list[int]", history.answer).append(token)
            fed = {
                key: [(len(self._requests[key].tokens) + len(found[key]) - 1, found[key][-1])]
                for key in fed
                if len(found[key]) < len(draws[key])
            }
        for key, tokens in found.items():
            request = self._requests[key]
            request.stored, request.drafted = len(request.tokens) + len(tokens) - 1, tokens
        return list(found.values())

    def _own_draws(self, draws: Sequence[SamplingInput]) -> Sequence[SamplingInput]:
        """Return a request's draws with a history of their own, if they have one, which drafts are appended to."""
        history = draws[0].history
        if history is None:
            return draws
        own = History(history.prompt, [*history.answer], may_wait=True)  # a draft may be any token
        return [replace(each, history=own) for each in draws]

    def _draw(
        self, fed: Mapping[Hashable, Sequence[tuple[int, int]]], draws: Mapping[Hashable, SamplingInput]
    ) -> dict[Hashable, int]:
        """Feed tokens behind their positions; returns what is drawn behind the last token of each request."""
        rows, last = [], {}
        for key, tokens in fed.items():
            pages = self._requests[key].pages
            rows += [StepRow([token], position, pages, _UNUSED) for position, token in tokens[:-1]]
            rows += [StepRow([token], position, pages, draws[key]) for position, token in tokens[-1:]]
            last[key] = len(rows) - 1
        context = sum(row.start + 1 for row in rows)
        drawn = self._run(rows, StepWork(decode_rows=len(rows), decode_context_tokens=context)).token_ids
        # Where the draft model has no token, any does: it is verified.
        return {key: max(0, cast("int", drawn[row])) for key, row in last.items()}

    def _run(self, rows: Sequence[StepRow], work: StepWork) -> ModelRunnerOutput:
        """Run a step and learn from the time that it takes."""
        began = self._clock()
        result = self._runner.run(StepBatch(rows))
        self._fit.observe(work, self._clock() - began)
        return result
