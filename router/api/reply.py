"""The interface of replies, whole or streamed, and the base of replies whose stream events have names.

A reply turns answers into bytes in the form of one API; it does not depend on HTTP.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from router.api.answers import AnswerParsers
from router.api.prompt_replies import PromptReplies, PromptReply
from router.requests.answer import AnswerChunk, AnswerEnd
from router.requests.choices import Choices
from router.requests.request import Admitted
from router.text.answer_syntax.parser import AnswerDelta
from tandem.protocol.errors import TandemError


class Reply(Protocol):
    """The reply to one call: a body, or stream events. Its methods return the bytes to send, b"" for no event."""

    answer_id: str
    """The id of the reply, which is also in a response header."""

    def opening(self, choices: int = 1) -> bytes:
        """Return the first events of a stream of `choices` answers."""

    def event(self, event: AnswerChunk | AnswerEnd) -> AnswerChunk | AnswerEnd:
        """Return an answer's event as the client sees it.

        If the client requested only the echoed prompt (`echo` with `max_tokens` 0), the sampled token is left out;
        otherwise the event is unchanged.
        """

    def prompt(self, index: int, prompt: PromptReply) -> bytes:
        """Return the event with the prompt of answer number `index`; may run in any thread."""

    def chunk(self, index: int, chunk: AnswerChunk) -> bytes:
        """Return the events for the next chunk of answer number `index`."""

    def ending(self, index: int, ending: AnswerEnd) -> bytes:
        """Return the last events of answer number `index`."""

    def closing(self, endings: Mapping[int, AnswerEnd]) -> bytes:
        """Return the events after the end of all answers; `endings` has the ending of each answer by number."""

    def failure(self, error: TandemError) -> bytes:
        """Return the events that end the stream with an error."""

    async def whole(self, choices: Choices, prompts: PromptReplies) -> bytes:
        """Read all answers until they end, and return the body of a reply that is not streamed.

        Raises the first `TandemError` of any answer.
        """


@dataclass(frozen=True, slots=True)
class ReplyFacts:
    """The values that are the same in all events of a reply."""

    request_id: str
    model: str
    created: int
    """Time of the reply in Unix seconds."""


class NamedEventsReply(ABC):
    """A `Reply` with one answer, whose stream events have names; for the Responses and the Messages API.

    A reply that is not streamed is built by the same methods, but its events are discarded.
    """

    answer_id: str
    """The `id` of the reply."""

    def __init__(self, admitted: Admitted, *, streamed: bool) -> None:
        self._streamed = streamed
        self._parsers = AnswerParsers(admitted.syntax)

    @abstractmethod
    def opening(self, choices: int = 1) -> bytes:
        """Return the first events of the stream of one answer."""

    def event(self, event: AnswerChunk | AnswerEnd) -> AnswerChunk | AnswerEnd:
        """Return the event unchanged, because these APIs have no `echo`."""
        return event

    def prompt(self, _index: int, _prompt: PromptReply) -> bytes:
        """Return b"": the reply does not show prompts."""
        return b""

    def chunk(self, index: int, chunk: AnswerChunk) -> bytes:
        """Return the events for the next chunk of the answer."""
        return self._add(self._parsers.feed(index, chunk.text), len(chunk.token_ids))

    def ending(self, index: int, ending: AnswerEnd) -> bytes:
        """Return the last events of the answer."""
        parts = self._add(self._parsers.finish(index), 0)
        return parts + self._finish(ending, called=self._parsers.called(index))

    def closing(self, _endings: Mapping[int, AnswerEnd]) -> bytes:
        """Return the events after the end of the answer."""
        return b""

    @abstractmethod
    def failure(self, error: TandemError) -> bytes:
        """Return the events that end the stream with an error."""

    async def whole(self, choices: Choices, _prompts: PromptReplies) -> bytes:
        """Read the answer until it ends, and return the body of a reply that is not streamed."""
        while not choices.over:
            index, event = await choices.next()
            if isinstance(event, AnswerEnd):
                self.ending(index, event)
            else:
                self.chunk(index, event)
        return self._body()

    @abstractmethod
    def _body(self) -> bytes:
        """Return the body of a reply that is not streamed; called after the answer's end."""

    @abstractmethod
    def _add(self, delta: AnswerDelta, tokens: int) -> bytes:
        """Add the next parsed parts of the answer, and return their events; `tokens` is the number of new tokens."""

    @abstractmethod
    def _finish(self, ending: AnswerEnd, *, called: bool) -> bytes:
        """Add the end of the answer, and return its events; `called` is True if the answer has a tool call."""

    def _events(self, events: Iterable[dict[str, Any]]) -> bytes:
        """Return the events as bytes if the reply is streamed, else b"".

        The iterator is consumed in either case, because it also builds the reply that is not streamed.
        """
        if self._streamed:
            return b"".join(map(self._event, events))
        for _ in events:
            pass
        return b""

    def _event(self, event: dict[str, Any]) -> bytes:
        """Return an event as bytes; its name is its `type`."""
        return sse_event(dumped(event), name=event["type"])


def sse_event(data: str, *, name: str = "") -> bytes:
    """Return a server-sent event with `data`, which must have no line break."""
    return (f"event: {name}\ndata: {data}\n\n" if name else f"data: {data}\n\n").encode()


def dumped(value: Mapping[str, Any]) -> str:
    """Return a value as compact JSON."""
    return json.dumps(value, separators=(",", ":"))
