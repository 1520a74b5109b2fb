"""A parsed body of any API: the requests, and the form of the reply."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from router.api.prompt_replies import NO_PROMPTS, PromptForm
from router.requests.request import ClientRequest
from router.text.chat_template import ChatTurn
from tandem.protocol.errors import ContextLengthExceeded, InvalidArgument

_MESSAGE = re.compile(r"messages\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class FieldNames:
    """The client's names of the fields that errors of the internal chat request name."""

    turns: tuple[str, ...] = ()
    """The field from which each message of the internal request was made; () = the client's messages are the same."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """The client's names of other fields."""

    def error(self, error: InvalidArgument) -> InvalidArgument:
        """Return the same error about the client's field."""
        message = _MESSAGE.match(error.field)
        if message and int(message[1]) < len(self.turns):
            field = self.turns[int(message[1])] + error.field[message.end() :]
        else:
            field = self.renamed.get(error.field, error.field)
        if field == error.field:
            return error
        if isinstance(error, ContextLengthExceeded):
            return ContextLengthExceeded(field, error.message, error.lengths)
        return InvalidArgument(field, error.problem)


SAME_NAMES = FieldNames()
"""The names of an API whose fields are those of the internal request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiCall:
    """A parsed body: the internal requests, and the requested form of the reply."""

    requests: tuple[ClientRequest, ...]
    """One for each prompt, at least one; they differ in their prompts alone."""
    stream: bool = False
    """True if the answer is streamed."""
    ignored: tuple[str, ...] = ()
    """Names of the ignored fields, fit for a header (`UnknownFields`)."""
    names: FieldNames = SAME_NAMES
    prompts: PromptForm = NO_PROMPTS

    @property
    def request(self) -> ClientRequest:
        """The first prompt's request."""
        return self.requests[0]


class Turns:
    """Collects the messages of the internal chat request, and the field of the body of which each one is made."""

    def __init__(self) -> None:
        self.turns: list[ChatTurn] = []
        self.fields: list[str] = []
        self._functions: dict[str, str] = {}
        """The functions of the calls so far, by the calls' ids."""

    def add(self, field: str, role: str, content: str, **extras: Any) -> None:
        """Add a message; `extras` that are empty are left out."""
        self.turns.append(ChatTurn(role, content, {name: value for name, value in extras.items() if value}))
        self.fields.append(field)

    def call(self, call_id: str, function: str, arguments: Any) -> dict[str, Any]:
        """Return one of the `tool_calls` of an assistant's message."""
        self._functions[call_id] = function
        return {"id": call_id, "type": "function", "function": {"name": function, "arguments": arguments}}

    def result(self, field: str, call_id: str, content: str) -> None:
        """Add the result of a call; the message names the function, as some chat templates show it."""
        self.add(field, "tool", content, tool_call_id=call_id, name=self._functions.get(call_id))
