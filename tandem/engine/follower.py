"""A rank of a group other than the first: it runs its part of the steps that the first rank sends."""

from collections.abc import Iterable

import torch

from tandem.engine.cache.paged_cache import PagedCache
from tandem.engine.config import EngineConfig
from tandem.engine.host_stepper import Forward, forward_over
from tandem.engine.kernels.base import Kernels
from tandem.engine.load_engine import load_rank
from tandem.engine.parallel.collectives import Collectives
from tandem.engine.steps.step_packer import PackedStep


class Follower:
    """A follower's part of the model and of the KV cache. It owns both, and has no requests."""

    def __init__(self, cache: PagedCache, forward: Forward) -> None:
        """Take over loaded parts; callers use `load`."""
        self.cache = cache
        self._forward = forward

    @classmethod
    def load(cls, config: EngineConfig, collectives: Collectives, *, kernels: Kernels | None = None) -> "Follower":
        """Read this rank's part of the model, and allocate its KV cache. Raises as `ModelRunner.load` does."""
        model, cache = load_rank(config, collectives, kernels=kernels)
        return cls(cache, forward_over(model, cache))

    def run(self, steps: Iterable[PackedStep]) -> None:
        """Run steps in their order, until there are no more."""
        with torch.inference_mode():
            for step in steps:
                self._forward(step, None)
