"""Requests scheduled into given steps: launched one ahead as a worker does it, or replayed with the tokens known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from tandem.engine.model_runner import ModelRunner
from tandem.engine.steps.batch import PendingStep, StepBatch, StepRow
from tandem.engine.steps.sampling_metadata import History, SamplingInput
from tandem.protocol.messages import SamplingParams, TokenLogprobs

Schedule = Sequence[Sequence[tuple[int, int]]]
"""For each step its rows: (index of the request, number of its tokens); one token after its prompt is a decode row."""


@dataclass
class Request:
    """A request; `done` of its tokens are in the cache once the launched steps have run."""

    prompt: list[int]
    sampling: SamplingParams
    answer: list[int] = field(default_factory=list)
    scores: list[TokenLogprobs | None] = field(default_factory=list)
    done: int = 0

    def __post_init__(self) -> None:
        self.history = History(self.prompt, self.answer) if self.sampling.penalized else None

    def row(self, tokens: int, pages: range, source: int | None) -> StepRow:
        """Returns the row of the next `tokens` tokens.

        `source`: the row of the step before, if that draws the token that is read here.
        """
        start, self.done = self.done, self.done + tokens
        index = self.done - len(self.prompt)
        draw = SamplingInput(self.sampling, index, self.history) if index >= 0 else None
        if start < len(self.prompt):
            return StepRow(self.prompt[start : self.done], start, pages, draw)
        known = len(self.answer) >= index
        assert known or source is not None
        return StepRow([self.answer[index - 1] if known else 0], start, pages, draw, None if known else source)


def launch_ahead(runner: ModelRunner, requests: Sequence[Request], schedule: Schedule) -> None:
    """Launches each step before the last one is read, so its rows take drawn tokens from the device."""
    pending: list[tuple[list[int], PendingStep]] = []

    def read() -> None:
        numbers, step = pending.pop(0)
        result = step()
        scores = result.logprobs or [None] * len(numbers)
        for number, token, score in zip(numbers, result.token_ids, scores, strict=True):
            if token is not None:
                requests[number].answer.append(token)
                requests[number].scores.append(score)

    for step in schedule:
        while len(pending) > int(runner.asynchronous):
            read()
        before = pending[-1][0] if pending else []
        rows = [
            requests[number].row(
                tokens, pages_of(number, requests, runner), before.index(number) if number in before else None
            )
            for number, tokens in step
        ]
        pending.append(([number for number, _ in step], runner.launch(StepBatch(rows))))
    while pending:
        read()


def logits_again(
    runner: ModelRunner, requests: Sequence[Request], schedule: Schedule
) -> list[tuple[SamplingInput, int, Tensor]]:
    """Replays the same steps, each once the one before is over, fed with the requests' answers instead of drawn tokens.

    Returns for each draw, in the order of steps and rows: the draw with the history before it; the index of the
    request; the logits [vocab] float32, on the host.
    """
    inputs = []
    again = [Request(request.prompt, request.sampling) for request in requests]
    for step in schedule:
        rows = []
        for number, tokens in step:
            mine = again[number]
            mine.answer[:] = requests[number].answer[: max(0, mine.done + tokens - len(mine.prompt))]
            rows.append((number, mine.row(tokens, pages_of(number, requests, runner), None)))
        logits = runner.logits(StepBatch([row for _, row in rows]))
        drawing = [(number, row.draw) for number, row in rows if row.draw is not None]
        for (number, draw), drawn_from in zip(drawing, logits.float().cpu(), strict=True):
            history = draw.history and History(draw.history.prompt, list(draw.history.answer))
            inputs.append((SamplingInput(draw.sampling, draw.index, history), number, drawn_from))
    return inputs


def pages_of(number: int, requests: Sequence[Request], runner: ModelRunner) -> range:
    """Returns the pages of one request, whose answer ends within its last page."""
    share = max(-(-len(request.prompt) // runner.page_tokens) for request in requests) + 1
    return range(number * share, (number + 1) * share)
