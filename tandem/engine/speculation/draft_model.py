"""A draft model: a small complete model with the target's vocabulary that predicts the next tokens (arXiv 2211.17192).

It is a second `ModelRunner`, with its own weights, KV pages and steps. Its KV of a request is computed on the worker
that decodes the request, and is not handed over. After verification, the KV of the accepted draft tokens stays valid,
and the KV of the others is overwritten, so the length of the valid KV follows from comparing the output with the last
draft.
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
"""The sampling input of a row whose next token is known already; the sampled token is ignored."""


class DraftRunner(Protocol):
    """The interface of a draft model's runner, as the proposer uses it; `ModelRunner` implements it."""

    @property
    def pool(self) -> PagePool:
        """The page pool of the draft model's KV."""

    @property
    def kv_pages(self) -> KvPages:
        """The layout of the KV pages of a request."""

    @property
    def facts(self) -> ModelFacts:
        """The properties of the draft model, among them its maximum context length."""

    @property
    def cost_guess(self) -> CostParameters:
        """The predicted cost of steps, which is used until steps have been measured."""

    def run(self, batch: StepBatch) -> ModelRunnerOutput:
        """Run a step: store the KV of every row, and sample a token for each row with a sampling input."""


@dataclass(slots=True, eq=False)
class _Request:
    """The tokens of a request, and the number of positions whose KV the draft model has stored."""

    owner: RequestRef
    tokens: list[int]
    """The tokens of the prompt and of the output."""
    pages: list[int] = field(default_factory=list)
    """The pages of all positions in the order of `KvPages`; pages outside the sliding window are kept, too."""
    stored: int = 0
    """The number of leading tokens whose KV is stored, counted over `tokens` followed by `drafted`."""
    drafted: Sequence[int] = ()
    """The newest draft, until its tokens have been verified."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append verified tokens.

        Stored KV of `drafted` stays valid up to the first draft token that differs from the verified tokens.
        """
        right = 0
        for drafted, token in zip(self.drafted, token_ids, strict=False):
            if drafted != token:
                break
            right += 1
        self.stored = min(self.stored, len(self.tokens) + right)
        self.tokens += token_ids
        self.drafted = ()


