"""Runs the steps of an EAGLE head, or of an MTP layer, over its own KV pages."""

from typing import Protocol

import torch
from torch import Tensor

from tandem.engine.cache.page_pool import PagePool
from tandem.engine.cache.paged_cache import PagedCache
from tandem.engine.model_sizes import cost_guess
from tandem.engine.speculation.eagle.model import HeadModel
from tandem.engine.steps.batch import ModelRunnerOutput, PendingStep, StepBatch
from tandem.engine.steps.step_packer import step_limits
from tandem.protocol.messages import ModelFacts


class Launcher(Protocol):
    """The interface of a stepper that runs steps."""

    def launch(self, batch: StepBatch) -> PendingStep:
        """Launch a step."""


class EagleRunner:
    """A `DraftRunner` for an EAGLE head. It owns the KV cache and its page pool.

    Each token of a step comes with a hidden state (`give`).
    """

    def __init__(self, model: HeadModel, cache: PagedCache, stepper: Launcher) -> None:
        """Create a runner and the page pool of `cache`; `stepper` runs the steps of `model` over the cache."""
        self._states, self.drawn_hidden = model.states, model.drawn_hidden
        self.from_target = model.from_target
        self._stepper = stepper
        self.pool = PagePool(cache.pages)
        self.kv_pages = cache.kv_pages
        self.cost_guess = cost_guess(model.spec, cache, model.dtype.itemsize)
        limits, dtype = step_limits(model.spec, cache), str(model.dtype).removeprefix("torch.")
        self.facts = ModelFacts("EAGLE head", model.spec.vocab_size, limits.max_context, (), dtype)

    def give(self, states: Tensor) -> None:
        """Set the hidden states [n, H] of the tokens of the next step, see `HeadModel.from_target`.

        The next step has n rows of one token.
        """
        self._states[: len(states)] = states

    def run(self, batch: StepBatch) -> ModelRunnerOutput:
        """Run a step and wait for its result."""
        with torch.inference_mode():
            return self._stepper.launch(batch)()
