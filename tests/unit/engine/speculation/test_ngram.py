"""Prompt look-up against a search of the whole history, and its state."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.speculation.ngram import NgramProposer
from tandem.engine.speculation.ngram_history import NOTED_MAX
from tandem.engine.speculation.proposer import MATCH_MAX, NGRAM_MAX, NO_DRAFT, Draft, DraftSource, ProposerName


def begun(*token_ids: int) -> NgramProposer:
    proposer = NgramProposer()
    proposer.begin("a", token_ids, "")
    return proposer


def ngram_draft(token_ids: Sequence[int], match: int) -> Draft:
    return Draft(token_ids, DraftSource(ProposerName.NGRAM, match))


def searched(tokens: Sequence[int], most: int) -> Draft:
    """The same by brute force: the newest earlier occurrence of the longest n-gram."""
    for length in range(NGRAM_MAX, 0, -1):
        last = list(tokens[-length:])
        for position in range(len(tokens) - 1, length - 1, -1):
            if len(tokens) > length and list(tokens[position - length : position]) == last:
                history, match = list(tokens), 0
                for _ in range(most):
                    history.append(history[position + len(history) - len(tokens)])
                while match < min(MATCH_MAX, position) and tokens[position - 1 - match] == tokens[-1 - match]:
                    match += 1
                return ngram_draft(history[len(tokens) :], match)
    return NO_DRAFT


def test_proposes_what_followed_the_last_tokens() -> None:
    assert begun(1, 2, 3, 4, 5, 6, 1, 2, 3).propose("a", 2) == ngram_draft([4, 5], 3)


def test_a_longer_match_goes_before_a_newer_one() -> None:
    assert begun(1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3).propose("a", 1) == ngram_draft([4], 3)


def test_of_equal_matches_the_newest_is_taken() -> None:
    assert begun(2, 3, 4, 9, 2, 3, 5, 7, 2, 3).propose("a", 1) == ngram_draft([5], 2)


def test_match_lengths_are_counted_up_to_a_limit() -> None:
    run = list(range(20, 20 + MATCH_MAX + 3))
    assert begun(*run, 7, *run).propose("a", 1) == ngram_draft([7], MATCH_MAX)


def test_a_match_that_reaches_the_newest_token_goes_on_periodically() -> None:
    assert begun(5, 6, 5, 6, 5, 6).propose("a", 5).token_ids == [5, 6, 5, 6, 5]
    assert begun(4, 4, 4, 4).propose("a", 3).token_ids == [4, 4, 4]


@pytest.mark.parametrize("token_ids", [(), (1,), (1, 2), (1, 2, 3, 4)])
def test_without_an_earlier_occurrence_there_is_no_draft(token_ids: Sequence[int]) -> None:
    assert begun(*token_ids).propose("a", 4) == NO_DRAFT


def test_one_token_is_a_match() -> None:
    assert begun(1, 2, 3, 1).propose("a", 2) == ngram_draft([2, 3], 1)
    assert begun(1, 1).propose("a", 2) == ngram_draft([1, 1], 1)


def test_of_a_long_prompt_only_the_newest_tokens_are_looked_up() -> None:
    filler = range(100, 100 + NOTED_MAX)
    assert begun(1, 2, 3, *filler[:-5], 1, 2).propose("a", 1) == ngram_draft([3], 2)
    assert begun(1, 2, 3, *filler[:-2], 1, 2).propose("a", 1) == NO_DRAFT


def test_requests_do_not_see_each_other() -> None:
    proposer = begun(1, 2, 3, 4)
    proposer.begin("b", (2, 3), "")
    assert proposer.propose("b", 1) == NO_DRAFT
    proposer.leave("a")
    with pytest.raises(KeyError):
        proposer.propose("a", 1)
    proposer.begin("a", (8, 9), "")
    assert proposer.propose("a", 1) == NO_DRAFT


def test_a_request_begins_once() -> None:
    with pytest.raises(ValueError, match="known already"):
        begun(1).begin("a", (1,), "")


def test_the_tokens_that_were_given_are_not_kept_by_reference() -> None:
    given_ids = [1, 2, 3, 1, 2]
    proposer = begun()
    proposer.begin("b", given_ids, "")
    given_ids.clear()
    assert proposer.propose("b", 1) == ngram_draft([3], 2)


TOKENS = st.lists(st.integers(0, 3), max_size=12)


@given(
    prompt=TOKENS | st.lists(st.integers(0, 2), max_size=60),
    pieces=st.lists(TOKENS, max_size=8),
    most=st.integers(1, 7),
)
def test_equals_a_search_of_the_whole_history(prompt: list[int], pieces: list[list[int]], most: int) -> None:
    proposer, tokens = begun(*prompt), list(prompt)
    for piece in pieces:
        proposer.extend("a", piece)
        tokens += piece
        if sum(piece) % 2:
            assert proposer.propose("a", most) == searched(tokens, most)
    assert proposer.propose("a", most) == searched(tokens, most)
