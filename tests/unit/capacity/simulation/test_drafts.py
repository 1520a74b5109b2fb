"""Simulated drafts: several tokens a step, the time that proposing takes, and every request whole."""

import random
from collections import Counter
from itertools import pairwise

import pytest

from tandem.capacity.simulation.drafts import Drafts
from tandem.protocol.messages import Role
from tandem.protocol.mode import Mode
from tests.unit.capacity.simulation.stages import cluster, moments, request

TOGETHER = (Mode.COLOCATED, [Role.BOTH])
TOKENS = 400


def lone(drafts: Drafts | None, tokens: int = TOKENS) -> list[float]:
    """Returns the times of an answer's tokens in milliseconds."""
    stage = cluster(*TOGETHER, drafts=drafts)
    (outcome,) = stage.run([request(10.0, 100, tokens)])
    assert not outcome.error
    (worker,) = stage.workers.values()
    assert worker.load().decode_speedup == 1.0 or (drafts is not None and drafts.acceptance)
    assert worker.load().decode_speedup > 1.2 or drafts is None or drafts.acceptance < 1, "routers know of them"
    token_times = moments(outcome)
    assert len(token_times) == tokens
    assert token_times == sorted(token_times)
    return token_times


def seconds(times: list[float]) -> float:
    return times[-1] - times[0]


@pytest.mark.parametrize("token_ms", [0.0, 0.5])
def test_a_step_takes_the_time_of_its_rows_and_of_proposing(token_ms: float) -> None:
    """A step of one row takes 5 ms, one of four rows 8, and three tokens of a draft model 1.5."""
    times = lone(Drafts(1.0, 3, token_ms * 1e-3))
    steps = Counter(times[TOKENS // 2 :])
    assert set(list(steps.values())[1:-1]) == {4}, "every draft is right"
    ends = sorted(steps)[1:-1]
    assert {round(later - end, 3) for end, later in pairwise(ends)} == {8.0 + 3 * token_ms}


def test_wrong_drafts_cost_little_and_right_ones_gain_the_expected_tokens() -> None:
    plain_ms = seconds(lone(None, 4000))
    assert seconds(lone(Drafts(0.0), 4000)) == pytest.approx(plain_ms, rel=0.03)
    some = seconds(lone(Drafts(0.7, 3), 4000))
    expected = (1 + 0.7 + 0.7**2 + 0.7**3) * 5 / 8
    assert plain_ms / some == pytest.approx(expected, rel=0.05)
    assert seconds(lone(Drafts(0.7, 3, 20e-3), 4000)) == pytest.approx(plain_ms, rel=0.03), "they do not pay"


@pytest.mark.parametrize("pages", [4096, 260])
@pytest.mark.parametrize("token_s", [0.0, 1e-4])
def test_every_request_ends_whole_in_any_mode(pages: int, token_s: float) -> None:
    dice = random.Random(1)
    asked = [request(number * 0.02, dice.randrange(1, 900), dice.randrange(1, 150), key=number) for number in range(40)]
    for mode, roles in ((Mode.DISAGGREGATED, [Role.PREFILL, Role.DECODE]), TOGETHER):
        stage = cluster(mode, roles, pages=pages, drafts=Drafts(0.6, token_s=token_s))
        outcomes = stage.run(asked)
        assert sorted(id(result.asked) for result in outcomes) == sorted(map(id, asked))
        for outcome in outcomes:
            assert not outcome.error
            assert len(outcome.token_s(0.0)) == outcome.asked.new_tokens
            assert moments(outcome) == sorted(moments(outcome))
        for worker in stage.workers.values():
            assert worker.idle
            worker.pool.check_integrity()
            assert worker.load().decode_requests == 0
