"""CUDA graphs of the decode step: one for each size of batch, replayed without the host touching a kernel."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from engine.cuda.sampler_cuda import PARAMS, DeviceSampler
from engine.cuda.step_graph import Pool, StepGraph, capture_step, empty_step
from engine.host_stepper import Forward
from engine.kernels.base import Feed
from engine.steps.batch import StepBatch
from engine.steps.step_buffer import StepSizes
from engine.steps.step_packer import StepPacker
from engine.weights.checkpoint import Progress

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_BEYOND = 64
"""Step between sizes after the last of them."""


class DecodeGraphs:
    """All sizes share one memory pool, their logits included, because one graph runs at a time and whoever reads a
    step's logits, the sampler, is launched on the same stream after its replay and before the next one: no graph keeps
    what another may overwrite. At 256 rows of a vocabulary of 128 k, logits of each size's own would take gigabytes.
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

        def run(rows: int) -> Tensor:
            return self._step(rows)[1]()

        return {f"the step of {rows} rows": partial(run, rows) for rows in sizes}

    def capture(self, sizes: Sequence[int], progress: Progress | None = None) -> None:
        """Capture the steps of these numbers of rows, the largest first, so that the others fit into its memory."""
        for done, rows in enumerate(sorted(sizes, reverse=True)):
            self._graphs.append(self._capture(rows))
            if progress is not None:
                progress("capturing CUDA graphs", (done + 1) / len(sizes))
        self._graphs.reverse()

    def fitting(self, batch: StepBatch) -> StepGraph | None:
        """The smallest graph that computes `batch`, or None: more rows than any, or rows that do not just decode."""
        if batch.chunks:
            return None
        return next((graph for graph in self._graphs if graph.sizes.rows >= len(batch)), None)

    def _step(self, rows: int) -> tuple[Tensor, Callable[[], Tensor], StepSizes]:
        """A step of padded rows: the words it reads, the launch of all its kernels → logits, and its sizes."""
        limits = self._packer.limits
        sizes = StepSizes(tokens=rows, rows=rows, width=limits.pages_of(limits.max_context), drawn=rows)
        words, step = empty_step(
            self._packer, sizes, self._drawn.device, singles=rows, max_row_tokens=1, context=limits.max_context
        )
        unread = torch.zeros(rows, PARAMS, dtype=torch.float64, device=words.device)

        def compute() -> Tensor:
            logits = self._forward(step, Feed(step.sources, self._drawn))
            assert logits is not None
            self._sampler.sample(logits, unread, self._drawn[:rows], greedy_only=True)
            return logits

        return words, compute, sizes

    def _capture(self, rows: int) -> StepGraph:
        words, compute, sizes = self._step(rows)
        return capture_step(compute, words, sizes, pool=self._pool)


def graph_sizes(max_rows: int) -> list[int]:
    """Numbers of rows worth a graph of their own, up to `max_rows`, which is the last."""
    beyond = range(_SIZES[-1] + _BEYOND, max_rows, _BEYOND)
    return [*(size for size in (*_SIZES, *beyond) if size < max_rows), max_rows]
