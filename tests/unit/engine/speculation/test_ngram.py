"""Prompt look-up, against a search of all tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.speculation.ngram import LENGTHS, MATCH_MAX, NgramProposer
from engine.speculation.proposer import NO_DRAFT, Draft


def searched(tokens: list[int], most: int) -> Draft:
    """The draft by a search of every earlier position, newest first."""
    for length in LENGTHS:
        for at in range(len(tokens) - 1, length - 1, -1):
            if tokens[at - length : at] == tokens[-length:]:
                draft = [tokens[at + n % (len(tokens) - at)] for n in range(most)]
                longest = max(n for n in range(length, at + 1) if tokens[at - n : at] == tokens[-n:])
                return Draft(draft, min(MATCH_MAX, longest))
    return NO_DRAFT


@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.lists(st.integers(0, 3), max_size=20), max_size=4))
def test_drafts_are_those_of_a_search(prompt: list[int], more: list[list[int]]) -> None:
    proposer, tokens = NgramProposer(), list(prompt)
    proposer.begin("q", prompt)
    for some in more:
        proposer.extend("q", some)
        tokens += some
        for most in (1, 3, 7):
            assert proposer.propose("q", most) == searched(tokens, most)


def test_a_repetition_is_continued_beyond_the_newest_token() -> None:
    proposer = NgramProposer()
    proposer.begin("q", [5, 6, 7, 5, 6, 7, 5, 6])
    assert proposer.propose("q", 7) == Draft([7, 5, 6, 7, 5, 6, 7], 5)


def test_nothing_is_proposed_without_a_match() -> None:
    proposer = NgramProposer()
    proposer.begin("q", [5, 6, 7, 8])
    assert proposer.propose("q", 7) == NO_DRAFT


def test_requests_know_nothing_of_each_other_and_leave_nothing() -> None:
    proposer = NgramProposer()
    proposer.begin("one", [5, 6, 7, 8, 5, 6, 7])
    proposer.begin("other", [5, 6, 7])
    assert proposer.propose("other", 7) == NO_DRAFT
    with pytest.raises(ValueError, match="known"):
        proposer.begin("one", [1])
    proposer.leave("one")
    proposer.begin("one", [5, 6, 7])
    assert proposer.propose("one", 7) == NO_DRAFT
