"""Greedy answers of a model, which proposers are replayed over."""

from collections.abc import Sequence

from tandem.engine.model_runner import ModelRunner
from tandem.engine.quality.teacher_forced import StepRows
from tandem.engine.steps.batch import StepBatch, StepRow

BATCH = 16
"""Prompts that are answered at once."""


def greedy_answers(runner: ModelRunner, prompts: Sequence[Sequence[int]], most: int) -> list[list[int]]:
    """Return an answer of at most `most` tokens to each prompt; the token that ends an answer is its last."""
    answers: list[list[int]] = []
    for start in range(0, len(prompts), BATCH):
        answers += _answer(runner, prompts[start : start + BATCH], most)
    return answers


def _answer(runner: ModelRunner, prompts: Sequence[Sequence[int]], most: int) -> list[list[int]]:
    rows = StepRows(runner, max(map(len, prompts)) + most, len(prompts))
    answers = [_run(runner, [rows.row(number, prompt, 0)]) for number, prompt in enumerate(prompts)]
    ends = runner.facts.eos_token_ids
    while running := [number for number, answer in enumerate(answers) if len(answer) < most and answer[-1] not in ends]:
        pieces = [
            rows.row(number, answers[number][-1:], len(prompts[number]) + len(answers[number]) - 1)
            for number in running
        ]
        for number, token in zip(running, _run(runner, pieces), strict=True):
            answers[number].append(token)
    return answers


def _run(runner: ModelRunner, rows: Sequence[StepRow]) -> list[int]:
    return [token for token in runner.run(StepBatch(rows)).token_ids if token is not None]
