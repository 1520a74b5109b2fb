"""CUDA graphs of steps of prompts that the host would launch more slowly than the device computes them: short steps of
small models.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.batch import StepBatch
from engine.cuda_graphs import SHORT_CONTEXT
from engine.host_stepper import Forward
from engine.kernels.base import Feed
from engine.model_sizes import layer_weights
from engine.models.config import ModelConfig
from engine.step_graph import Pool, StepGraph, capture_step
from engine.step_packer import StepPacker, StepSizes, view_step
from engine.weights.checkpoint import Progress

_SIZES = (*range(64, 512, 64), *range(512, 1024, 128), *range(1024, 2049, 256))
"""Tokens of a step: what is padded costs an eighth at most where the device is busy."""
_ROWS = 8
"""Prompts of a step."""
_HOST_S = 450e-6
"""What the host takes to launch a layer."""
_DEVICE_FLOPS = 600e12
"""Of a GPU at large products."""


class PromptGraphs:
    """By number of tokens; rows that a step lacks are empty and lie behind its last token, where nobody reads what is
    computed and nothing is stored.
    """

    def __init__(self, packer: StepPacker, forward: Forward, drawn: Tensor, pool: Pool) -> None:
        """`drawn` as in `DecodeGraphs`; `pool`: of memory that all graphs share, as one runs at a time."""
        self._packer = packer
        self._forward = forward
        self._drawn = drawn
        self._pool = pool
        self._context = min(packer.limits.max_context, SHORT_CONTEXT)
        self._graphs: list[StepGraph] = []

    def capture(self, sizes: Sequence[int], progress: Progress | None = None) -> None:
        """Capture steps of these numbers of tokens, the largest first, so that the others fit into its memory."""
        for done, tokens in enumerate(sorted(sizes, reverse=True)):
            self._graphs.append(self._capture(tokens))
            if progress is not None:
                progress("capturing CUDA graphs of prompts", (done + 1) / len(sizes))
        self._graphs.reverse()

    def fitting(self, batch: StepBatch, sizes: StepSizes) -> StepGraph | None:
        """The smallest graph that computes `batch`, which needs `sizes`; None: too large, or some of it decodes."""
        if len(batch.tokens) or sizes.rows > _ROWS or sizes.width > self._packer.limits.pages_of(self._context):
            return None
        return next((graph for graph in self._graphs if graph.sizes.tokens >= sizes.tokens), None)

    def _step(self, tokens: int) -> tuple[Tensor, Callable[[], Tensor], StepSizes]:
        """A step of nothing: the words it reads, the launch of all its kernels → logits, and its sizes."""
        sizes = StepSizes(tokens, _ROWS, self._packer.limits.pages_of(self._context), _ROWS)
        host = torch.empty(sizes.words, dtype=torch.int64)
        self._packer.pack(StepBatch([]), sizes, host.numpy())
        words = host.to(self._drawn.device)
        step = view_step(words, sizes, max_row_tokens=tokens, max_context=self._context, single_rows=0)

        def compute() -> Tensor:
            logits = self._forward(step, Feed(step.sources, self._drawn))
            assert logits is not None
            return logits

        return words, compute, sizes

    def _capture(self, tokens: int) -> StepGraph:
        words, compute, sizes = self._step(tokens)
        return capture_step(compute, words, sizes, self._context, self._pool)


def prompt_graph_sizes(config: ModelConfig, max_step_tokens: int) -> list[int]:
    """Numbers of tokens whose steps take the host longer than the device: more the narrower the layers are."""
    hidden_by_device = _HOST_S * _DEVICE_FLOPS / (2 * layer_weights(config))
    return [tokens for tokens in _SIZES if tokens <= min(hidden_by_device, max_step_tokens)]
