"""The times at which a client of a simulated cluster receives its tokens."""

import numpy as np
import pytest

from tandem.capacity.simulation.prompt import VirtualPrompt
from tandem.capacity.simulation.request import LoadRequest, Outcome, Piece, StepLog
from tandem.settings.slo import BEST_EFFORT

LATER_S = 0.001


@pytest.mark.parametrize(
    ("held_s", "first_s"),
    [(0.0, 1.0), (0.01, 1.01), (0.5, 1.02)],
    ids=["at once", "until its time is over", "until the second comes"],
)
def test_a_held_first_token_leaves_with_the_second_or_when_its_time_ends(held_s: float, first_s: float) -> None:
    log = StepLog()
    log.extend(np.asarray([1.02, 1.03]))
    asked = LoadRequest(0.0, VirtualPrompt(1, 10, ()), 3, BEST_EFFORT)
    outcome = Outcome(asked, firsts_s=[1.0], pieces=[Piece(log, 0, 2)], held_s=held_s)
    assert list(outcome.token_s(LATER_S)) == pytest.approx([first_s + LATER_S, 1.02 + LATER_S, 1.03 + LATER_S])


def test_a_first_token_that_is_the_last_is_not_held() -> None:
    asked = LoadRequest(0.0, VirtualPrompt(1, 10, ()), 1, BEST_EFFORT)
    assert list(Outcome(asked, firsts_s=[1.0], held_s=0.5).token_s(LATER_S)) == [1.0 + LATER_S]
