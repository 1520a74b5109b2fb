"""Look-up in earlier answers of the same tenant: against a search, never across tenants, within its memory."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.speculation import suffix
from tandem.engine.speculation.ngram import NgramProposer
from tandem.engine.speculation.proposer import NGRAM_MAX, NO_DRAFT, Draft, DraftSource, ProposerName
from tandem.engine.speculation.suffix import SuffixProposer


def prior_output_tokens(
    proposer: SuffixProposer, answer: Sequence[int], salt: str = "", prompt: Sequence[int] = (7, 8, 9)
) -> None:
    """Let a request come, be answered and leave."""
    proposer.begin("prior_output_tokens", prompt, salt)
    for token in answer:
        proposer.extend("prior_output_tokens", [token])
    proposer.leave("prior_output_tokens")


def suffix_draft(token_ids: Sequence[int], match: int) -> Draft:
    return Draft(token_ids, DraftSource(ProposerName.SUFFIX, match))


def ngram_draft(token_ids: Sequence[int], match: int) -> Draft:
    return Draft(token_ids, DraftSource(ProposerName.NGRAM, match))


def asked(proposer: SuffixProposer, tokens: Sequence[int], most: int = 1, salt: str = "") -> Draft:
    """Let a request come, return its first draft and let it leave."""
    proposer.begin("asked", tokens, salt)
    draft = proposer.propose("asked", most)
    proposer.leave("asked")
    return draft


def searched(tokens: Sequence[int], answers: Sequence[Sequence[int]], most: int) -> Draft:
    """The same by brute force; each answer has the tokens before its own."""
    alone = NgramProposer()
    alone.begin(0, tokens, "")
    own = alone.propose(0, most)
    padded = [-1] * NGRAM_MAX + list(tokens)
    for length in range(NGRAM_MAX, 0, -1):
        if own.source.match >= length:
            return own
        for answer in reversed(answers):
            for position in range(len(answer) - 1, NGRAM_MAX - 1, -1):
                if list(answer[position - length : position]) == padded[-length:]:
                    return suffix_draft(list(answer[position : position + most]), length)
    return NO_DRAFT


def test_an_earlier_answer_is_followed() -> None:
    proposer = SuffixProposer()
    prior_output_tokens(proposer, [1, 2, 3, 4, 5])
    assert asked(proposer, [60, 1, 2, 3], 4) == suffix_draft([4, 5], 3)
    assert asked(proposer, [60, 61, 2, 3], 1) == suffix_draft([4], 2)
    assert asked(proposer, [60, 61, 62, 3], 1) == suffix_draft([4], 1)
    assert asked(proposer, [60, 61, 62, 5], 1) == NO_DRAFT


def test_the_beginning_of_an_answer_is_found_after_the_end_of_its_prompt() -> None:
    proposer = SuffixProposer()
    prior_output_tokens(proposer, [1, 2])
    assert asked(proposer, [60, 7, 8, 9], 2) == suffix_draft([1, 2], 3)


def test_prompts_of_others_are_not_proposed() -> None:
    proposer = SuffixProposer()
    prior_output_tokens(proposer, [1], prompt=[20, 21, 22, 23, 24])
    assert asked(proposer, [20, 21, 22]) == NO_DRAFT


def test_an_answer_is_found_when_its_request_has_left() -> None:
    proposer = SuffixProposer()
    proposer.begin("running", [7, 8, 9], "")
    proposer.extend("running", [1, 2, 3])
    assert asked(proposer, [1, 2]) == NO_DRAFT
    proposer.leave("running")
    assert asked(proposer, [1, 2]) == suffix_draft([3], 2)


def test_of_equal_matches_the_request_itself_goes_first_and_a_longer_one_before_both() -> None:
    proposer = SuffixProposer()
    prior_output_tokens(proposer, [1, 2, 3, 4])
    assert asked(proposer, [1, 2, 3, 6, 1, 2, 3]) == ngram_draft([6], 3)
    assert asked(proposer, [2, 3, 6, 1, 2, 3]) == suffix_draft([4], 3)


@pytest.mark.parametrize(("theirs", "mine"), [("a", "b"), ("", "b"), ("a", "")])
def test_tenants_never_share_answers(theirs: str, mine: str) -> None:
    proposer = SuffixProposer()
    prior_output_tokens(proposer, [1, 2, 3, 4], theirs)
    assert asked(proposer, [7, 8, 9], salt=mine) == NO_DRAFT
    assert asked(proposer, [1, 2, 3], salt=mine) == NO_DRAFT
    prior_output_tokens(proposer, [1, 2, 3, 5], mine)
    assert asked(proposer, [1, 2, 3], salt=theirs).token_ids == [4]
    assert asked(proposer, [1, 2, 3], salt=mine).token_ids == [5]


def test_the_oldest_answers_are_dropped_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "ANSWERS_MAX", 10)
    proposer = SuffixProposer()
    prior_output_tokens(proposer, [1, 2, 3, 4])
    prior_output_tokens(proposer, [11, 12, 13, 14, 15], "a")
    assert asked(proposer, [1, 2]).token_ids == [3]
    prior_output_tokens(proposer, [21, 22], "b")
    assert asked(proposer, [1, 2]) == NO_DRAFT
    assert asked(proposer, [2, 3]) == NO_DRAFT
    assert asked(proposer, [11, 12], salt="a").token_ids == [13]
    assert asked(proposer, [7, 8, 9], salt="b").token_ids == [21]


def test_a_newer_answer_outlives_an_older_one_with_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "ANSWERS_MAX", 9)
    proposer = SuffixProposer()
    prior_output_tokens(proposer, [1, 2, 3, 4])
    prior_output_tokens(proposer, [1, 2, 3, 5])
    prior_output_tokens(proposer, [30, 31, 32])
    assert asked(proposer, [1, 2, 3]).token_ids == [5]


def test_an_answer_that_is_longer_than_the_memory_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "ANSWERS_MAX", 3)
    proposer = SuffixProposer()
    prior_output_tokens(proposer, [1, 2, 3, 4])
    assert asked(proposer, [1, 2]) == NO_DRAFT
    prior_output_tokens(proposer, [5, 6])
    assert asked(proposer, [7, 8, 9]).token_ids == [5]


def test_a_request_begins_once_and_may_come_again() -> None:
    proposer = SuffixProposer()
    proposer.begin("a", [1], "")
    with pytest.raises(ValueError, match="known already"):
        proposer.begin("a", [1], "")
    proposer.leave("a")
    with pytest.raises(KeyError):
        proposer.propose("a", 1)
    proposer.begin("a", [1, 2, 1], "")
    assert proposer.propose("a", 1) == ngram_draft([2], 1)


TOKENS = st.lists(st.integers(0, 3), max_size=8)
SALTS = st.sampled_from(["", "a"])


@given(st.lists(st.tuples(SALTS, TOKENS, TOKENS), max_size=12), SALTS, TOKENS, st.integers(1, 5), st.integers(4, 20))
def test_equals_a_search_of_what_is_kept(
    done: list[tuple[str, list[int], list[int]]], salt: str, tokens: list[int], most: int, limit: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix, "ANSWERS_MAX", limit)
        proposer = SuffixProposer()
        kept: list[tuple[str, list[int]]] = []
        for theirs, prompt, answer in done:
            prior_output_tokens(proposer, answer, theirs, [9, *prompt])
            if answer:
                kept.append((theirs, [*([-1] * NGRAM_MAX + [9, *prompt])[-NGRAM_MAX:], *answer]))
            while sum(len(answer) - NGRAM_MAX for _, answer in kept) > limit:
                kept.pop(0)
        same = [answer for theirs, answer in kept if theirs == salt]
        assert asked(proposer, [9, *tokens], most, salt) == searched([9, *tokens], same, most)
        assert proposer._answers.tokens == sum(len(answer) - NGRAM_MAX for _, answer in kept)
        assert proposer._answers._occurrences.keys() == {theirs for theirs, _ in kept}
