"""Steps are invented from known coefficients; the fit has to find what they take, whatever it is shown."""

from collections.abc import Callable
from dataclasses import astuple, replace

import numpy as np
import pytest

from tandem.cost_model.margin import MARGIN_MAX
from tandem.cost_model.step_cost import CostParameters, StepCost
from tandem.cost_model.step_fit import AT_ONCE, LEARN_EVERY, StepFit
from tandem.cost_model.step_work import StepWork
from tandem.protocol.cost_parameters import SECONDS

TRUE = CostParameters(
    base_s=4e-3, prompt_base_s=4e-4, token_s=2.4e-5, pair_s=4e-10, row_s=8e-6, context_s=3e-8, free_tokens=160
)
"""The costs of an 8B model on a large GPU, about."""
GUESS = CostParameters(
    base_s=2e-3, prompt_base_s=0.0, token_s=6e-5, pair_s=1e-10, row_s=0.0, context_s=6e-8, free_tokens=160
)

Make = Callable[[np.random.Generator], StepWork]


def decode(rng: np.random.Generator) -> StepWork:
    rows = int(rng.integers(1, 257))
    return StepWork(decode_rows=rows, decode_context_tokens=int(rows * rng.uniform(100, 3000)))


def mixed(rng: np.random.Generator) -> StepWork:
    beside = decode(rng) if rng.random() < 0.7 else StepWork()
    if beside.decode_rows and rng.random() < 0.3:
        return beside
    return beside.with_chunk(int(rng.integers(1, 2049)), int(rng.integers(0, 8192)))


def same(_: np.random.Generator) -> StepWork:
    return StepWork(decode_rows=32, decode_context_tokens=32_000)


def play(
    fit: StepFit,
    true: CostParameters,
    make: Make,
    steps: int,
    *,
    noise: float = 0.03,
    stalls: float = 0.0,
    seed: int = 0,
) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        work = make(rng)
        seconds = StepCost(true).seconds(work) * rng.lognormal(0, noise) * (20 if rng.random() < stalls else 1)
        fit.observe(work, seconds)
        assert min(astuple(fit.parameters)) >= 0


def worst(fit: StepFit, true: CostParameters, make: Make) -> float:
    """Largest relative error over fresh steps, without noise."""
    rng = np.random.default_rng(99)
    works = [make(rng) for _ in range(300)]
    return max(abs(StepCost(fit.parameters).seconds(w) / StepCost(true).seconds(w) - 1) for w in works)


@pytest.mark.parametrize("guess", [GUESS, CostParameters(free_tokens=160), TRUE])
def test_the_fit_converges_from_the_guess(guess: CostParameters) -> None:
    fit = StepFit(guess)
    play(fit, TRUE, mixed, 400)
    assert worst(fit, TRUE, mixed) < 0.06
    assert fit.parameters.observed == 400
    play(fit, TRUE, mixed, 400, seed=1)
    assert 0.01 < fit.parameters.error < 0.05  # the noise of the steps themselves


def test_occasional_stalls_do_not_move_the_fit() -> None:
    fit = StepFit(GUESS)
    play(fit, TRUE, mixed, 1000, stalls=0.02)
    assert worst(fit, TRUE, mixed) < 0.1


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_the_fit_adapts_to_a_change(factor: float) -> None:
    fit = StepFit(GUESS)
    play(fit, TRUE, mixed, 1000)
    slow = replace(TRUE, **{name: getattr(TRUE, name) * factor for name in SECONDS})
    play(fit, slow, mixed, 600, seed=1)
    assert worst(fit, slow, mixed) < 0.12
    assert fit.parameters.error < 0.05


def test_the_cost_of_verifying_is_fitted_separately() -> None:
    true, fit = replace(TRUE, verify_base_s=1.5e-3), StepFit(replace(GUESS, verify_base_s=3e-3))

    def some_verify(rng: np.random.Generator) -> StepWork:
        work = decode(rng)
        return work.with_drafts(int(rng.integers(1, 4)) * work.decode_rows, 0) if rng.random() < 0.3 else work

    play(fit, true, some_verify, 600)
    assert worst(fit, true, some_verify) < 0.05
    assert fit.parameters.verify_base_s == pytest.approx(1.5e-3, rel=0.15)


def test_parts_that_were_never_observed_keep_the_guess() -> None:
    fit = StepFit(GUESS)
    play(fit, TRUE, decode, 3000)
    assert worst(fit, TRUE, decode) < 0.05
    prompts = ("prompt_base_s", "token_s", "pair_s")
    assert all(getattr(fit.parameters, name) == pytest.approx(getattr(GUESS, name)) for name in prompts)


