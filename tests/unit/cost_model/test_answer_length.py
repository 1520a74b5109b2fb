"""Expected lengths of answers: the longest until enough is known, then what most of those that ended did."""

import random

from tandem.cost_model.answer_length import SEEN_MIN, UNSEEN_TOKENS, WINDOW, AnswerLengths


def taught(lengths: list[int], limit: int = 500) -> AnswerLengths:
    answers = AnswerLengths()
    for tokens in lengths:
        answers.learn(limit, tokens)
    return answers


def test_an_answer_is_expected_to_reach_its_limit_until_enough_have_ended() -> None:
    assert taught([3] * (SEEN_MIN - 1)).expect(500) == 500
    assert taught([3] * SEEN_MIN).expect(500) == 3


def test_a_limit_of_the_whole_context_is_not_expected_before() -> None:
    """Requests without a limit of their own had a pool to themselves, one after the other."""
    answers = taught([3] * (SEEN_MIN - 1), limit=100_000)
    assert answers.expect(100_000) == AnswerLengths().expect(100_000) == AnswerLengths().mean(100_000) == UNSEEN_TOKENS
    for so_far in (UNSEEN_TOKENS // 2, UNSEEN_TOKENS, 60_000):
        assert so_far < answers.expect(100_000, so_far) == min(100_000, max(UNSEEN_TOKENS, 2 * so_far))
    assert answers.expect(100_000, to_the_limit=True) == AnswerLengths().mean(100_000, to_the_limit=True) == 100_000


def test_answers_with_limits_of_another_size_do_not_count() -> None:
    answers = taught([3] * SEEN_MIN, limit=500)
    assert answers.expect(200) == 200
    assert answers.expect(300) == 3


def test_four_in_five_are_not_longer_than_expected() -> None:
    drawn = random.Random(4)
    answers = taught([min(1000, int(drawn.expovariate(0.01)) + 1) for _ in range(WINDOW)], limit=1000)
    longer = sum(int(drawn.expovariate(0.01)) + 1 > answers.expect(1000) for _ in range(2000))
    assert 0.15 < longer / 2000 < 0.26


def test_of_a_long_answer_only_longer_ones_count() -> None:
    answers = taught([*range(10, 110)])
    assert answers.expect(500) == 90
    assert answers.expect(500, 99) == 108
    assert answers.expect(500, 108) == 109
    assert answers.expect(500, 109) == 2 * 109
    assert answers.expect(200, 150) == 200


def test_a_forecast_exceeds_the_present_length() -> None:
    answers = taught([1, 5, 5, 9, 30] * 10)
    for limit in (256, 300, 511):
        for tokens in range(limit):
            assert tokens < answers.expect(limit, tokens) <= limit


def test_old_answers_are_forgotten() -> None:
    assert taught([400] * WINDOW + [7] * WINDOW).expect(500) == 7


def test_an_answer_that_ignores_eos_reaches_its_limit() -> None:
    assert taught([3] * 100).expect(500, to_the_limit=True) == 500


def test_the_mean_is_that_of_answers_with_such_a_limit() -> None:
    lengths = AnswerLengths()
    assert lengths.mean(100) == 100.0
    for tokens in (10, 30):
        lengths.learn(100, tokens)
    assert lengths.mean(100) == 20.0
    assert lengths.mean(400) == 400.0
    assert lengths.mean(100, to_the_limit=True) == 100.0
    for _ in range(WINDOW):
        lengths.learn(100, 50)
    assert lengths.mean(100) == 50.0
