"""Columns of rows and of draws read as the objects they were made of."""

import numpy as np

from engine.steps.batch import StepBatch, StepRow, TokenRows
from engine.steps.draws import Draw, Draws, History
from wire.messages import SamplingParams

PLAIN = Draw(SamplingParams(max_tokens=1, temperature=0.0), 0)
RANDOM = Draw(SamplingParams(max_tokens=1, temperature=0.7, top_k=3, seed=2**64 - 1, logprobs=2), 5)
PENALIZED = Draw(SamplingParams(max_tokens=1, temperature=0.0, presence_penalty=1.0), 9, History((1, 2), [3]))

ROWS = [
    StepRow((7,), 5, [3, 8], PLAIN),
    StepRow((9,), 0, [1], RANDOM, source=0),
    StepRow((4,), 9, [2, 4, 6], PENALIZED),
]
CHUNK = StepRow((5, 6), 0, [0], None)
LAST_CHUNK = StepRow((5,), 2, [0], RANDOM)


def test_rows_are_what_they_were() -> None:
    rows = TokenRows.of(ROWS)
    assert list(rows) == ROWS
    assert [rows[0], rows[-1]] == [ROWS[0], ROWS[-1]]
    assert rows[1:] == ROWS[1:]
    assert rows.context_tokens == 6 + 1 + 10


def test_a_step_has_rows_of_one_token_first() -> None:
    batch = StepBatch([*ROWS, CHUNK, LAST_CHUNK])
    assert (len(batch), len(batch.tokens), batch.chunks) == (5, 3, [CHUNK, LAST_CHUNK])
    assert batch.rows == [*ROWS, CHUNK, LAST_CHUNK]
    assert list(batch.draws) == [PLAIN, RANDOM, PENALIZED, RANDOM]
    planned = StepBatch([CHUNK], TokenRows.of(ROWS))
    assert planned.rows == [*ROWS, CHUNK]
    assert list(planned.draws) == [PLAIN, RANDOM, PENALIZED]


def test_draws_know_what_any_of_them_needs() -> None:
    draws = Draws.of([PLAIN, RANDOM]).followed_by([PENALIZED])
    assert list(draws) == [PLAIN, RANDOM, PENALIZED]
    assert list(draws[1:]) == [RANDOM, PENALIZED]
    assert (draws.greedy, draws.looks_back, draws.scored) == (False, True, True)
    plain = Draws.of([PLAIN, PLAIN])
    assert (plain.greedy, plain.looks_back, plain.scored) == (True, False, False)
    numbers = draws.numbers()
    assert numbers[0] == numbers[2] == 0.0
    assert 0.0 < numbers[1] < 1.0
    assert np.array_equal(numbers, draws[:].numbers())
