"""Simulates how many drafts steps have, beside none and every fixed number: `python -m benchmarks.speculation.control`.

The durations of steps are those of a device, measured or predicted, which the fit of the cost model learns as a worker
does; drafts are accepted at random. Printed are tokens per second ÷ those without drafts, for a constant probability of
acceptance, and in the 64 steps after it has fallen from 0.8 to 0.
"""

import argparse
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.command_line import at_least
from decode_worker.draft_choice import Candidate, StepBounds, break_even, with_most_tokens
from decode_worker.speculation import PROBE_EVERY
from tandem.cost_model.acceptance import Acceptance
from tandem.cost_model.step_cost import StepCost
from tandem.cost_model.step_fit import StepFit
from tandem.cost_model.step_work import StepWork
from tandem.engine.speculation.proposer import DRAFTS_MAX, Draft, DraftSource, ProposerName
from tandem.protocol.cost_parameters import CostParameters

STEPS, WARM_UP = 600, 200
BATCHES = (1, 8, 32, 64, 128, 256)
CONTEXTS = (128, 1024, 8192)
ACCEPTANCES = (0.0, 0.3, 0.5, 0.7, 0.9)
FALLEN = 64
NOISE = 0.02
"""Standard deviation of a step's duration, relative."""


@dataclass(frozen=True, slots=True)
class Device:
    """The duration of steps by rows, and what a row adds for each token that it attends to."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    context_s: float
    guess: CostParameters

    def step_s(self, rows: int, context: int) -> float:
        """Return the duration of a step; beyond the known rows it grows as between the last two."""
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])
        beyond = max(0, rows - self.rows[-1]) * slope
        return float(np.interp(rows, self.rows, self.seconds)) + beyond + self.context_s * context


DEVICES = {
    # SmolLM2-135M in float32 on two cores of a server, measured by steps of one to 32 rows.
    "cpu": Device(
        (1, 2, 3, 4, 5, 6, 8, 12, 16, 32),
        (35.9e-3, 35.9e-3, 38e-3, 39.4e-3, 44.6e-3, 49.2e-3, 51.3e-3, 74e-3, 97.5e-3, 190e-3),
        1e-6,
        CostParameters(base_s=30e-3, row_s=3e-3, context_s=1e-6),
    ),
    # llama-3-8b on an H200, predicted from measured steps without drafts; each row reads its KV.
    "h200": Device(
        (1, 2, 8, 32, 64, 128, 256, 512),
        (3.80e-3, 4.17e-3, 4.26e-3, 4.32e-3, 4.74e-3, 5.0e-3, 6.3e-3, 11e-3),
        33e-9,
        CostParameters(base_s=3.8e-3, row_s=10e-6, context_s=33e-9),
    ),
}
REQUEST: Any = object()
Chooser = Callable[[StepCost, Acceptance, int], list[int]]
"""From costs, acceptance and the number of the step: the drafts of each request."""


class Run:
    """A batch of constant size and context whose drafts are right with a given probability."""

    def __init__(self, device: Device, batch: int, context: int, choose: Chooser, seed: int = 1) -> None:
        self._device, self._batch, self._context, self._choose = device, batch, context, choose
        self._fit, self._acceptance, self._dice = StepFit(device.guess), Acceptance(), random.Random(seed)
        self._number = 0

    def tokens_per_s(self, acceptance: float, steps: int) -> float:
        """Return the tokens per second of so many steps more."""
        tokens, total_s = 0, 0.0
        for _ in range(steps):
            drafts = self._choose(StepCost(self._fit.parameters), self._acceptance, self._number)
            self._number += 1
            rows = self._batch + sum(drafts)
            context = rows * self._context + sum(count * (count + 1) // 2 for count in drafts)
            seconds = self._device.step_s(rows, context)
            work = StepWork(decode_rows=rows, decode_context_tokens=context, draft_rows=sum(drafts))
            self._fit.observe(work, self._noisy(seconds))
            total_s += seconds
            for count in drafts:
                right = next((n for n in range(count) if self._dice.random() >= acceptance), count)
                self._acceptance.observe(1, count, right)
                tokens += 1 + right
            tokens += self._batch - len(drafts)
        return tokens / total_s

    def _noisy(self, seconds: float) -> float:
        return seconds * max(0.5, self._dice.gauss(1.0, NOISE))


def fixed(drafts: int, batch: int) -> Chooser:
    """As many drafts for each request in each step."""
    return lambda _cost, _acceptance, _number: [drafts] * batch


class Adaptive:
    """The product's choice; see `Speculation`."""

    def __init__(self, batch: int, context: int) -> None:
        self._work = StepWork(decode_rows=batch, decode_context_tokens=batch * context)
        self._context = context
        self._without = 0

    def __call__(self, cost: StepCost, acceptance: Acceptance, _number: int) -> list[int]:
        """Choose the drafts of a step."""
        found: Sequence[Candidate] = ()
        if acceptance.best() > break_even(cost, self._work):
            found = with_most_tokens(StepBounds(cost, math.inf, 2048), self._work, self._candidates(acceptance))
        if not found and self._without >= PROBE_EVERY:
            found = self._candidates(acceptance)[:1]
        self._without = 0 if found else self._without + 1
        return [len(each.survival) for each in found]

    def _candidates(self, acceptance: Acceptance) -> list[Candidate]:
        survival = acceptance.survival(1, DRAFTS_MAX)
        draft = Draft(range(DRAFTS_MAX), DraftSource(ProposerName.NGRAM, 1))
        return [Candidate(REQUEST, draft, survival, self._context) for _ in range(self._work.decode_rows)]


