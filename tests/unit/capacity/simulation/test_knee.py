"""The search for a knee, and the verdict on requests."""

from dataclasses import replace

import numpy as np
import pytest

from router.observability.request_outcome import Outcome as Kind
from router.refusal import Refusal, Refused
from tandem.capacity.simulation.arrivals import Mix
from tandem.capacity.simulation.hardware import hardware
from tandem.capacity.simulation.knee import KEPT, LOADS_MAX, NEAR, LoadFigures, Trial, find_knee
from tandem.capacity.simulation.network import DeliveryDelay, Network
from tandem.capacity.simulation.request import Outcome, Piece, StepLog
from tandem.capacity.simulation.strategy import Strategy, strategies
from tandem.protocol.errors import Internal, ResourceExhausted
from tandem.protocol.lifecycle.spans import Phase
from tandem.protocol.mode import Mode
from tandem.settings.slo import SloClass
from tests.unit.capacity.simulation.stages import request

SLO = SloClass("s", ttft_s=1.0, itl_s=0.1, itl_percent=90.0)


def figures(rate: float, share: float) -> LoadFigures:
    return LoadFigures(rate, share, 0.0, 0.0, 0.0, 0.0, {})


@pytest.mark.parametrize("guess", [1.0, 7.0, 40.0])
def test_the_knee_is_found_from_below_and_from_above(guess: float) -> None:
    asked = []

    def load(rate: float) -> LoadFigures:
        asked.append(rate)
        return figures(rate, 1.0 if rate <= 10 else 0.5)

    knee = find_knee(load, guess)
    assert knee is not None
    assert 10 / NEAR <= knee.rate <= 10 or len(asked) == LOADS_MAX
    assert knee.rate == max(rate for rate in asked if rate <= 10)


def test_targets_that_no_load_meets_have_no_knee() -> None:
    assert find_knee(lambda rate: figures(rate, KEPT - 0.01), 5.0) is None


def answer(
    first_s: float, *gaps: float, error: str = "", placed_s: float = 0.0, refused: Refusal | None = None
) -> Outcome:
    """An outcome of a request that was due at 0."""
    log, moment = StepLog(), first_s
    for gap in gaps:
        moment += gap
        log.add(moment)
    return Outcome(
        request(0.0, 10, 1 + len(gaps)),
        error,
        placed_s=placed_s,
        firsts_s=[first_s],
        pieces=[Piece(log, 0, len(gaps))],
        refused=None if refused is None else Refused(refused, "no"),
    )


@pytest.mark.parametrize(
    ("outcome", "kind", "phase"),
    [
        (answer(0.9, *[0.09] * 10), Kind.MET, None),
        (answer(1.1, placed_s=0.7), Kind.MISSED_TTFT, Phase.QUEUE),
        (answer(1.1, placed_s=0.1), Kind.MISSED_TTFT, Phase.PREFILL),
        (answer(0.5, 0.2, *[0.05] * 9), Kind.MET, None),  # one gap in ten may be longer
        (answer(0.5, 0.2, 0.2, *[0.05] * 8), Kind.MISSED_ITL, Phase.DECODE),
        (answer(0.5, error=ResourceExhausted.code, refused=Refusal.SLO_TTFT), Kind.REJECTED, Phase.QUEUE),
        (answer(0.5, error=ResourceExhausted.code, refused=Refusal.SLO_ITL), Kind.REJECTED, Phase.DECODE),
        (answer(0.5, error=Internal.code), Kind.FAILED, Phase.QUEUE),
    ],
)
def test_outcomes_are_judged_by_targets_and_phase(outcome: Outcome, kind: Kind, phase: Phase | None) -> None:
    verdict = outcome.judge(SLO, 0.01, outcome.token_s(0.0))
    assert (verdict.outcome, verdict.phase) == (kind, phase)


def test_tokens_come_later_by_chance_and_in_order() -> None:
    """The jitter is that of two H200s; it matters for gaps near a target."""
    outcome, network = answer(0.5, *[0.001] * 2000), Network(event_s=1e-3, event_jitter_s=3e-4)
    sent, moments = np.asarray(outcome.token_s(1e-3)), DeliveryDelay(network).moments(outcome)
    assert (moments >= sent).all()
    assert (np.diff(moments) >= 0).all()
    assert 2e-4 < (moments - sent).mean() < 6e-4
    assert (moments == DeliveryDelay(network).moments(outcome)).all(), "the same each time"
    still = DeliveryDelay(replace(network, event_jitter_s=0.0)).moments(outcome)
    assert still.tolist() == outcome.token_s(1e-3)


def test_rates_change_arrival_times_and_not_lengths() -> None:
    one, two = (list(Mix(rate, 300, 50).requests(20.0, SLO, 4096, seed=3)) for rate in (5.0, 10.0))
    assert [len(sent.prompt) for sent in two][: len(one)] == [len(sent.prompt) for sent in one]
    assert 70 < len(one) < 130 < len(two) < 270
    assert all(len(sent.prompt) + sent.new_tokens <= 4096 for sent in two)


def test_a_load_beyond_what_workers_can_do_keeps_less_than_a_small_one() -> None:
    machine = hardware("llama-3-8b", None, 50.0, 1.0)
    slo = SloClass("plan", ttft_s=1.0, itl_s=0.025)
    mix = Mix(1.0, 1000, 40)
    strategy = next(candidate for candidate in strategies(2, 1) if candidate.mode is Mode.DISAGGREGATED)
    trial = Trial(machine, strategy, mix, slo, Network())
    little, much = trial.load(8.0), trial.load(120.0)
    assert little.share > KEPT > much.share
    assert sum(much.missed.values()) > 0
    assert much.ttft_p50_s > little.ttft_p50_s > 0


def test_cached_tokens_of_prompts_are_not_computed() -> None:
    machine = hardware("llama-3-8b", None, 50.0, 1.0)
    slo = SloClass("plan", ttft_s=1.0, itl_s=0.025)
    strategy = next(candidate for candidate in strategies(2, 1) if candidate.mode is Mode.DISAGGREGATED)
    plain, cached = (
        Trial(machine, strategy, Mix(1.0, 2000, 40, cached=part), slo, Network()).load(15.0) for part in (0.0, 0.9)
    )
    assert cached.ttft_p50_s < 0.5 * plain.ttft_p50_s


def test_one_worker_cannot_be_disaggregated() -> None:
    assert all(strategy.mode is not Mode.DISAGGREGATED for strategy in strategies(1, 1))
    assert {strategy.workers for strategy in strategies(5, 2)} == {5}
    assert replace(strategies(5, 2)[0], name="") == Strategy("", Mode.DISAGGREGATED, 2, 3)
