"""The comparison of answers with drafts and without."""

from collections.abc import Sequence
from typing import Any, cast

import pytest

from benchmarks.speculation.local_worker import Answer, LocalWorker
from benchmarks.speculation.speed import compare
from tandem.protocol.messages import SamplingParams

PROMPTS = [[1], [2], [3]]


class AnswerGenerator:
    """A worker that answers at once; `wrong` prompts differently."""

    def __init__(self, wrong: Sequence[int] = ()) -> None:
        self._wrong = wrong

    def send(self, prompt: Sequence[int], sampling: SamplingParams) -> Answer:
        answer = Answer([prompt[0]] * sampling.max_tokens, first_s=1.0, last_s=2.0)
        if prompt[0] in self._wrong:
            answer.token_ids[-1] += 1
        answer.finished.set()
        return answer


def workers(*wrong: int) -> Sequence[LocalWorker]:
    return cast(Any, (AnswerGenerator(), AnswerGenerator(wrong)))


async def test_answers_that_differ_are_counted() -> None:
    plain, drafting, different = await compare(workers(2, 3), PROMPTS, 2, 5, exact=False)
    assert (plain.tokens, drafting.tokens, different) == (12, 12, 2)
    assert plain.seconds == drafting.seconds == 2.0


async def test_answers_that_must_be_the_same_and_are_not_are_an_error() -> None:
    assert (await compare(workers(), PROMPTS, 2, 5, exact=True))[2] == 0
    with pytest.raises(SystemExit, match="prompts 2 to 3 differ"):
        await compare(workers(3), PROMPTS, 2, 5, exact=True)
