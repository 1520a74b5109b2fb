"""Runs steps synchronously, on the CPU or with given kernels on any device: `launch` computes the step."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tandem.engine.cache.paged_cache import PagedCache
from tandem.engine.graph_use import GraphUse
from tandem.engine.kernels.base import DeferredTokens
from tandem.engine.logprobs import logprobs, score
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.parallel.step_stream import RankStep
from tandem.engine.steps.batch import PendingStep, StepBatch, rows_of
from tandem.engine.steps.sampling_metadata import SamplingMetadata
from tandem.engine.steps.scored_step import with_scoring
from tandem.engine.steps.step_packer import PackedStep, StepPacker, unpack

Forward = Callable[[PackedStep, DeferredTokens | None], Tensor | None]
"""A function that stores a step's KV and returns the logits [sampled rows, vocab]; None if no row samples a token."""

_WORDS_AT_FIRST = 4096


def forward_over(model: DecoderModel, cache: PagedCache, on_step: Callable[[RankStep], None] | None = None) -> Forward:
    """Return the function that runs the model's steps over one KV cache; `on_step` is called before each step."""

    def forward(step: PackedStep, feed: DeferredTokens | None) -> Tensor | None:
        if on_step is not None:
            on_step(step)
        return model.forward(step.token_ids, step.layouts, cache.views, step.drawn, feed, scoring=step.scoring)

    return forward


class HostStepper:
    """Runs steps synchronously.

    It has one buffer, so the tensors of a step are valid only until the next step is packed.
    """

    asynchronous = False
    step_graphs = ()

    def __init__(
        self,
        packer: StepPacker,
        forward: Forward,
        device: torch.device,
        draw: Callable[[Tensor, SamplingMetadata], Tensor],
    ) -> None:
        self._packer = packer
        self._forward = forward
        self._device = device
        self._draw = draw
        self.graph_use = GraphUse()
        self._words = torch.empty(_WORDS_AT_FIRST, dtype=torch.int64)

    def launch(self, batch: StepBatch) -> PendingStep:
        """Compute a step, and return a function that returns the result, as `ModelRunner.launch` describes."""
        logits = self.logits(batch)
        self.graph_use.misses += 1
        if logits is None:
            result = rows_of([], batch)
        else:
            draws = batch.draws
            tokens = self._draw(logits, draws)
            result = rows_of(tokens.tolist(), batch, score(logits, draws, tokens) if draws.scored else ())
        return lambda: result

    def logits(self, batch: StepBatch, *, every_token: bool = False) -> Tensor | None:
        """Return the logits on the device: [sampled rows, vocab], or [tokens, vocab] with `every_token`.

        Returns None if no row samples a token.
        """
        sizes = self._packer.sizes(batch)
        if sizes.words > len(self._words):
            self._words = torch.empty(2 * sizes.words, dtype=torch.int64)
        words = self._words[: sizes.words]
        self._packer.pack(batch, sizes, words.numpy())
        step = unpack(words, sizes, batch, self._device)
        if batch.scored:
            step = with_scoring(step, batch, logprobs)
        logits = self._forward(replace(step, drawn=None) if every_token else step, None)
        if step.scoring is not None:
            step.scoring.deliver()
        return logits
