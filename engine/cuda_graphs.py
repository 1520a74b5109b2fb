"""CUDA graphs of the decode step: one for each size of batch, replayed without the host touching a kernel."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from engine.batch import StepBatch
from engine.host_stepper import Forward
from engine.kernels.base import Feed
from engine.sampler_cuda import PARAMS, DeviceSampler
from engine.step_graph import Pool, StepGraph, capture_step, empty_step
from engine.step_packer import StepPacker
from engine.step_sections import StepSizes
from engine.weights.checkpoint import Progress

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_BEYOND = 64
"""Step between sizes after the last of them."""
SHORT_CONTEXT = 8192
"""Tokens up to which no row of a step is long."""


class DecodeGraphs:
    """All sizes share one memory pool, their logits included, because one graph runs at a time and whoever reads a
    step's logits, the sampler, is launched on the same stream after its replay and before the next one: no graph keeps
    what another may overwrite. At 256 rows of a vocabulary of 128 k, logits of each size's own would take gigabytes.

    Where contexts may be long, each number of rows has two graphs: one launches what long rows need to keep up with
    short ones, which costs short ones dearly.
    """

    def __init__(self, packer: StepPacker, forward: Forward, sampler: DeviceSampler, drawn: Tensor, pool: Pool) -> None:
        """`drawn` [rows] int64: where each step leaves its greedy tokens, and the step after finds them; `pool`: of
        memory that all graphs share.
        """
        self._packer = packer
        self._forward = forward
        self._sampler = sampler
        self._drawn = drawn
        self._graphs: list[StepGraph] = []
        self._pool = pool

    def trials(self, sizes: Sequence[int]) -> dict[str, Callable[[], Tensor]]:
        """Runs of the steps of these numbers of rows, for `run_side_by_side`."""

        def run(rows: int, context: int) -> Tensor:
            return self._step(rows, context)[1]()

        return {
            f"the step of {rows} rows and {context} tokens": partial(run, rows, context)
            for rows in sizes
            for context in graph_contexts(self._packer.limits.max_context)
        }

    def capture(self, sizes: Sequence[int], progress: Progress | None = None) -> None:
        """Capture the steps of these numbers of rows, the largest first, so that the others fit into its memory."""
        contexts = graph_contexts(self._packer.limits.max_context)
        wanted = [(rows, context) for rows in sorted(sizes, reverse=True) for context in contexts]
        for done, (rows, context) in enumerate(wanted):
            self._graphs.append(self._capture(rows, context))
            if progress is not None:
                progress("capturing CUDA graphs", (done + 1) / len(wanted))
        self._graphs.reverse()

    def fitting(self, batch: StepBatch) -> StepGraph | None:
        """The smallest graph that computes `batch`, or None: more rows than any, or rows that do not just decode."""
        if batch.chunks:
            return None
        rows, context = len(batch), batch.tokens.columns.longest
        fits = (g for g in self._graphs if g.sizes.rows >= rows and g.context >= context)
        return next(fits, None)

    def _step(self, rows: int, context: int) -> tuple[Tensor, Callable[[], Tensor], StepSizes]:
        """A step of padded rows: the words it reads, the launch of all its kernels → logits, and its sizes."""
        sizes = StepSizes(tokens=rows, rows=rows, width=self._packer.limits.pages_of(context), drawn=rows)
        words, step = empty_step(
            self._packer, sizes, self._drawn.device, singles=rows, max_row_tokens=1, context=context
        )
        unread = torch.zeros(rows, PARAMS, dtype=torch.float64, device=words.device)

        def compute() -> Tensor:
            logits = self._forward(step, Feed(step.sources, self._drawn))
            assert logits is not None
            self._sampler.sample(logits, unread, self._drawn[:rows], greedy_only=True)
            return logits

        return words, compute, sizes

    def _capture(self, rows: int, context: int) -> StepGraph:
        words, compute, sizes = self._step(rows, context)
        return capture_step(compute, words, sizes, context=context, pool=self._pool)


def graph_contexts(max_context: int) -> list[int]:
    """Tokens up to which each of a size's graphs goes, the longest first."""
    return sorted({max_context, min(max_context, SHORT_CONTEXT)}, reverse=True)


def graph_sizes(max_rows: int) -> list[int]:
    """Numbers of rows worth a graph of their own, up to `max_rows`, which is the last."""
    beyond = range(_SIZES[-1] + _BEYOND, max_rows, _BEYOND)
    return [*(size for size in (*_SIZES, *beyond) if size < max_rows), max_rows]
