"""The proposer that knows the answer: how often it is right, and where."""

from itertools import pairwise

import pytest

from benchmarks.speculation.oracle import ORACLE, OracleProposer
from tandem.engine.speculation.proposer import NO_DRAFT, Draft

PROMPT = [7, 8, 9]
ANSWER = [n % 50 for n in range(10_000)]
WHOLE = [*PROMPT, *ANSWER]


def begun(alpha: float, seed: int = 0) -> OracleProposer:
    proposer = OracleProposer(lambda _: WHOLE, alpha, seed)
    proposer.begin("a", PROMPT, "")
    return proposer


def test_of_certain_knowledge_all_is_right() -> None:
    proposer = begun(1.0)
    assert proposer.propose("a", 4) == Draft(ANSWER[:4], ORACLE)
    proposer.extend("a", ANSWER[:2])
    assert proposer.propose("a", 3) == Draft(ANSWER[2:5], ORACLE)


def test_of_no_knowledge_all_is_wrong() -> None:
    drafted = begun(0.0).propose("a", len(ANSWER)).token_ids
    assert len(drafted) == len(ANSWER)
    assert not any(guess == token for guess, token in zip(drafted, ANSWER, strict=True))
    assert min(drafted) >= 0


@pytest.mark.parametrize("alpha", [0.3, 0.7])
def test_each_position_is_right_with_the_given_probability(alpha: float) -> None:
    drafted = begun(alpha).propose("a", len(ANSWER)).token_ids
    right = [guess == token for guess, token in zip(drafted, ANSWER, strict=True)]
    assert sum(right) / len(right) == pytest.approx(alpha, abs=0.03)
    after = [now for before, now in pairwise(right) if before]
    assert sum(after) / len(after) == pytest.approx(alpha, abs=0.03)


def test_a_place_has_the_same_guess_however_it_is_asked_for() -> None:
    whole = begun(0.5, seed=3).propose("a", 20).token_ids
    proposer = begun(0.5, seed=3)
    proposer.extend("a", ANSWER[:8])
    assert proposer.propose("a", 12).token_ids == whole[8:]
    assert begun(0.5, seed=4).propose("a", 20).token_ids != whole


def test_no_draft_after_the_end_of_the_answer() -> None:
    proposer = begun(1.0)
    proposer.extend("a", ANSWER[:-1])
    assert proposer.propose("a", 4) == Draft(ANSWER[-1:], ORACLE)
    proposer.extend("a", ANSWER[-1:])
    assert proposer.propose("a", 4) == NO_DRAFT


def test_a_request_begins_once_and_leaves() -> None:
    proposer = begun(1.0)
    with pytest.raises(ValueError, match="known already"):
        proposer.begin("a", PROMPT, "")
    proposer.leave("a")
    with pytest.raises(KeyError):
        proposer.propose("a", 1)


@pytest.mark.parametrize("alpha", [-0.1, 1.1])
def test_alpha_is_a_probability(alpha: float) -> None:
    with pytest.raises(ValueError, match="probability"):
        begun(alpha)
