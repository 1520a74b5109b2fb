"""Turns the items of a Responses request into the messages of the internal chat request."""

from __future__ import annotations

from typing import Any

from router.api.bodies.turns import Turns
from router.api.openai.responses.body import (
    Content,
    Item,
    ResponseFunctionCall,
    ResponseFunctionCallOutput,
    ResponseReasoning,
    ResponsesRequest,
    ResponseTextPart,
)
from router.api.openai.responses.tools import flat_name
from router.text.tools import call_arguments


def conversation_of(body: ResponsesRequest) -> Turns:
    """Return the messages of a body; raises InvalidArgument for arguments of a call that are too large to parse."""
    made = Turns()
    if body.instructions:
        made.add("instructions", "system", body.instructions)
    if isinstance(body.input, str):
        made.add("input", "user", body.input)
        return made
    answer = _EarlierAnswer(made)
    for number, item in enumerate(body.input):
        _add(made, answer, f"input[{number}]", item)
    answer.end()
    return made


def _add(made: Turns, answer: _EarlierAnswer, field: str, item: Item) -> None:
    if isinstance(item, ResponseReasoning):
        answer.reasoning(field, "".join(part.text for part in item.content or ()))
    elif isinstance(item, ResponseFunctionCall):
        arguments = call_arguments(f"{field}.arguments", item.arguments)
        name = flat_name(item.namespace, item.name)
        answer.call(field, made.call(item.call_id, name, arguments))
    elif isinstance(item, ResponseFunctionCallOutput):
        answer.end()
        made.result(field, item.call_id, _text(item.output))
    elif item.role == "assistant":
        answer.text(field, _text(item.content))
    else:
        answer.end()
        made.add(field, "system" if item.role == "developer" else item.role, _text(item.content))


class _EarlierAnswer:
    """Joins the items of one answer to one message, as chat templates expect: reasoning, text and calls."""

    def __init__(self, made: Turns) -> None:
        self._made = made
        self._field = ""
        """The first item of the message; "" = there is none."""
        self._reasoning, self._text = "", ""
        self._calls: list[dict[str, Any]] = []

    def reasoning(self, field: str, text: str) -> None:
        """Add reasoning; it begins another message after a text or a call."""
        self._begin(field, other=bool(self._text or self._calls))
        self._reasoning += text

    def text(self, field: str, text: str) -> None:
        """Add a text; it begins another message after a text or a call."""
        self._begin(field, other=bool(self._text or self._calls))
        self._text = text

    def call(self, field: str, call: dict[str, Any]) -> None:
        """Add a call."""
        self._begin(field, other=False)
        self._calls.append(call)

    def end(self) -> None:
        """Complete the message, if there is one; reasoning alone makes none."""
        if self._text or self._calls:
            extras = {"tool_calls": self._calls, "reasoning_content": self._reasoning}
            self._made.add(self._field, "assistant", self._text, **extras)
        self._field, self._reasoning, self._text, self._calls = "", "", "", []

    def _begin(self, field: str, *, other: bool) -> None:
        if other:
            self.end()
        self._field = self._field or field


def _text(content: Content) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, ResponseTextPart) else part.refusal for part in content)
