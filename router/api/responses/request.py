"""Parses the body of POST /v1/responses into the internal chat request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from router.api.bodies.api_call import ApiCall, FieldNames
from router.api.bodies.body import read_body, sort_unknown
from router.api.json_fields import UnknownFields
from router.api.responses.body import (
    ResponseAllowedTools,
    ResponseFunctionTool,
    ResponseNamedFunction,
    ResponsesRequest,
)
from router.api.responses.conversation import conversation_of
from router.requests.answer_format import AnswerFormat
from router.requests.request import ClientRequest, Conversation
from router.text.tools import ToolChoice, ToolOptions
from vocabulary.grammar_process import GrammarKind
from wire.errors import InvalidArgument
from wire.tracing.timeline import EdgeStamp

_RENAMED = {"messages": "input", "max_completion_tokens": "max_output_tokens"}
_LOGPROBS = "message.output_text.logprobs"
_FORMAT = "text.format"


def parse_response(body: bytes, received: EdgeStamp, *, strict: bool = False) -> ApiCall:
    """Parse the body of /v1/responses; InvalidArgument names a wrong field. `strict` rejects unknown fields."""
    unknown = UnknownFields(strict=strict)
    asked = read_body(ResponsesRequest, body)
    sort_unknown(asked, unknown)
    if _LOGPROBS in (asked.include or ()):
        raise InvalidArgument("include", f"has {_LOGPROBS}, which is not supported; use chat completions")
    made = conversation_of(asked)
    tools = _tools(asked)
    effort = asked.reasoning.effort if asked.reasoning else None
    variables = ({} if effort is None else {"reasoning_effort": effort}) | (asked.chat_template_kwargs or {})
    options = asked.options(max_completion_tokens=asked.max_output_tokens, answer_format=_format(asked))
    prompt = Conversation(tuple(made.turns), variables, tools, parsed=True)
    request = ClientRequest("", asked.model or "", prompt, options, received)
    names = FieldNames(tuple(made.fields), _RENAMED)
    return ApiCall(request, bool(asked.stream), unknown.names, names, _echo(asked))


def _tools(asked: ResponsesRequest) -> ToolOptions:
    tools = [_tool(each) for each in asked.tools or ()]
    names = {tool.name for tool in asked.tools or ()}
    parallel = asked.parallel_tool_calls is not False
    wanted = asked.tool_choice
    if isinstance(wanted, ResponseNamedFunction | ResponseAllowedTools):
        chosen = {wanted.name} if isinstance(wanted, ResponseNamedFunction) else {each.name for each in wanted.tools}
        if not chosen or not chosen <= names:
            raise InvalidArgument("tool_choice", "names a function that is none of the tools")
        if isinstance(wanted, ResponseNamedFunction):
            return ToolOptions(tuple(tools), ToolChoice.FUNCTION, wanted.name, parallel)
        allowed = [made for made, tool in zip(tools, asked.tools or (), strict=True) if tool.name in chosen]
        return ToolOptions(tuple(allowed), ToolChoice(wanted.mode), "", parallel)
    if wanted == "required" and not tools:
        raise InvalidArgument("tool_choice", "needs tools; send them, or leave it out")
    return ToolOptions(tuple(tools), ToolChoice(wanted or "auto") if tools else ToolChoice.NONE, "", parallel)


def _tool(tool: ResponseFunctionTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.parameters:
        function["parameters"] = tool.parameters
    return {"type": "function", "function": function}


def _format(asked: ResponsesRequest) -> AnswerFormat | None:
    wanted = asked.text.format if asked.text else None
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return AnswerFormat(_FORMAT, GrammarKind.JSON_SCHEMA, {"type": "object"})
    if wanted.json_schema is None:
        raise InvalidArgument(f"{_FORMAT}.schema", "is missing; send a JSON schema")
    return AnswerFormat(f"{_FORMAT}.schema", GrammarKind.JSON_SCHEMA, wanted.json_schema)


def _echo(asked: ResponsesRequest) -> str:
    """Return the members of the response that repeat the request.

    They are written once, here and not on the event loop, as tools and instructions can be large.
    """
    reasoning = {"effort": asked.reasoning.effort if asked.reasoning else None, "summary": None}
    text = asked.text.format.model_dump(by_alias=True, exclude_none=True) if asked.text and asked.text.format else None
    choice = asked.tool_choice
    members: Mapping[str, Any] = {
        "background": False,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": reasoning,
        "service_tier": "default",
        "store": False,
        "text": {"format": text or {"type": "text"}},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump() if choice else "auto",
        "tools": [
            {"strict": None, "parameters": None, **tool.model_dump(exclude_none=True)} for tool in asked.tools or ()
        ],
        "top_logprobs": 0,
        "truncation": "disabled",
    }
    try:
        return json.dumps(members, allow_nan=False)[1:-1] + ","
    except ValueError:
        raise InvalidArgument("body", "has a number, as NaN, that is not in JSON") from None
