"""Parses the text of the answers to a call, collects complete answers, and chooses the best ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from router.api.prompt_replies import PromptForm, PromptReply
from router.requests.answer import AnswerEnd
from router.requests.choices import Choices
from router.text.answer_syntax.formats import AnswerSyntax
from router.text.answer_syntax.parser import AnswerDelta, AnswerParser
from router.text.token_scores import TokenScore


class AnswerParsers:
    """The parsers of the answers to one call, one per answer; without an answer syntax, all text is content.

    The reply owns it.
    """

    def __init__(self, syntax: AnswerSyntax | None) -> None:
        self._syntax = syntax
        self._parsers: dict[int, AnswerParser] = {}

    def feed(self, index: int, text: str) -> AnswerDelta:
        """Parse the next text of answer number `index`, and return the parts that became final."""
        if self._syntax is None:
            return AnswerDelta(text)
        if index not in self._parsers:
            self._parsers[index] = self._syntax.parser()
        return self._parsers[index].feed(text)

    def finish(self, index: int) -> AnswerDelta:
        """Return the parts of an ended answer that its parser has held back."""
        parser = self._parsers.get(index)
        return AnswerDelta() if parser is None else parser.finish()

    def called(self, index: int) -> bool:
        """Return True if the answer has a tool call."""
        parser = self._parsers.get(index)
        return parser is not None and parser.called


@dataclass(frozen=True, slots=True)
class CompleteAnswer:
    """One complete answer of a call that is not streamed. An immutable value."""

    text: str
    token_ids: Sequence[int]
    scores: Sequence[TokenScore]
    ending: AnswerEnd
    prompt: PromptReply | None = None
    """The prompt that the reply shows with this answer; None if it shows none."""

    @property
    def mean_logprob(self) -> float:
        """The mean log probability of the answer's tokens; 0 without scores."""
        return sum(score.chosen.logprob for score in self.scores) / max(1, len(self.scores))


async def collected(choices: Choices, form: PromptForm) -> list[CompleteAnswer]:
    """Read all answers to their end and return them. Raises the first `TandemError` of any answer."""
    texts: dict[int, list[str]] = defaultdict(list)
    ids: dict[int, list[int]] = defaultdict(list)
    scores: dict[int, list[TokenScore]] = defaultdict(list)
    endings: dict[int, AnswerEnd] = {}
    while not choices.over:
        index, event = await choices.next()
        event = form.shown(event)
        if isinstance(event, AnswerEnd):
            endings[index] = event
        else:
            texts[index].append(event.text)
            ids[index].extend(event.token_ids)
            scores[index].extend(event.scores)
    return [
        CompleteAnswer("".join(texts[index]), ids[index], scores[index], endings[index]) for index in sorted(endings)
    ]


def best_of(answers: Sequence[CompleteAnswer], kept: int, made: int) -> list[CompleteAnswer]:
    """Return, of the `made` answers to each prompt, the `kept` answers with the highest mean log probability."""
    if kept == made:
        return [*answers]
    best: list[CompleteAnswer] = []
    for first in range(0, len(answers), made):
        best += sorted(answers[first : first + made], key=lambda answer: answer.mean_logprob, reverse=True)[:kept]
    return best
