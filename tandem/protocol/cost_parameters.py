"""The cost parameters that a worker fits to its steps and sends with its load report, for predictions by routers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostParameters:
    """The coefficients of `tandem.cost_model.step_cost.StepCost`, in seconds and >= 0, and the quality of their fit.

        seconds = base + prompt_base (if the step has prompt tokens)
                + token · prompt tokens beyond the free ones + pair · attention pairs of prompts
                + row · decode rows                          + context · tokens of decode context
                + verify_base (if rows verify draft tokens)

    The defaults apply before the first measurement; they fit a small model on a few CPU cores.
    """

    base_s: float = 0.02
    """Fixed cost of every step: reading the weights and launching kernels."""
    prompt_base_s: float = 0.0
    """Additional cost of a step with prompt tokens."""
    token_s: float = 1e-3
    """Cost of each prompt token beyond the free ones (`free_tokens`)."""
    pair_s: float = 1e-8
    """Cost of each attention pair: a prompt token and a token that it attends to."""
    row_s: float = 1e-3
    """Cost of each decode row."""
    context_s: float = 1e-7
    """Cost of each token of context that a decode row attends to."""
    free_tokens: int = 0
    """Number of tokens of a step, decode rows first, whose compute is hidden behind reading the weights (roofline)."""
    error: float = 0.0
    """Recent mean of the relative prediction error, |predicted - actual| ÷ actual, each at most 1.

    It is 0 before the first step.
    """
    observed: int = 0
    """Number of steps that the fit has observed; 0 = the coefficients are the defaults."""
    tile_tokens: int = 1
    """The number of tokens of a step with prompts is padded to a multiple of this number.

    See `tandem.cost_model.step_grid`.
    """
    wave_tokens: int = 1
    """Number of prompt tokens whose attention takes as long as that of one token, because all run in one wave.

    See `tandem.cost_model.step_grid`.
    """
    mixed_step_margin: float = 1.2
    """The factor by which the target duration of steps with prompts and decode rows is divided.

    See `tandem.cost_model.margin.LearnedMargin`.
    """
    verify_base_s: float = 0.0
    """Additional cost of a step in which rows verify draft tokens.

    Such a step cannot be planned ahead: it needs the tokens of the step before it.
    """


SECONDS = ("base_s", "prompt_base_s", "token_s", "pair_s", "row_s", "context_s", "verify_base_s")
"""The field names of the coefficients."""
UNMEASURED = CostParameters()
"""The parameters that are assumed before the first step is measured."""
