"""Requests drawn at random: Poisson arrivals, lognormal lengths, no two prompts alike but for a common beginning."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine.config import GPU_PAGE_TOKENS
from router.slo import SloClass
from simulation.prompt import VirtualPrompt, page_names
from simulation.request import LoadRequest

SIGMA = 0.8
"""Of the logarithm of lengths, if nobody says otherwise: half of them lie within a factor of 1.7 of the median."""

_EVERYBODY = 0
"""Nobody's key."""


@dataclass(frozen=True, slots=True)
class Mix:
    """What clients ask: requests a second, and tokens on average; 0 `sigma` = all alike. The first `cached` part of a
    prompt is everybody's.
    """

    rate: float
    prompt_tokens: float
    answer_tokens: float
    sigma: float = SIGMA
    cached: float = 0.0

    def requests(
        self, seconds: float, slo: SloClass, max_context: int, *, seed: int = 0, start_s: float = 0.0, key: int = 0
    ) -> Iterator[LoadRequest]:
        """Those of so many seconds from `start_s` on, one after the other; each fits into `max_context` tokens. Moments
        and lengths have generators of their own: another rate has the same lengths in the same order.
        """
        moments, lengths = (np.random.default_rng(each) for each in np.random.SeedSequence(seed).spawn(2))
        due_s = start_s
        while (due_s := due_s + moments.exponential(1 / self.rate)) < start_s + seconds:
            prompt = min(_draw(self.prompt_tokens, self.sigma, lengths), max_context - 1)
            answer = min(_draw(self.answer_tokens, self.sigma, lengths), max_context - prompt)
            key += 1
            yield LoadRequest(due_s, VirtualPrompt(key, prompt, self._names(key, prompt)), answer, slo)

    def _names(self, key: int, prompt: int) -> tuple[bytes, ...]:
        """Of its pages; none where no other prompt has them."""
        shared = int(self.cached * prompt)
        return page_names([(_EVERYBODY, 0, shared), (key, shared, prompt - shared)], GPU_PAGE_TOKENS) if shared else ()


def _draw(mean: float, sigma: float, dice: np.random.Generator) -> int:
    return max(1, round(math.exp(math.log(mean) - sigma**2 / 2 + sigma * dice.standard_normal())))
