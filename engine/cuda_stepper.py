"""Steps on a GPU: launched without waiting, their tokens read while the next step runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.batch import Draw, PendingStep, StepBatch, StepResult, rows_of
from engine.cuda_graphs import DecodeGraphs
from engine.host_stepper import Forward
from engine.kernels.base import Feed
from engine.sampler_cuda import DeviceSampler
from engine.step_packer import StepPacker, unpack

_WORDS_AT_FIRST = 1 << 16


@dataclass(slots=True)
class _HostMemory:
    """Pinned memory of one step in flight."""

    words: Tensor
    drawn: Tensor
    params: Tensor | None = None
    done: torch.cuda.Event = field(default_factory=torch.cuda.Event)

    def reserve(self, words: int) -> Tensor:
        if words > len(self.words):
            self.words = _pinned(2 * words)
        return self.words[:words]


class CudaStepper:
    """At most two steps may be in flight: results are asked for in the order of the launches."""

    asynchronous = True

    def __init__(
        self, packer: StepPacker, forward: Forward, sampler: DeviceSampler, drawn: Tensor, graphs: DecodeGraphs
    ) -> None:
        """`drawn` [rows] int64 is where every step leaves its tokens and the next one finds them."""
        self._packer = packer
        self._forward = forward
        self._sampler = sampler
        self._drawn = drawn
        self.graphs = graphs
        self._memory = [_HostMemory(_pinned(_WORDS_AT_FIRST), _pinned(len(drawn))) for _ in range(2)]
        self._draw_of_row: list[int] = []

    def launch(self, batch: StepBatch) -> PendingStep:
        """See `ModelRunner.launch`."""
        # Triton and graphs go by the thread's current device, and steps have a thread of their own.
        torch.cuda.set_device(self._drawn.device)
        draws = [row.draw for row in batch.rows if row.draw is not None]
        memory = self._memory[0]
        self._memory.reverse()
        memory.done.synchronize()
        logits, greedy_is_drawn = self._compute(batch, memory)
        if logits is not None and not (greedy_is_drawn and _all_greedy(draws)):
            self._draw(logits, draws, memory)
        memory.drawn[: len(draws)].copy_(self._drawn[: len(draws)], non_blocking=True)
        memory.done.record()
        numbers = iter(range(len(draws)))
        self._draw_of_row = [-1 if row.draw is None else next(numbers) for row in batch.rows]

        def result() -> StepResult:
            memory.done.synchronize()
            return rows_of(memory.drawn[: len(draws)].tolist(), batch)

        return result

    def logits(self, batch: StepBatch) -> Tensor | None:
        """Logits [draws, vocab] on the device. Waits for every step before, and no row may have a `source`."""
        torch.cuda.set_device(self._drawn.device)
        torch.cuda.synchronize()
        self._draw_of_row = []
        logits, _ = self._compute(batch, self._memory[0])
        torch.cuda.synchronize()
        return logits

    def _draw(self, logits: Tensor, draws: Sequence[Draw], memory: _HostMemory) -> None:
        plan = self._sampler.plan(draws)
        memory.params = torch.from_numpy(plan.params).pin_memory()
        params = memory.params.to(self._drawn.device, non_blocking=True)
        for first in range(0, len(draws), self._sampler.max_rows):
            some = slice(first, min(first + self._sampler.max_rows, len(draws)))
            self._sampler.sample(logits[some], params[some], self._drawn[some], greedy_only=plan.greedy_only)

    def _compute(self, batch: StepBatch, memory: _HostMemory) -> tuple[Tensor | None, bool]:
        """Logits [at least draws, vocab], and whether the greedy tokens are drawn already."""
        sizes = self._packer.sizes(batch)
        graph = self.graphs.fitting(batch)
        if graph is not None:
            words = memory.reserve(graph.sizes.words)
            self._packer.pack(batch, graph.sizes, words.numpy(), self._draw_of_row)
            return graph.replay(words), True
        words = memory.reserve(sizes.words)
        self._packer.pack(batch, sizes, words.numpy(), self._draw_of_row)
        step = unpack(words.to(self._drawn.device, non_blocking=True), sizes, batch)
        return self._forward(step, Feed(step.sources, self._drawn)), False


def _all_greedy(draws: Sequence[Draw]) -> bool:
    return all(draw.sampling.temperature == 0 for draw in draws)


def _pinned(words: int) -> Tensor:
    return torch.empty(words, dtype=torch.int64, pin_memory=True)
