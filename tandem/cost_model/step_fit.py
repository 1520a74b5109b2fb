"""Learns the coefficients of `StepCost` online, from the durations of steps.

The method is recursive least squares of relative errors (a step of 4 ms counts as much as one of 200 ms), with these
additions for a live system:

- initial coefficients: they are kept for a cost part that was never observed, and they decide how the time is divided
  between parts that were only observed together
- forgetting by part: a thousand decode steps do not erase what is known of prompts
- coefficients >= 0: the published coefficients are the least squares within this bound; the recursion continues with
  the unbounded ones
- outliers: the error of a step is cut to `OUTLIER` times the usual error, for instance after a stall; if such steps
  continue, the usual error grows, and the fit adapts faster
- sampling: while predictions are good, the fit learns from only some of the steps without prompts, because they are
  alike; it always learns from steps that were not predicted well
- batching: after the first steps, the equations of several steps are solved together, on the scheduler's thread: adding
  a step takes a few microseconds, solving for the coefficients about a hundred

Recursive least squares with exponential forgetting: Ljung and Söderström, Theory and Practice of Recursive
Identification, 1983. Bounds on the residuals: Huber, Robust Estimation of a Location Parameter, 1964.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.cost_model.margin import LearnedMargin
from tandem.cost_model.step_cost import CostParameters, StepCost
from tandem.cost_model.step_work import StepWork
from tandem.protocol.cost_parameters import SECONDS, UNMEASURED

_Vector = NDArray[np.float64]

FORGET = 0.005
"""Fraction of the information on a cost part that is forgotten at each step with this part, if predictions are good."""
FORGET_MAX = 0.05
"""Maximum of the fraction that is forgotten; the fraction grows with the usual error while predictions are bad."""
GOOD_ERROR = 0.05
"""Maximum relative error of a prediction that counts as good."""
OUTLIER = 4.0
"""Maximum error that a step may contribute, as a multiple of the usual relative error."""
LEARN_EVERY = 8
"""While predictions are good, the fit learns from one out of this many consecutive steps without prompts.

It also solves its collected equations once per this many steps.
"""
AT_ONCE = 64
"""The coefficients are updated after each of the first steps, up to this number of steps."""
_USUAL_MIN = 0.02
_USUAL_PART = 0.05
"""Weight of the newest error in the moving average of errors (the usual error)."""
_ERROR_PART = 0.01
"""Minimum weight of the newest error in the moving average that is published."""
_GUESS_INFORMATION = np.array([1e-3, 0.1, 0.1, 0.1, 1e-3, 1e-3, 0.1])
"""The weight of each initial coefficient, in steps, in the order of `SECONDS`.

