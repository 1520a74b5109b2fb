"""The interface of replies, whole or streamed, and the replies whose events have names."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from router.api.answers import AnswerParsers
from router.api.prompt_replies import PromptReplies, PromptReply
from router.requests.answer import AnswerChunk, Ending
from router.requests.choices import Choices
from router.requests.request import Admitted
from router.text.answer_syntax.parser import AnswerDelta
from tandem.protocol.errors import TandemError


class Reply(Protocol):
    """The reply to one call: a body, or the events of a stream as bytes ready to send, empty where there is none."""

    answer_id: str
    """The id of the reply, which its header has, too."""

    def opening(self, choices: int = 1) -> bytes:
        """Return the first events, for this number of answers."""

    def event(self, event: AnswerChunk | Ending) -> AnswerChunk | Ending:
        """Return an event of an answer as the reply has it."""

    def prompt(self, index: int, prompt: PromptReply) -> bytes:
        """Return the event with the prompt of answer number `index`; may run in any thread."""

    def chunk(self, index: int, chunk: AnswerChunk) -> bytes:
        """Return the events for the next part of answer number `index`."""

    def ending(self, index: int, ending: Ending) -> bytes:
        """Return the last events of an answer."""

    def closing(self, endings: Mapping[int, Ending]) -> bytes:
        """Return the events after the last answer."""

    def failure(self, error: TandemError) -> bytes:
        """Return the events that end the stream with an error."""

    async def whole(self, choices: Choices, prompts: PromptReplies) -> bytes:
        """Read all answers to their ends and return the body of a reply that is not streamed.

        Raises the first `TandemError` of any answer.
        """


@dataclass(frozen=True, slots=True)
class ReplyFacts:
    """The facts of a reply that no answer changes."""

    request_id: str
    model: str
    created: int
    """Unix time in seconds."""


class NamedEventsReply(ABC):
    """A `Reply` with one answer, whose stream has events with names.

    A reply that is not streamed is built in the same way, from the same parts, but has no events.
    """

    answer_id: str
    """The `id` of the reply."""

    def __init__(self, admitted: Admitted, *, streamed: bool) -> None:
        self._streamed = streamed
        self._parsers = AnswerParsers(admitted.syntax)

    @abstractmethod
    def opening(self, choices: int = 1) -> bytes:
        """See `Reply`."""

    def event(self, event: AnswerChunk | Ending) -> AnswerChunk | Ending:
        """See `Reply`."""
        return event

    def prompt(self, _index: int, _prompt: PromptReply) -> bytes:
        """See `Reply`."""
        return b""

    def chunk(self, index: int, chunk: AnswerChunk) -> bytes:
        """See `Reply`."""
        return self._add(self._parsers.feed(index, chunk.text), len(chunk.token_ids))

    def ending(self, index: int, ending: Ending) -> bytes:
        """See `Reply`."""
        parts = self._add(self._parsers.finish(index), 0)
        return parts + self._finish(ending, called=self._parsers.called(index))

    def closing(self, _endings: Mapping[int, Ending]) -> bytes:
        """See `Reply`."""
        return b""

    @abstractmethod
    def failure(self, error: TandemError) -> bytes:
        """See `Reply`."""

    async def whole(self, choices: Choices, _prompts: PromptReplies) -> bytes:
        """See `Reply`."""
        while not choices.over:
            index, event = await choices.next()
            if isinstance(event, Ending):
                self.ending(index, event)
            else:
                self.chunk(index, event)
        return self._body()

    @abstractmethod
    def _body(self) -> bytes:
        """Return the body of a reply that is not streamed, after the answer's end."""

    @abstractmethod
    def _add(self, delta: AnswerDelta, tokens: int) -> bytes:
        """Add the next parts of the answer, parsed when `tokens` more had arrived; return their events."""

    @abstractmethod
    def _finish(self, ending: Ending, *, called: bool) -> bytes:
        """Add the end of the answer, in which a tool is `called` or not; return its events."""

    def _events(self, events: Iterable[dict[str, Any]]) -> bytes:
        """Return events ready to send, if the reply is streamed; each is made in any case."""
        if self._streamed:
            return b"".join(map(self._event, events))
        for _ in events:
            pass
        return b""

    def _event(self, event: dict[str, Any]) -> bytes:
        """Return an event ready to send; its name is its `type`."""
        return sse_event(dumped(event), name=event["type"])


def sse_event(data: str, *, name: str = "") -> bytes:
    """Return a server-sent event with `data`, which has no line break."""
    return (f"event: {name}\ndata: {data}\n\n" if name else f"data: {data}\n\n").encode()


def dumped(value: Mapping[str, Any]) -> str:
    """Return a value as compact JSON."""
    return json.dumps(value, separators=(",", ":"))
