"""Turns the body of POST /v1/responses into an internal chat request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router.api.body import UnknownFields, read_body
from router.api.call import ApiCall, FieldNames, Turns
from router.api.openai.responses_body import (
    Content,
    Item,
    ResponseFunctionCall,
    ResponseFunctionCallOutput,
    ResponseNamespaceTool,
    ResponseOtherTool,
    ResponseReasoning,
    ResponsesRequest,
    ResponseTextPart,
    ResponseTool,
)
from router.api.openai.responses_tools import Namespaced, OfferedTools, flat_name
from router.requests.answer_format import AnswerFormat
from router.requests.request import ClientRequest, Conversation
from router.text.tools import call_arguments
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.lifecycle.events import EventTime
from tandem.tokenizers.grammar_process import GrammarKind


def conversation_of(body: ResponsesRequest) -> Turns:
    """Return the messages of a body. Raises InvalidArgument if the arguments of a call are too large to parse."""
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
    """Joins the items of one earlier answer (reasoning, text and calls) into one message, as chat templates expect."""

    def __init__(self, made: Turns) -> None:
        self._made = made
        self._field = ""
        """The client's field of the message's first item; "" if no message has been started."""
        self._reasoning, self._text = "", ""
        self._calls: list[dict[str, Any]] = []

    def reasoning(self, field: str, text: str) -> None:
        """Add reasoning to the message; if the message already has a text or a call, start a new message."""
        self._begin(field, other=bool(self._text or self._calls))
        self._reasoning += text

    def text(self, field: str, text: str) -> None:
        """Add a text to the message; if the message already has a text or a call, start a new message."""
        self._begin(field, other=bool(self._text or self._calls))
        self._text = text

    def call(self, field: str, call: dict[str, Any]) -> None:
        """Add a tool call to the message."""
        self._begin(field, other=False)
        self._calls.append(call)

    def end(self) -> None:
        """Complete the message if it has a text or a call; drop it if it has only reasoning."""
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


_RENAMED = {"messages": "input", "max_completion_tokens": "max_output_tokens"}
_LOGPROBS = "message.output_text.logprobs"
_FORMAT = "text.format"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesCall(ApiCall):
    """A parsed call of the Responses API. An immutable value."""

    echo: str
    """The JSON members of the reply that repeat the request, each followed by a comma."""
    namespaced: Namespaced
    """The namespaces of the offered functions, by the functions' flat names."""


def parse_response(data: bytes, received: EventTime, *, strict: bool = False) -> ResponsesCall:
    """Parse the body of /v1/responses.

    Raises InvalidArgument, which names the field, for a wrong field, and with `strict` for an unknown one.
    """
    unknown = UnknownFields(strict=strict)
    body = read_body(ResponsesRequest, data, unknown)
    if _LOGPROBS in (body.include or ()):
        raise InvalidArgument("include", f"has {_LOGPROBS}, which is not supported; use chat completions")
    made = conversation_of(body)
    offered = OfferedTools(body.tools or (), unknown, required=body.tool_choice == "required")
    tools = offered.options(body.tool_choice, parallel=body.parallel_tool_calls is not False)
    effort = body.reasoning.effort if body.reasoning else None
    variables = ({} if effort is None else {"reasoning_effort": effort}) | (body.chat_template_kwargs or {})
    prompt = Conversation(tuple(made.turns), variables, tools, parsed=True)
    options = body.options(
        max_completion_tokens=body.max_output_tokens, answer_format=_format(body), **body.cache_hints()
    )
    return ResponsesCall(
        requests=(ClientRequest("", body.model or "", prompt, options, received),),
        stream=bool(body.stream),
        ignored=unknown.names,
        names=FieldNames(tuple(made.fields), _RENAMED),
        echo=_echo(body),
        namespaced=offered.namespaced,
    )


def _format(body: ResponsesRequest) -> AnswerFormat | None:
    wanted = body.text.format if body.text else None
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return AnswerFormat(_FORMAT, GrammarKind.JSON_SCHEMA, {"type": "object"}, text_only=True)
    if wanted.json_schema is None:
        raise InvalidArgument(f"{_FORMAT}.schema", "is missing; send a JSON schema")
    return AnswerFormat(f"{_FORMAT}.schema", GrammarKind.JSON_SCHEMA, wanted.json_schema, text_only=True)


def _echo(body: ResponsesRequest) -> str:
    """Return the members of the response that repeat the request, as JSON.

    Tools and instructions can be large. So the members are serialized once, during parsing, which happens in a thread
    for a large body.
    """
    reasoning = {"effort": body.reasoning.effort if body.reasoning else None, "summary": None}
    text = body.text.format.model_dump(by_alias=True, exclude_none=True) if body.text and body.text.format else None
    choice = body.tool_choice
    members: Mapping[str, Any] = {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": reasoning,
        "service_tier": "default",
        "store": False,
        "text": {"format": text or {"type": "text"}},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump() if choice else "auto",
        "tools": [_repeated(tool) for tool in body.tools or () if not isinstance(tool, ResponseOtherTool)],
        "top_logprobs": 0,
        "truncation": "disabled",
    }
    try:
        return json.dumps(members, allow_nan=False)[1:-1] + ","
    except ValueError:
        raise InvalidArgument("body", "has a number, as NaN, that is not in JSON") from None


def _repeated(tool: ResponseTool) -> dict[str, Any]:
    """Return a tool in the form in which the response repeats it."""
    if isinstance(tool, ResponseNamespaceTool):
        members = [_repeated(member) for member in tool.tools if not isinstance(member, ResponseOtherTool)]
        return {**tool.model_dump(exclude={"tools"}, exclude_none=True), "tools": members}
    return {"strict": None, "parameters": None, **tool.model_dump(exclude_none=True)}