def test_observed_parts_are_not_forgotten_during_other_steps() -> None:
    fit = StepFit(GUESS)
    play(fit, TRUE, mixed, 500)
    play(fit, TRUE, decode, 5000, seed=1)
    assert worst(fit, TRUE, mixed) < 0.08


def test_equal_steps_do_not_distort_the_fit() -> None:
    fit = StepFit(GUESS)
    play(fit, TRUE, same, 20_000)
    assert worst(fit, TRUE, same) < 0.05
    # Whatever it makes of the parts, none is more than the whole.
    assert worst(fit, TRUE, decode) < 3.0
    play(fit, TRUE, mixed, 300, seed=1)
    assert worst(fit, TRUE, mixed) < 0.08


def test_one_slow_step_at_the_start_is_corrected_at_once() -> None:
    fit = StepFit(GUESS)
    fit.observe(same(np.random.default_rng()), 30.0)
    play(fit, TRUE, mixed, 200)
    assert worst(fit, TRUE, mixed) < 0.08


def test_empty_steps_teach_nothing() -> None:
    fit = StepFit(GUESS)
    before = fit.parameters
    fit.observe(StepWork(), 1.0)
    fit.observe(StepWork(decode_rows=1), 0.0)
    assert fit.parameters is before
    assert StepFit(replace(GUESS, error=0.5, observed=7)).parameters == before


def test_later_steps_are_learned_from_together() -> None:
    fit = StepFit(GUESS)
    play(fit, TRUE, mixed, AT_ONCE)
    reported = fit.parameters
    play(fit, TRUE, mixed, LEARN_EVERY - 1, seed=1)
    assert fit.parameters is reported
    play(fit, TRUE, mixed, 1, seed=2)
    assert fit.parameters.observed == AT_ONCE + LEARN_EVERY
    assert fit.parameters.token_s != reported.token_s


def test_the_reported_noise_is_that_of_mixed_steps() -> None:
    """The margin is exceeded by one mixed step in two hundred; other steps do not count."""
    fit = StepFit(TRUE)
    rng = np.random.default_rng(5)
    for noise in (0.10, 0.02):
        for _ in range(4000):
            work = mixed(rng)
            fit.observe(work, StepCost(TRUE).seconds(work) * rng.lognormal(0, noise if work.decode_rows else 0.1))
        margin = fit.parameters.mixed_step_margin
        over = [rng.lognormal(0, noise) > margin for _ in range(5000)]
        assert np.mean(over) < 0.03


def test_each_stall_raises_the_noise_of_mixed_steps() -> None:
    fit = StepFit(TRUE)
    play(fit, TRUE, mixed, 500, noise=0.0)
    quiet = fit.parameters.mixed_step_margin
    work = StepWork(500, 1e5, 20, 20_000)
    for _ in range(LEARN_EVERY):
        fit.observe(work, 1000 * StepCost(TRUE).seconds(work))
    assert quiet < fit.parameters.mixed_step_margin < quiet + 0.1
    play(fit, TRUE, mixed, 300, noise=0.0)
    for _ in range(5000):
        fit.observe(work, 1000 * StepCost(fit.parameters).seconds(work))
    assert fit.parameters.mixed_step_margin == MARGIN_MAX


def test_long_chunks_alone_do_not_determine_short_ones_and_long_contexts() -> None:
    """They differ too little to tell a step's fixed part from its tokens', and err with their size."""
    guess = replace(TRUE, prompt_base_s=1.2e-3, token_s=2.7e-5, pair_s=4.4e-10)
    fit, rng = StepFit(guess), np.random.default_rng(3)
    for number in range(25_000):
        beside = decode(rng)
        work, error = beside, 1.0
        if number % 10 == 0:
            tokens = int(rng.integers(1500, 2049))
            work, error = (
                beside.with_chunk(tokens, int(rng.integers(0, 2048))),
                1 + 0.04 * np.cos((tokens - 1500) / 250),
            )
        fit.observe(work, StepCost(TRUE).seconds(work) * error * rng.lognormal(0, 0.02))
    beside = StepWork(decode_rows=16, decode_context_tokens=24_000)
    for tokens, context in ((112, 1000), (400, 1000), (496, 60_000)):
        work = beside.with_chunk(tokens, context)
        assert 0.5 < StepCost(fit.parameters).seconds(work) / StepCost(TRUE).seconds(work) < 1.4
