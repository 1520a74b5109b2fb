"""Workloads with random arrivals and lengths, in which no two prompts share a prefix.

Gaps between arrivals are gamma-distributed: Poisson arrivals for a coefficient of variation of 1, equal gaps for 0.
Lengths are lognormal or constant.
"""

import math
from dataclasses import dataclass

import numpy as np

from tandem.cli.load.workload import Arrival, Block, Workload
from tandem.protocol.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens: constant if `sigma` is 0, else lognormal.

    `sigma` is the standard deviation of the logarithm.
    """

    mean: float
    sigma: float = 0.0

    @classmethod
    def parse(cls, option: str, text: str) -> "Lengths":
        """Parse "500" or "lognormal:500:0.8". Raises InvalidArgument, which names `option`."""
        kind, *numbers = text.split(":") if ":" in text else ("constant", text)
        try:
            values = [float(number) for number in numbers]
        except ValueError:
            values = []
        if len(values) != {"constant": 1, "lognormal": 2}.get(kind) or not _sensible(*values):
            raise InvalidArgument(option, f"{text!r} is neither a number of tokens nor lognormal:MEAN:SIGMA")
        return cls(*values)

    def draw(self, generator: np.random.Generator, count: int) -> list[int]:
        """Sample `count` lengths of at least one token."""
        location = math.log(self.mean) - self.sigma**2 / 2
        return [max(1, round(length)) for length in np.exp(location + self.sigma * generator.standard_normal(count))]

    def __str__(self) -> str:
        return f"{self.mean:g}" + (f"s{self.sigma:g}" if self.sigma else "")


def _sensible(mean: float, sigma: float = 0.0) -> bool:
    return 1 <= mean < float("inf") and 0 <= sigma < 10


@dataclass(frozen=True, slots=True)
class Synthetic:
    """The distributions of prompt lengths, answer lengths and arrivals.

    `cv` is the coefficient of variation of the gaps: their standard deviation over their mean.
    """

    prompt: Lengths
    answer: Lengths
    cv: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.cv <= 100:
            raise InvalidArgument("--cv", f"{self.cv:g} is not between 0 and 100")

    @property
    def name(self) -> str:
        """A name made of the lengths and the burstiness, valid in file names."""
        return f"{self.prompt}-to-{self.answer}-cv{self.cv:g}"

    def at(self, rate: float, seconds: float, seed: int) -> Workload:
        """Return a workload with random arrival times and lengths.

        Arrival times and lengths have separate random generators, so workloads with the same seed and different rates
        have the same lengths in the same order.
        """
        moments, prompts, answers = (np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(3))
        due = due_times(moments, self.cv, rate, seconds)
        lengths = zip(due, self.prompt.draw(prompts, len(due)), self.answer.draw(answers, len(due)), strict=True)
        arrivals = tuple(Arrival(at, (Block(i, tokens),), new) for i, (at, tokens, new) in enumerate(lengths))
        return Workload(self.name, rate, seconds, seed, arrivals)


def due_times(generator: np.random.Generator, cv: float, rate: float, seconds: float) -> list[float]:
    """Sample the due times of requests at `rate` per second, all below `seconds`; with a `cv` of 0 all gaps are equal.

    Raises InvalidArgument unless `rate` is above 0.
    """
    if rate <= 0:
        raise InvalidArgument("--rates", f"{rate:g} is not above 0")
    if cv == 0:
        return [number / rate for number in range(1, math.ceil(rate * seconds))]
    shape = 1 / cv**2
    due, moments = 0.0, []
    while (due := due + generator.gamma(shape, 1 / (rate * shape))) < seconds:
        moments.append(due)
    return moments