class DraftModel(BatchProposer):
    """A proposer that samples draft tokens from a draft model, with the same random numbers as the target.

    The draft model samples each token with the random number that the target will use for it, so two equal models
    sample equal tokens. The proposer owns the KV pages of its requests, but not the runner. Only one thread uses it.
    """

    source = DraftSource(ProposerName.DRAFT_MODEL)

    def __init__(
        self,
        runner: DraftRunner,
        memory: Mapping[str, int] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Create a proposer that runs the draft model with `runner`; `clock` returns seconds.

        `memory` is the memory in bytes of the `weights` and of the `kv` pages, as in `BatchProposer.memory`.
        """
        self._runner = runner
        self.memory = memory or {}
        self.max_step_tokens = runner.kv_pages.step_tokens
        self._clock = clock
        self._fit = StepFit(runner.cost_guess)
        self._requests: dict[Hashable, _Request] = {}
        self._numbers = count()

    @property
    def cost(self) -> StepCost:
        """The cost model of the draft model's steps, fitted to the steps so far."""
        return StepCost(self._fit.parameters)

    def begin(self, key: Hashable, token_ids: Sequence[int], cache_salt: str = "") -> None:
        """Add a request, as `Proposer.begin` describes; nothing is computed yet."""
        if key in self._requests:
            raise ValueError(f"{key} is known already")
        self._requests[key] = _Request(RequestRef(f"draft {next(self._numbers)}", 1), list(token_ids))

    def extend(self, key: Hashable, token_ids: Sequence[int]) -> None:
        """Append tokens to a request, as `Proposer.extend` describes."""
        self._requests[key].extend(token_ids)

    def leave(self, key: Hashable) -> None:
        """Remove a request and free its pages."""
        self._runner.pool.free(self._requests.pop(key).owner)

    def missing(self, key: Hashable) -> int:
        """Return the number of the request's tokens whose KV is not stored, including the newest token."""
        request = self._requests[key]
        return len(request.tokens) - min(request.stored, len(request.tokens) - 1)

    def capacity(self, key: Hashable, drafts: int) -> int:
        """Return how many of `drafts` draft tokens have KV pages.

        Missing pages are allocated, as far as the pool has free pages.
        """
        request, kv, pool = self._requests[key], self._runner.kv_pages, self._runner.pool
        # The last draft token is sampled but not fed to the model, so it takes no position.
        fed = len(request.tokens) - 1
        drafts = min(drafts, self._runner.facts.max_context - fed)
        more = kv.numbers(fed + drafts) * kv.groups - len(request.pages)
        if drafts > 0 and more > 0:
            whole = min(more, pool.unreserved) // kv.groups * kv.groups
            # Pages for only a part of the context would be useless: without KV of the whole context nothing can be
            # proposed.
            if whole and kv.tokens_of(request.pages) + whole // kv.groups * kv.page_tokens > fed:
                request.pages += pool.allocate(request.owner, whole)
        return max(0, min(drafts, kv.tokens_of(request.pages) - fed))

    def store_context(self, pieces: Mapping[Hashable, int]) -> None:
        """Compute and store, in one step, the KV of the given number of missing tokens of each request."""
        rows, pairs = [], 0.0
        for key, tokens in pieces.items():
            request = self._requests[key]
            start = request.stored
            rows.append(StepRow(request.tokens[start : start + tokens], start, request.pages, None))
            pairs += chunk_pairs(tokens, start)
            request.stored += tokens
        self._run(rows, StepWork(sum(pieces.values()), pairs))

    def compute(self, wanted: Sequence[WantedDraft]) -> Sequence[Sequence[int]]:
        """Return the draft tokens of each request in `wanted`.

        One step of the draft model samples the first token of all drafts, the next step the second, and so on. Each
        token is a separate row, as in steps that verify draft tokens.
        """
        draws = {draft.key: self._own_draws(draft.draws) for draft in wanted}
        drafts: dict[Hashable, list[int]] = {key: [] for key in draws}
        fed = {}
        for key in draws:
            tokens = self._requests[key].tokens
            start = len(tokens) - self.missing(key)
            fed[key] = list(enumerate(tokens[start:], start))
        while fed:
            for key, token in self._draw(fed, {key: draws[key][len(drafts[key])] for key in fed}).items():
                drafts[key].append(token)
                if (history := draws[key][0].history) is not None:
                    cast("list[int]", history.answer).append(token)
            fed = {
                key: [(len(self._requests[key].tokens) + len(drafts[key]) - 1, drafts[key][-1])]
                for key in fed
                if len(drafts[key]) < len(draws[key])
            }
        for key, tokens in drafts.items():
            request = self._requests[key]
            request.stored, request.drafted = len(request.tokens) + len(tokens) - 1, tokens
        return list(drafts.values())

    def _own_draws(self, draws: Sequence[SamplingInput]) -> Sequence[SamplingInput]:
        """Return a request's sampling inputs with a copy of their history, if any, which draft tokens will extend."""
        history = draws[0].history
        if history is None:
            return draws
        # `may_wait` lets the mask be late: a draft token may be any token, because it is verified.
        own = History(history.prompt, [*history.answer], may_wait=True)
        return [replace(sampling_input, history=own) for sampling_input in draws]

    def _draw(
        self, fed: Mapping[Hashable, Sequence[tuple[int, int]]], draws: Mapping[Hashable, SamplingInput]
    ) -> dict[Hashable, int]:
        """Run the draft model on the (position, token) pairs `fed` of each request.

        Returns the token sampled after the last pair of each request.
        """
        rows, last = [], {}
        for key, tokens in fed.items():
            pages = self._requests[key].pages
            rows += [StepRow([token], position, pages, _UNUSED) for position, token in tokens[:-1]]
            rows += [StepRow([token], position, pages, draws[key]) for position, token in tokens[-1:]]
            last[key] = len(rows) - 1
        context = sum(row.start + 1 for row in rows)
        drawn = self._run(rows, StepWork(decode_rows=len(rows), decode_context_tokens=context)).token_ids
        # If the draft model samples no token (NO_TOKEN), token 0 stands in: any token is allowed, because it is
        # verified.
        return {key: max(0, cast("int", drawn[row])) for key, row in last.items()}

    def _run(self, rows: Sequence[StepRow], work: StepWork) -> ModelRunnerOutput:
        """Run a step, and update the fit of the cost model with its duration."""
        began = self._clock()
        result = self._runner.run(StepBatch(rows))
        self._fit.observe(work, self._clock() - began)
        return result
