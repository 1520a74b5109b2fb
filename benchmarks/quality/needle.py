"""Needle retrieval: a number occurs once in a long text, and the prompt ends with a question for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.engine.model_runner import ModelRunner
from tandem.engine.quality.teacher_forced import StepRows
from tandem.engine.steps.batch import StepBatch

DEPTHS = (0.1, 0.5, 0.9)
"""The positions of the number, as fractions of the text."""
_ANSWER_TOKENS = 12
"""Tokens within which the answer must contain the number: 6 digits and a space take at most 12."""


@dataclass(frozen=True, slots=True)
class Needles:
    """Prompts that end with a question for a number hidden in them, and these numbers."""

    prompts: Sequence[Sequence[int]]
    numbers: Sequence[str]


def make_needles(encode: Callable[[str], Sequence[int]], text: str, tokens: int) -> Needles:
    """Return a prompt of `tokens` tokens for each of `DEPTHS`: `text`, repeated as needed, surrounds the number."""
    special = list(encode(""))
    hay = list(encode(text))[len(special) :]
    prompts, numbers = [], []
    for index, depth in enumerate(DEPTHS):
        number = str(271828 + 101_117 * index)
        needle, question = (
            list(encode(part))[len(special) :]
            for part in (
                f"\n\nThe secret number of the archive is {number}.\n\n",
                "\n\nQuestion: What is the secret number of the archive?\nAnswer: The secret number of the archive is",
            )
        )
        free = tokens - len(special) - len(needle) - len(question)
        filled = (hay * (free // len(hay) + 1))[:free]
        cut = int(depth * free)
        prompts.append([*special, *filled[:cut], *needle, *filled[cut:], *question])
        numbers.append(number)
    return Needles(prompts, numbers)


def found_needles(runner: ModelRunner, decode: Callable[[Sequence[int]], str], needles: Needles, chunk: int) -> int:
    """Return how many greedy answers contain the number. Prompts are computed in steps of `chunk` tokens."""
    answers = (decode(_answer(runner, prompt, chunk)) for prompt in needles.prompts)
    return sum(number in answer for number, answer in zip(needles.numbers, answers, strict=True))


def _answer(runner: ModelRunner, prompt: Sequence[int], chunk: int) -> list[int]:
    rows = StepRows(runner, len(prompt) + _ANSWER_TOKENS, 1)
    drawn = 0
    for start in range(0, len(prompt), chunk):
        last = start + chunk >= len(prompt)
        piece = prompt[start : start + chunk]
        (token,) = runner.run(StepBatch([rows.row(0, piece, start, drawn=last)])).token_ids
        drawn = token if token is not None else drawn
    answer = [drawn]
    for start in range(len(prompt), len(prompt) + _ANSWER_TOKENS - 1):
        (token,) = runner.run(StepBatch([rows.row(0, answer[-1:], start)])).token_ids
        answer.append(token if token is not None else 0)
    return answer