def measure(device: Device, batch: int, context: int, seeds: int) -> list[str]:
    """Return the cells of a row of the table, each the worst of so many seeds."""
    cells = []
    for acceptance in ACCEPTANCES:
        found = [_constant(device, batch, context, acceptance, seed) for seed in range(1, seeds + 1)]
        adaptive, plain, best, drafts = min(found, key=lambda each: each[0] / each[2])
        cells.append(f"{adaptive / plain:.2f} ({best / plain:.2f} with {drafts})")
    cells.append(f"{min(_fallen(device, batch, context, seed) for seed in range(1, seeds + 1)):.2f}")
    return cells


def _constant(
    device: Device, batch: int, context: int, acceptance: float, seed: int
) -> tuple[float, float, float, int]:
    """Return the tokens per second, those without drafts, and those with the best fixed number of drafts and that."""
    rates = []
    choosers: list[Chooser] = [Adaptive(batch, context), *(fixed(n, batch) for n in range(DRAFTS_MAX + 1))]
    for choose in choosers:
        run = Run(device, batch, context, choose, seed)
        run.tokens_per_s(acceptance, WARM_UP)
        rates.append(run.tokens_per_s(acceptance, STEPS))
    best = max(rates[1:])
    return rates[0], rates[1], best, rates[1:].index(best)


def _fallen(device: Device, batch: int, context: int, seed: int) -> float:
    """Return the tokens per second ÷ those without drafts, behind FALLEN steps of which all drafts are rejected."""
    run = Run(device, batch, context, Adaptive(batch, context), seed)
    run.tokens_per_s(0.8, WARM_UP)
    run.tokens_per_s(0.0, FALLEN)
    plain = Run(device, batch, context, fixed(0, batch), seed).tokens_per_s(0.0, FALLEN)
    return run.tokens_per_s(0.0, FALLEN) / plain


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for a device."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speculation.control", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="whose steps (cpu)")
    parser.add_argument("--contexts", nargs="+", type=int, default=list(CONTEXTS), help="tokens of a request")
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES), help="requests of a step")
    parser.add_argument("--seeds", type=at_least(1), default=1, help="seeds, of which the worst is printed (1)")
    chosen = parser.parse_args(arguments)
    device, console = DEVICES[chosen.device], Console()
    table = Table("batch", "context", *(f"α = {each:g}" for each in ACCEPTANCES), f"{FALLEN} steps after α fell")
    for batch in chosen.batches:
        for context in chosen.contexts:
            table.add_row(str(batch), str(context), *measure(device, batch, context, chosen.seeds))
    console.print(f"{chosen.device}: tokens/s ÷ without drafts, adaptive (the best fixed number of drafts)")
    console.print(table)


if __name__ == "__main__":
    main()
