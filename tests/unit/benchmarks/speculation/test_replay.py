"""Replays of known answers: steps and acceptance counted by hand; and the sets of prompts."""

from collections.abc import Hashable, Sequence

import pytest

from benchmarks.speculation import acceptance
from benchmarks.speculation.oracle import OracleProposer
from benchmarks.speculation.prompt_sets import SETS, TEXTS, read_prompts
from benchmarks.speculation.replay import Replay, measure_time
from tandem.engine.speculation.ngram import NgramProposer
from tandem.engine.speculation.proposer import Draft, DraftSource, ProposerName

PROMPT = [7, 8]
ANSWER = list(range(20, 33))
SOURCE = DraftSource(ProposerName.NGRAM, 5)


class Scripted(NgramProposer):
    """Proposes what it is told, and notes what it was asked for."""

    def __init__(self, *drafts: Sequence[int]) -> None:
        super().__init__()
        self.drafts = list(drafts)
        self.asked: list[int] = []

    def propose(self, key: Hashable, most: int) -> Draft:
        self.asked.append(most)
        return Draft(self.drafts.pop(0) if self.drafts else (), SOURCE)


def replayed(proposer: NgramProposer | OracleProposer, most: int, answer: Sequence[int] = ANSWER) -> Replay:
    replay = Replay()
    replay.add(proposer, 0, PROMPT, answer, most)
    return replay


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 7])
def test_drafts_that_are_right_and_wrong(most: int) -> None:
    whole = [*PROMPT, *ANSWER]
    right = replayed(OracleProposer(lambda _: whole, 1.0), most)
    assert right.steps == -(-(len(ANSWER) - 1) // (most + 1))
    assert right.accepted == right.drafted
    wrong = replayed(OracleProposer(lambda _: whole, 0.0), most)
    assert (wrong.steps, wrong.tokens_a_step) == (len(ANSWER) - 1, 1)
    assert not wrong.accepted.total()


def test_a_draft_counts_up_to_the_first_wrong_token() -> None:
    proposer = Scripted([21, 22, 99, 24], [99, 25])
    replay = replayed(proposer, 4, ANSWER[:7])
    assert (replay.steps, replay.tokens) == (4, 6)
    assert (replay.drafted, replay.accepted) == ({SOURCE: 6}, {SOURCE: 2})
    assert (replay.first_drafted, replay.first_accepted) == ({SOURCE: 2}, {SOURCE: 1})


def test_no_draft_is_asked_for_the_token_behind_the_last() -> None:
    proposer = Scripted()
    replayed(proposer, 4, ANSWER[:5])
    assert proposer.asked == [3, 2, 1]
    assert not replayed(proposer, 4, ANSWER[:1]).steps


def test_one_worker_learns_from_its_answers() -> None:
    twice = [([1, 2], ANSWER), ([3, 4, 20], ANSWER)]
    found = acceptance.replay_all(acceptance.SuffixProposer, {"copying": twice})["copying"][4]
    assert found.steps < acceptance.replay_all(NgramProposer, {"copying": twice})["copying"][4].steps == 24


@pytest.mark.parametrize("make", acceptance.PROPOSERS.values(), ids=acceptance.PROPOSERS)
def test_times_are_measured(make: type[NgramProposer]) -> None:
    spent = measure_time(make)
    assert min(spent.begin_ms, spent.step_us) > 0


@pytest.mark.parametrize("name", SETS)
def test_a_set_has_48_prompts(name: str) -> None:
    assert len(set(read_prompts(name))) == 48


def test_the_texts_are_small() -> None:
    assert sum(file.stat().st_size for file in TEXTS.iterdir()) < 400_000
