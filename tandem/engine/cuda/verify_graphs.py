"""CUDA graphs of steps that verify draft tokens, by the number of rows and of requests.

Attention computes the rows of a request together, as a group (`tandem.engine.kernels.base.DraftGroups`); the table of
groups follows the step's words. State layers compute the rows of a request one after the other, and a second graph
writes their states once the accepted draft tokens are known. A step uses the graph with the fewest rows that has space
for its requests and rows, no matter how the draft tokens are distributed over the requests. Where attention does not
support groups and there are no state layers, decode graphs compute these steps.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tandem.engine.cuda.cuda_graphs import graph_sizes
from tandem.engine.cuda.sampler_cuda import PARAMS, DeviceSampler
from tandem.engine.cuda.step_graph import Pool, StepGraph, capture_step, empty_step
from tandem.engine.host_stepper import Forward
from tandem.engine.kernels.base import DeferredTokens, DraftGroups, Kernels
from tandem.engine.steps.batch import StepBatch, TokenRows
from tandem.engine.steps.draft_groups import FIELDS, DraftGroupSizes, fill_draft_groups, groups_needed
from tandem.engine.steps.step_buffer import StepSizes
from tandem.engine.steps.step_packer import PackedStep, StepPacker
from tandem.engine.weights.checkpoint import Progress

DRAFTS = (1, 2, 3, 5, 7)
"""The mean numbers of draft tokens per request for which graphs are captured."""
MOST_ROWS = 256
"""Maximum number of rows of a graph: with more rows, verifying draft tokens does not raise the throughput."""


class VerifySize(NamedTuple):
    """The maximum numbers of rows and requests in a step, and the maximum number of rows in a draft group."""

    rows: int
    requests: int
    group_rows: int

    @property
    def groups(self) -> DraftGroupSizes | None:
        """The size of a table that holds the groups of any step of this size; None if attention has no groups."""
        if self.group_rows == 1:
            return None
        return DraftGroupSizes(groups_needed(self.requests, self.rows, self.group_rows), self.group_rows)


class VerifyGraphs:
    """The graphs of all sizes of verification steps; they share the memory of the decode graphs (`DecodeGraphs`)."""

    def __init__(self, packer: StepPacker, forward: Forward, sampler: DeviceSampler, drawn: Tensor, pool: Pool) -> None:
        """Create an empty set of graphs; the arguments are those of `DecodeGraphs`."""
        self._packer = packer
        self._forward = forward
        self._sampler = sampler
        self._drawn = drawn
        self._pool = pool
        self._graphs: dict[VerifySize, StepGraph] = {}

    def trials(self, sizes: Sequence[VerifySize]) -> dict[str, Callable[[], Tensor]]:
        """Return trial runs of verification steps of these sizes, for `run_side_by_side`."""

        def run(size: VerifySize) -> Tensor:
            return self._step(size).compute()

        return {f"the step of {size.rows} rows of {size.requests} requests": partial(run, size) for size in sizes}

    def capture(self, sizes: Sequence[VerifySize], progress: Progress | None = None) -> None:
        """Capture steps of these sizes, the largest first, so that the other graphs reuse its memory."""
        captured = {}
        for done, size in enumerate(sorted(sizes, reverse=True)):
            captured[size] = self._capture(size)
            if progress is not None:
                progress("capturing CUDA graphs of drafts", (done + 1) / len(sizes))
        self._graphs = {size: captured[size] for size in sorted(sizes)}

    @property
    def graphs(self) -> list[StepGraph]:
        """The captured graphs, the smallest first."""
        return list(self._graphs.values())

    def fitting(self, batch: StepBatch) -> StepGraph | None:
        """Return the smallest graph that can compute `batch`.

        Returns None if the batch has no draft tokens, has prompt chunks, or is too large.
        """
        if not batch.verifies or batch.chunks:
            return None
        requests = len(batch.tokens.newest)
        fitting = (size for size in self._graphs if size.rows >= len(batch) and size.requests >= requests)
        size = next(fitting, None)
        return None if size is None else self._graphs[size]

    def _capture(self, size: VerifySize) -> StepGraph:
        step = self._step(size)
        return capture_step(
            step.compute, step.words, step.sizes, pool=self._pool, groups=size.groups, accept=step.accept
        )

    def _step(self, size: VerifySize) -> "_VerifyStep":
        """Return a padded verification step."""
        limits, rows, groups = self._packer.limits, size.rows, size.groups
        sizes = limits.sizes(rows, rows, limits.pages_of(limits.max_context), rows, size.requests)
        words, step = empty_step(
            self._packer,
            sizes,
            self._drawn.device,
            singles=rows,
            max_row_tokens=1,
            context=limits.max_context,
            more_words=0 if groups is None else groups.words,
        )
        if groups is not None:
            step = _grouped(step, groups, words[sizes.words :])
        unread = torch.zeros(rows, PARAMS, dtype=torch.float64, device=words.device)

        def compute() -> Tensor:
            logits = self._forward(step, DeferredTokens(step.sources, self._drawn))
            assert logits is not None
            most = self._sampler.max_rows
            for first in range(0, rows, most):
                some = slice(first, min(first + most, rows))
                self._sampler.sample(logits[some], unread[some], self._drawn[some], greedy_only=True)
            return logits

        accept = partial(self._forward.accept_drafts, step) if sizes.chains else None
        return _VerifyStep(words, compute, sizes, accept)


class _VerifyStep(NamedTuple):
    """A verification step to be captured or run on trial."""

    words: Tensor
    """The input buffer, int64, on the device."""
    compute: Callable[[], Tensor]
    """Runs the step and returns its logits."""
    sizes: StepSizes
    accept: Callable[[Tensor], None] | None
    """The argument of `capture_step`."""


def _grouped(step: PackedStep, groups: DraftGroupSizes, words: Tensor) -> PackedStep:
    """Return the step with the draft groups of attention, whose table is in `words`."""
    # Called once here, so that the loop is compiled before the first step.
    fill_draft_groups(TokenRows.of(()), groups, np.zeros(groups.words, dtype=np.int64))
    entries = groups.groups + 1
    table = words.view(torch.int32)[: FIELDS * entries].view(entries, FIELDS)
    grouped = DraftGroups(table, groups.rows)
    return replace(step, layouts=tuple(replace(layout, draft_groups=grouped) for layout in step.layouts))


def verify_sizes(kernels: Kernels, max_requests: int, max_rows: int, *, states: bool = False) -> list[VerifySize]:
    """Return the sizes that get a graph, in ascending order, for at most `max_requests` requests and `max_rows` rows.

    If attention computes each row separately, decode graphs compute these steps, and the list is empty. In a model with
    `states` they cannot do so; the list then has the sizes for which attention has scratch memory.
    """
    groups = {drafts: kernels.draft_group_rows(drafts) for drafts in DRAFTS}
    sizes = [
        VerifySize(requests * (drafts + 1), requests, group)
        for requests in graph_sizes(max_requests)
        for drafts, group in groups.items()
    ]
    separate = max_requests if states else 0
    return sorted(
        size for size in sizes if size.rows <= min(MOST_ROWS, max_rows, MOST_ROWS if size.group_rows > 1 else separate)
    )


def most_groups(sizes: Iterable[VerifySize]) -> dict[int, int]:
    """Return a map from `group_rows` to the maximum number of draft groups in any of the `sizes` with it."""
    maximum: dict[int, int] = {}
    for size in sizes:
        if size.groups is not None:
            maximum[size.group_rows] = max(maximum.get(size.group_rows, 0), size.groups.groups)
    return maximum
