"""A follower: a rank other than the first, which runs its part of the model in each step that the first rank sends."""

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
    """The engine of a follower. It owns the rank's part of the model and of the KV cache, and has no requests."""

    def __init__(self, cache: PagedCache, forward: Forward) -> None:
        """Create a follower from loaded parts; callers use `load` instead."""
        self.cache = cache
        self._forward = forward

    @classmethod
    def load(cls, config: EngineConfig, collectives: Collectives, *, kernels: Kernels | None = None) -> "Follower":
        """Load this rank's part of the model, and allocate its KV cache. Raises as `ModelRunner.load` does."""
        model, cache = load_rank(config, collectives, kernels=kernels)
        return cls(cache, forward_over(model, cache))

    def run(self, steps: Iterable[PackedStep]) -> None:
        """Run `steps` in order, and return after the last one."""
        with torch.inference_mode():
            for step in steps:
                self._forward(step, None)
