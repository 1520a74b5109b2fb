"""Columns of rows and of draws read as the objects they were made of."""

import numpy as np
import pytest

from tandem.engine.steps.batch import StepBatch, StepRow, TokenRows
from tandem.engine.steps.sampling_metadata import History, SamplingInput, SamplingMetadata
from tandem.protocol.messages import SamplingParams

PLAIN = SamplingInput(SamplingParams(max_tokens=1, temperature=0.0), 0)
RANDOM = SamplingInput(SamplingParams(max_tokens=1, temperature=0.7, top_k=3, seed=2**64 - 1, logprobs=2), 5)
PENALIZED = SamplingInput(SamplingParams(max_tokens=1, temperature=0.0, presence_penalty=1.0), 9, History((1, 2), [3]))

ROWS = [
    StepRow((7,), 5, [3, 8], PLAIN),
    StepRow((9,), 0, [1], RANDOM, source=0),
    StepRow((4,), 9, [2, 4, 6], PENALIZED),
]
CHUNK = StepRow((5, 6), 0, [0], None)
LAST_CHUNK = StepRow((5,), 2, [0], RANDOM)
NO_END_YET = SamplingInput(SamplingParams(max_tokens=9, min_tokens=3), 2)
END_ALLOWED = SamplingInput(SamplingParams(max_tokens=9, min_tokens=3), 3)
BIASED = SamplingInput(SamplingParams(max_tokens=9, logit_bias=((5, 1.0),)), 8)


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
    draws = SamplingMetadata.of([PLAIN, RANDOM]).followed_by([PENALIZED])
    assert list(draws) == [PLAIN, RANDOM, PENALIZED]
    assert list(draws[1:]) == [RANDOM, PENALIZED]
    assert (draws.greedy, draws.looks_back, draws.scored) == (False, True, True)
    plain = SamplingMetadata.of([PLAIN, PLAIN])
    assert (plain.greedy, plain.looks_back, plain.scored) == (True, False, False)
    numbers = draws.numbers()
    assert numbers[0] == numbers[2] == 0.0
    assert 0.0 < numbers[1] < 1.0
    assert np.array_equal(numbers, draws[:].numbers())


@pytest.mark.parametrize(
    ("first", "then", "masked"),
    [
        ([PLAIN], [BIASED], True),
        ([BIASED], [PLAIN], True),
        ([PLAIN], [NO_END_YET], True),
        ([NO_END_YET], [PLAIN], True),
        ([PLAIN, END_ALLOWED], [END_ALLOWED], False),
        ([BIASED], [], True),
    ],
)
def test_logits_are_changed_if_any_row_of_either_part_changes_them(
    first: list[SamplingInput], then: list[SamplingInput], masked: bool
) -> None:
    assert SamplingMetadata.of(first).followed_by(then).masked == masked
    rows = [StepRow((7,), 5, [3], draw) for draw in first]
    chunks = [StepRow((5, 6), 0, [0], draw) for draw in then]
    assert StepBatch(chunks, TokenRows.of(rows)).draws.masked == masked
