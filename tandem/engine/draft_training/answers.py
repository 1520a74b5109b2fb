"""Outputs of a model, with the hidden state that each token was sampled from.

Draft heads are trained and evaluated on these outputs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.model_runner import ModelRunner
from tandem.engine.quality.teacher_forced import StepRows
from tandem.engine.steps.batch import StepBatch, StepRow
from tandem.engine.steps.sampling_metadata import SamplingInput
from tandem.protocol.messages import SamplingParams

BATCH = 32
"""The number of prompts that are decoded in the same steps."""

Drew = Callable[[Sequence[int], Sequence[int]], None]
"""A callback after each step: it gets the numbers of the step's prompts, in row order, and their sampled tokens."""


@dataclass(slots=True)
class Answer:
    """The output of a model for one prompt: one or more tokens, and their hidden states."""

    token_ids: list[int]
    hidden: Tensor
    """[tokens, H] in the model's dtype, on the host: the states before the final norm that tokens were sampled from."""


class AnswerGenerator:
    """Decodes prompts with a runner that keeps hidden states. No one else may use the runner."""

    def __init__(self, runner: ModelRunner, temperature: float, seed: int, drew: Drew | None = None) -> None:
        if runner.drawn_hidden is None:
            raise ValueError("the runner keeps no hidden states")
        self._runner = runner
        self._hidden = runner.drawn_hidden
        self._temperature = temperature
        self._seed = seed
        self._drew = drew

    def answers(self, prompts: Sequence[Sequence[int]], most: int) -> Iterator[list[Answer]]:
        """Decode all prompts, and yield the outputs of `BATCH` prompts at a time.

        An output has at most `most` tokens, and its last token may be an end-of-sequence token. The seed of a prompt is
        the generator's seed plus the prompt's index in `prompts`.
        """
        for start in range(0, len(prompts), BATCH):
            yield self._answer(start, prompts[start : start + BATCH], most)

    def _answer(self, first: int, prompts: Sequence[Sequence[int]], most: int) -> list[Answer]:
        rows = StepRows(self._runner, max(map(len, prompts)) + most, len(prompts))
        samplings = [SamplingParams(most, self._temperature, seed=self._seed + first + n) for n in range(len(prompts))]
        tokens: list[list[int]] = [[] for _ in prompts]
        hidden: list[list[Tensor]] = [[] for _ in prompts]

        def run(numbers: Sequence[int], pieces: Sequence[StepRow]) -> None:
            drawn = [
                piece._replace(draw=SamplingInput(samplings[number], len(tokens[number])))
                for number, piece in zip(numbers, pieces, strict=True)
            ]
            token_ids = [token for token in self._runner.run(StepBatch(drawn)).token_ids if token is not None]
            states = self._hidden[: len(numbers)].cpu().clone()
            for number, token, state in zip(numbers, token_ids, states, strict=True):
                tokens[number].append(token)
                hidden[number].append(state)
            if self._drew is not None:
                self._drew(numbers, token_ids)

        for number, prompt in enumerate(prompts):
            run([number], [rows.row(number, prompt, 0)])
        ends = self._runner.facts.eos_token_ids
        while running := [n for n, sampled in enumerate(tokens) if len(sampled) < most and sampled[-1] not in ends]:
            run(running, [rows.row(n, tokens[n][-1:], len(prompts[n]) + len(tokens[n]) - 1) for n in running])
        return [Answer(sampled, torch.stack(states)) for sampled, states in zip(tokens, hidden, strict=True)]


def tokens_a_step(guesses: Sequence[Sequence[Sequence[int]]], answers: Sequence[Sequence[int]], drafts: int) -> float:
    """Return the mean number of tokens per decode step with at most `drafts` draft tokens, on known outputs.

    `guesses` [outputs][tokens][heads] are the draft tokens predicted from the state that each token was sampled from.
    The first token of an output comes with its prompt, and the step after it has no draft. The result is 1 if no output
    has a second token.
    """
    steps = gained = 0
    for guessed, tokens in zip(guesses, answers, strict=True):
        place = 1
        while place < len(tokens):
            rest = tokens[place:]
            draft = guessed[place - 1][: min(drafts, len(rest) - 1)] if place > 1 else ()
            accepted = 0
            while accepted < len(draft) and draft[accepted] == rest[accepted]:
                accepted += 1
            place += 1 + accepted
            gained += 1 + accepted
            steps += 1
    return gained / steps if steps else 1.0
