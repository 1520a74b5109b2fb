"""A parsed body of any API: its requests, the form of its reply, and the client's names of fields for errors."""

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
    """Maps field names of the internal chat request to those of the client's body, for error messages."""

    turns: tuple[str, ...] = ()
    """The client's field for each message of the internal request, in order; () if the field names are the same."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """The client's names of fields outside messages, by their internal names."""

    def error(self, error: InvalidArgument) -> InvalidArgument:
        """Return the same error, but with the client's name of the field."""
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
"""The field names of an API that has the same names as the internal request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiCall:
    """A parsed body: the internal requests, and the requested form of the reply. An immutable value."""

    requests: tuple[ClientRequest, ...]
    """One request per prompt, at least one; the requests differ only in their prompts."""
    stream: bool = False
    """True if the answer is streamed."""
    ignored: tuple[str, ...] = ()
    """The names of the ignored fields, in characters that a header allows (`UnknownFields`)."""
    names: FieldNames = SAME_NAMES
    prompts: PromptForm = NO_PROMPTS

    @property
    def request(self) -> ClientRequest:
        """The request of the first prompt (in most calls the only one)."""
        return self.requests[0]


class Turns:
    """Collects the messages of the internal chat request, and for each message its field in the client's body."""

    def __init__(self) -> None:
        self.turns: list[ChatTurn] = []
        self.fields: list[str] = []
        self._functions: dict[str, str] = {}
        """The names of the functions called so far, by call id."""

    def add(self, field: str, role: str, content: str, **extras: Any) -> None:
        """Add a message that comes from `field`; empty `extras` are left out."""
        self.turns.append(ChatTurn(role, content, {name: value for name, value in extras.items() if value}))
        self.fields.append(field)

    def call(self, call_id: str, function: str, arguments: Any) -> dict[str, Any]:
        """Return an entry of an assistant message's `tool_calls`, and remember the call's function for `result`."""
        self._functions[call_id] = function
        return {"id": call_id, "type": "function", "function": {"name": function, "arguments": arguments}}

    def result(self, field: str, call_id: str, content: str) -> None:
        """Add the result of a tool call as a message, with the function's name, which some chat templates show."""
        self.add(field, "tool", content, tool_call_id=call_id, name=self._functions.get(call_id))