Decode steps have many sizes, so the weights of their coefficients are small. Steps with prompts may have the same size
for a long time, and then their duration does not show how it is divided among the parts. Predictions err by some
percent with the size, so with small weights a hundred such steps would move the coefficients away from those that hold
for other sizes (docs/decisions/cost_model.md).
"""
_SECONDS_MIN = 1e-6
"""Lower bound of the duration of a step, in seconds."""
_SWEEPS = 3
"""Number of sweeps of each coordinate descent, which starts from the previous result."""


class StepFit:
    """The online fit of a worker's step costs.

    The step loop owns it and calls its methods; any thread may read `parameters`.
    """

    def __init__(self, guess: CostParameters = UNMEASURED) -> None:
        self.parameters = replace(guess, error=0.0, observed=0)
        """The newest published parameters; replaced as a whole, never modified."""
        values, scale = _values(guess), _values(UNMEASURED)
        scale[[name.endswith("base_s") for name in SECONDS]] = max(guess.base_s, _SECONDS_MIN)
        self._scale: _Vector = np.where(values > 0, values, scale)
        self._guess: _Vector = values / self._scale
        self._free = self._guess
        """The least-squares solution without bounds, in units of `_scale`.

        `_coefficients` is the solution within the bounds.
        """
        self._coefficients = self._free
        self._information = np.diag(_GUESS_INFORMATION)
        self._usual = 1.0
        self._margin = LearnedMargin(guess.mixed_step_margin)
        self._alike = 0
        """Number of steps since the last one that the fit learned from."""
        self._cost = StepCost(self.parameters)
        self._error = 0.0
        self._observed = 0
        self._rows: list[list[float]] = []
        """The equations row · coefficients = target that are not solved yet.

        Each equation is divided by the larger of the predicted and the measured duration.
        """
        self._targets: list[float] = []

    def observe(self, work: StepWork, seconds: float) -> float:
        """Learn from a step with this work and duration in seconds; return the duration that was predicted.

        Empty steps and steps without a duration are ignored.
        """
        predicted = self._cost.seconds(work)
        if seconds <= 0.0 or not (work.decode_rows or work.prefill_tokens):
            return predicted
        # Errors are relative to the larger of both durations, so that no error exceeds 1 in either direction.
        reference = max(predicted, seconds)
        surprise = (seconds - predicted) / reference
        edge = OUTLIER * max(self._usual, _USUAL_MIN)
        good = self._usual <= GOOD_ERROR and abs(surprise) <= GOOD_ERROR
        self._alike = (self._alike + 1) % LEARN_EVERY if good and not work.prefill_tokens else 0
        if not self._alike:
            self._rows.append([amount / reference for amount in self._amounts(work)])
            self._targets.append(predicted / reference + min(max(surprise, -edge), edge))
        self._observed += 1
        if work.prefill_tokens and work.decode_rows and self._observed > AT_ONCE:
            self._margin.observe(seconds / max(predicted, _SECONDS_MIN))
        error = min(abs(predicted - seconds) / seconds, 1.0)
        self._error += max(_ERROR_PART, 1 / self._observed) * (error - self._error)
        if self._observed <= AT_ONCE or not self._observed % LEARN_EVERY:
            self._learn()
        self._usual += _USUAL_PART * (abs(surprise) - self._usual)
        return predicted

    def _learn(self) -> None:
        """Solve the collected equations and publish the parameters."""
        known = self.parameters
        seconds: Sequence[float] = _seconds(known)
        if self._rows:
            self._solve(np.array(self._rows) * self._scale, np.array(self._targets))
            self._rows, self._targets = [], []
            seconds = (self._coefficients * self._scale).tolist()
        learned: dict[str, Any] = dict(zip(SECONDS, seconds, strict=True))
        self.parameters = replace(
            known, **learned, error=self._error, observed=self._observed, mixed_step_margin=self._margin.value
        )
        self._cost = StepCost(self.parameters)

    def _solve(self, rows: _Vector, targets: _Vector) -> None:
        """Add the equations `rows` · coefficients = `targets` and solve for the coefficients."""
        forget = min(FORGET_MAX, FORGET * max(1.0, self._usual / GOOD_ERROR))
        # Only the parts that occur in these steps are forgotten. `keep` is the square root, because it scales both rows
        # and columns.
        keep = (1 - forget) ** (0.5 * (rows > 0).sum(axis=0))
        information = self._information
        seen_as = information @ self._guess
        # A device that is slower than guessed in the observed parts is assumed to be as much slower in all parts.
        times = max(0.0, float(seen_as @ self._free) / max(float(seen_as @ self._guess), _SECONDS_MIN))
        information *= keep[:, None] * keep
        # The first guess, scaled to the device, takes the weight of what is forgotten.
        back = (1 - keep * keep) * _GUESS_INFORMATION
        wanted = information @ self._free + back * times * self._guess + targets @ rows
        information += np.diag(back) + rows.T @ rows
        solution = np.linalg.solve(information, wanted).astype(np.float64, copy=False)
        self._free = solution
        self._coefficients = (
            solution if solution.min() >= 0.0 else _within_bounds(information, wanted, self._coefficients)
        )

    def _amounts(self, work: StepWork) -> tuple[float, ...]:
        """Return the step's amount of each cost part, in the order of the coefficients."""
        return (
            1.0,
            1.0 if work.prefill_tokens else 0.0,
            self._cost.charged(work.prefill_tokens, work.decode_rows),
            self._cost.charged_pairs(work.prefill_tokens, work.prefill_pairs),
            work.decode_rows,
            work.decode_context_tokens,
            1.0 if work.draft_rows else 0.0,
        )


def _values(parameters: CostParameters) -> _Vector:
    return np.array(_seconds(parameters))


def _seconds(parameters: CostParameters) -> list[float]:
    return [getattr(parameters, name) for name in SECONDS]


def _within_bounds(information: _Vector, wanted: _Vector, start: _Vector) -> _Vector:
    """Return coefficients c >= 0 that approximately minimize ½ c·information·c - wanted·c, by coordinate descent."""
    rows, targets, coefficients = information.tolist(), wanted.tolist(), start.tolist()
    for _ in range(_SWEEPS):
        for i, row in enumerate(rows):
            rest = sum(a * b for a, b in zip(row, coefficients, strict=True)) - row[i] * coefficients[i]
            coefficients[i] = max(0.0, (targets[i] - rest) / row[i])
    return np.array(coefficients)
