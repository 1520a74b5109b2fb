"""What a worker has learned of how long its steps take: it travels with its load, so that routers predict alike."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostParameters:
    """Coefficients of `costs.step_cost.StepCost`, all in seconds and >= 0, and how well they have fitted so far.

    The defaults are of a small model on a few CPU cores, for as long as nothing was measured.
    """

    base_s: float = 0.02
    """Of every step: weights are read once, kernels launched."""
    prompt_base_s: float = 0.0
    """Of a step with prompt tokens, beside that."""
    token_s: float = 1e-3
    """Of each prompt token beyond `free_tokens`."""
    pair_s: float = 1e-8
    """Of each pair of a prompt token and a token it attends to."""
    row_s: float = 1e-3
    """Of each decode row."""
    context_s: float = 1e-7
    """Of each token of context that a decode row attends to."""
    free_tokens: int = 0
    """Tokens of a step, decode rows and then prompt tokens, whose arithmetic is hidden by the reading of weights."""
    error: float = 0.0
    """Recent mean of |predicted - actual| ÷ actual, each at most 1; 0 before the first step."""
    observed: int = 0
    """Steps these parameters were fitted to; 0 = nothing but a guess."""
    tile_tokens: int = 1
    """A step with prompts computes a multiple of so many tokens, see `costs.step_grid`."""
    wave_tokens: int = 1
    """Of prompts, whose attention the device computes at once: as many take as long as one, see `costs.step_grid`."""
    mixed_noise: float = 1.2
    """The margin by which mixed steps are planned shorter than their target (`costs.step_cost.LearnedMargin`)."""


UNMEASURED = CostParameters()
"""Before the first step."""
