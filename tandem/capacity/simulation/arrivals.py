"""Generates random requests: Poisson arrivals, lognormal lengths, and prompts that share at most a common prefix."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tandem.capacity.simulation.prompt import VirtualPrompt, page_names
from tandem.capacity.simulation.request import LoadRequest
from tandem.settings.engine import GPU_PAGE_TOKENS
from tandem.settings.slo import SloClass

SIGMA = 0.8
"""Default standard deviation of the logarithm of lengths: half of them are within a factor of 1.7 of the median."""

_SHARED_KEY = 0
"""The key of the common prefix in the page names of all prompts."""


@dataclass(frozen=True, slots=True)
class Mix:
    """A request mix: requests per second and mean lengths in tokens.

    A `sigma` of 0 makes all lengths equal. The first `cached` fraction of a prompt is a prefix that all prompts share.
    """

    rate: float
    prompt_tokens: float
    answer_tokens: float
    sigma: float = SIGMA
    cached: float = 0.0

    def requests(
        self,
        seconds: float,
        slo: SloClass,
        max_context: int,
        *,
        page_tokens: int = GPU_PAGE_TOKENS,
        seed: int = 0,
        start_s: float = 0.0,
        key: int = 0,
    ) -> Iterator[LoadRequest]:
        """Yield the requests of `seconds` seconds starting at `start_s`, by arrival.

        Each request fits into `max_context` tokens, and its pages have `page_tokens` tokens. Arrival times and lengths
        have separate random generators, so loads with another rate have the same sequence of lengths.
        """
        moments, lengths = (np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(2))
        due_s = start_s
        while (due_s := due_s + moments.exponential(1 / self.rate)) < start_s + seconds:
            prompt = min(_draw(self.prompt_tokens, self.sigma, lengths), max_context - 1)
            answer = min(_draw(self.answer_tokens, self.sigma, lengths), max_context - prompt)
            key += 1
            yield LoadRequest(due_s, VirtualPrompt(key, prompt, self._names(key, prompt, page_tokens)), answer, slo)

    def _names(self, key: int, prompt: int, page_tokens: int) -> tuple[bytes, ...]:
        """Return the names of the prompt's full pages; empty if it has no cached prefix."""
        shared = int(self.cached * prompt)
        return page_names([(_SHARED_KEY, 0, shared), (key, shared, prompt - shared)], page_tokens) if shared else ()


def _draw(mean: float, sigma: float, dice: np.random.Generator) -> int:
    return max(1, round(math.exp(math.log(mean) - sigma**2 / 2 + sigma * dice.standard_normal())))
