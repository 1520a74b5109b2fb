"""Requests that meet in given steps: launched one ahead as a worker does it, or again with the tokens known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from engine.model_runner import ModelRunner
from engine.steps.batch import Draw, History, PendingStep, StepBatch, StepRow
from wire.messages import SamplingParams, TokenLogprobs

Schedule = Sequence[Sequence[tuple[int, int]]]
"""For each step its rows: the number of the request, and how many tokens of it; one token behind its prompt decodes."""


@dataclass
class Request:
    """`done` of its tokens are in the cache once the launched steps have run."""

    prompt: list[int]
    sampling: SamplingParams
    answer: list[int] = field(default_factory=list)
    scores: list[TokenLogprobs | None] = field(default_factory=list)
    done: int = 0

    def __post_init__(self) -> None:
        self.history = History(self.prompt, self.answer) if self.sampling.penalized else None

    def row(self, tokens: int, pages: range, source: int | None) -> StepRow:
        """Of the next `tokens` tokens; `source`: the row of the step before, if that draws what is read here."""
        start, self.done = self.done, self.done + tokens
        index = self.done - len(self.prompt)
        draw = Draw(self.sampling, index, self.history) if index >= 0 else None
        if start < len(self.prompt):
            return StepRow(self.prompt[start : self.done], start, pages, draw)
        known = len(self.answer) >= index
        assert known or source is not None
        return StepRow([self.answer[index - 1] if known else 0], start, pages, draw, None if known else source)


def launch_ahead(runner: ModelRunner, requests: Sequence[Request], schedule: Schedule) -> None:
    """Each step is launched before the last one is read, and its rows take what that one draws from the device."""
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
) -> list[tuple[Draw, int, Tensor]]:
    """The same steps, each once the one before is over, fed with the requests' answers whatever `runner` would say.

    For each draw, in the order of steps and rows: what is asked, with the history before it; the number of the request;
    the logits [vocab] float32, on the host.
    """
    found = []
    again = [Request(each.prompt, each.sampling) for each in requests]
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
            found.append((Draw(draw.sampling, draw.index, history), number, drawn_from))
    return found


def pages_of(number: int, requests: Sequence[Request], runner: ModelRunner) -> range:
    """Of one request, whose answer ends within its page."""
    share = max(-(-len(each.prompt) // runner.page_tokens) for each in requests) + 1
    return range(number * share, (number + 1) * share)
