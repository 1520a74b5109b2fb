"""Runs steps synchronously, on the CPU or with given kernels on any device: `launch` computes the step."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tandem.engine.cache.paged_cache import PagedCache
from tandem.engine.graph_use import GraphUse
from tandem.engine.kernels.base import DeferredTokens
from tandem.engine.kernels.kv_cache import states_of
from tandem.engine.kernels.states.row_chains import accepting, verifying
from tandem.engine.logprobs import logprobs, score
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.parallel.step_stream import AcceptedDrafts, RankStep
from tandem.engine.steps.batch import PendingStep, StepBatch, rows_of
from tandem.engine.steps.draft_groups import accepted_in
from tandem.engine.steps.sampling_metadata import SamplingMetadata
from tandem.engine.steps.scored_step import with_scoring
from tandem.engine.steps.step_packer import PackedStep, StepPacker, unpack

_WORDS_AT_FIRST = 4096


class Forward:
    """Runs the model's steps over one KV cache."""

    def __init__(
        self, model: DecoderModel, cache: PagedCache, on_step: Callable[[RankStep], None] | None = None
    ) -> None:
        """Create the runner of steps; `on_step` is called before each step."""
        self._model, self._cache, self._on_step = model, cache, on_step

    def __call__(self, step: PackedStep, feed: DeferredTokens | None) -> Tensor | None:
        """Store a step's KV and return the logits [sampled rows, vocab]; None if no row samples a token."""
        if self._on_step is not None:
            self._on_step(step)
        layouts = [
            layout if layout.chains is None else verifying(layout, states_of(cache))
            for layout, cache in zip(step.layouts, self._cache.views, strict=True)
        ]
        return self._model.forward(step.token_ids, layouts, self._cache.views, step.drawn, feed, scoring=step.scoring)

    def accept_drafts(self, step: PackedStep, accepted: Tensor) -> None:
        """Write the states after the accepted draft tokens of `step`, the newest one, which has chains.

        accepted [sizes.chains] int32, on the model's device
        """
        if self._on_step is not None:
            self._on_step(AcceptedDrafts(accepted.cpu().long()))
        layouts = [layout if layout.chains is None else accepting(layout, accepted) for layout in step.layouts]
        self._model.accept_drafts(layouts, self._cache.views)


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
        """Compute a step, as `ModelRunner.launch` describes."""
        step, logits = self._compute(batch, every_token=False)
        self.graph_use.misses += 1
        if logits is None:
            result = rows_of([], batch)
        else:
            draws = batch.draws
            tokens = self._draw(logits, draws)
            if step.sizes.chains:
                accepted = torch.tensor(accepted_in(batch.tokens, tokens.tolist()), dtype=torch.int32)
                self._forward.accept_drafts(step, accepted.to(self._device))
            result = rows_of(tokens.tolist(), batch, score(logits, draws, tokens) if draws.scored else ())
        return PendingStep(lambda: result)

    def logits(self, batch: StepBatch, *, every_token: bool = False) -> Tensor | None:
        """Return the logits on the device: [sampled rows, vocab], or [tokens, vocab] with `every_token`.

        Returns None if no row samples a token.
        """
        return self._compute(batch, every_token=every_token)[1]

    def _compute(self, batch: StepBatch, *, every_token: bool) -> tuple[PackedStep, Tensor | None]:
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
        return step, logits
