"""CUDA graphs of decode steps: one for each padded batch size, replayed without launching kernels from the host."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from tandem.engine.cuda.sampler_cuda import PARAMS, DeviceSampler
from tandem.engine.cuda.step_graph import Pool, StepGraph, capture_step, empty_step
from tandem.engine.host_stepper import Forward
from tandem.engine.kernels.base import DeferredTokens
from tandem.engine.steps.batch import StepBatch
from tandem.engine.steps.step_buffer import StepSizes
from tandem.engine.steps.step_packer import StepPacker
from tandem.engine.weights.checkpoint import Progress

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_BEYOND = 64
"""The distance between adjacent batch sizes above the last of `_SIZES`."""


class DecodeGraphs:
    """The decode graphs of all batch sizes.

    All graphs share one memory pool, including the memory of their logits. This is safe because one graph runs at a
    time, and the sampler, which reads a step's logits, is launched on the same stream after the replay and before the
    next one. Separate logits for each size would take gigabytes at 256 rows and a vocabulary of 128 k.
    """

    def __init__(self, packer: StepPacker, forward: Forward, sampler: DeviceSampler, drawn: Tensor, pool: Pool) -> None:
        """Create an empty set of graphs, which will allocate from the memory `pool`.

        Each step writes its sampled tokens to `drawn` [rows] int64, from which the next step reads them.
        """
        self._packer = packer
        self._forward = forward
        self._sampler = sampler
        self._drawn = drawn
        self._graphs: list[StepGraph] = []
        self._pool = pool

    def trials(self, sizes: Sequence[int]) -> dict[str, Callable[[], Tensor]]:
        """Return trial runs of decode steps with these numbers of rows, for `run_side_by_side`."""

        def run(rows: int) -> Tensor:
            return self._step(rows)[1]()

        return {f"the step of {rows} rows": partial(run, rows) for rows in sizes}

    def capture(self, sizes: Sequence[int], progress: Progress | None = None) -> None:
        """Capture decode steps with these numbers of rows, the largest first, so that the others reuse its memory."""
        for done, rows in enumerate(sorted(sizes, reverse=True)):
            self._graphs.append(self._capture(rows))
            if progress is not None:
                progress("capturing CUDA graphs", (done + 1) / len(sizes))
        self._graphs.reverse()

    @property
    def graphs(self) -> list[StepGraph]:
        """The captured graphs, the smallest first."""
        return self._graphs

    def fitting(self, batch: StepBatch) -> StepGraph | None:
        """Return the smallest graph that can compute `batch`.

        Returns None if the batch has too many rows for any graph, or rows that are not decode rows.
        """
        if batch.chunks:
            return None
        return next((graph for graph in self._graphs if graph.sizes.rows >= len(batch)), None)

    def _step(self, rows: int) -> tuple[Tensor, Callable[[], Tensor], StepSizes]:
        """Return an empty decode step of `rows` rows, all of them padding, to be captured or run on trial.

        Returns its input buffer (int64, on the device), a function that runs the step and returns its logits, and its
        sizes.
        """
        limits = self._packer.limits
        sizes = limits.sizes(rows, rows, limits.pages_of(limits.max_context), rows)
        words, step = empty_step(
            self._packer, sizes, self._drawn.device, singles=rows, max_row_tokens=1, context=limits.max_context
        )
        # A placeholder: greedy sampling without penalties reads no sampling parameters.
        unread = torch.zeros(rows, PARAMS, dtype=torch.float64, device=words.device)

        def compute() -> Tensor:
            logits = self._forward(step, DeferredTokens(step.sources, self._drawn))
            assert logits is not None
            # The graph also samples the most likely tokens, so a step of greedy rows needs no further sampling.
            self._sampler.sample(logits, unread, self._drawn[:rows], greedy_only=True)
            return logits

        return words, compute, sizes

    def _capture(self, rows: int) -> StepGraph:
        words, compute, sizes = self._step(rows)
        return capture_step(compute, words, sizes, pool=self._pool)


def graph_sizes(max_rows: int) -> list[int]:
    """Return the batch sizes that get a graph, in ascending order; `max_rows` is the last."""
    beyond = range(_SIZES[-1] + _BEYOND, max_rows, _BEYOND)
    return [*(size for size in (*_SIZES, *beyond) if size < max_rows), max_rows]
