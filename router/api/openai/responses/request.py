"""Parses the body of POST /v1/responses into the internal chat request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from router.api.bodies.api_call import ApiCall, FieldNames
from router.api.bodies.body import read_body, sort_unknown
from router.api.json_fields import UnknownFields
from router.api.openai.responses.body import ResponseNamespaceTool, ResponseOtherTool, ResponsesRequest, ResponseTool
from router.api.openai.responses.conversation import conversation_of
from router.api.openai.responses.tools import OfferedTools
from router.requests.answer_format import AnswerFormat
from router.requests.request import ClientRequest, Conversation
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.lifecycle.timeline import EdgeStamp
from tandem.tokenizers.grammar_process import GrammarKind

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
    offered = OfferedTools(asked.tools or (), unknown, required=asked.tool_choice == "required")
    tools = offered.options(asked.tool_choice, parallel=asked.parallel_tool_calls is not False)
    effort = asked.reasoning.effort if asked.reasoning else None
    variables = ({} if effort is None else {"reasoning_effort": effort}) | (asked.chat_template_kwargs or {})
    options = asked.options(max_completion_tokens=asked.max_output_tokens, answer_format=_format(asked))
    prompt = Conversation(tuple(made.turns), variables, tools, parsed=True)
    request = ClientRequest("", asked.model or "", prompt, options, received)
    names = FieldNames(tuple(made.fields), _RENAMED)
    return ApiCall(request, bool(asked.stream), unknown.names, names, _echo(asked), offered.namespaced)


def _format(asked: ResponsesRequest) -> AnswerFormat | None:
    wanted = asked.text.format if asked.text else None
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return AnswerFormat(_FORMAT, GrammarKind.JSON_SCHEMA, {"type": "object"}, text_only=True)
    if wanted.json_schema is None:
        raise InvalidArgument(f"{_FORMAT}.schema", "is missing; send a JSON schema")
    return AnswerFormat(f"{_FORMAT}.schema", GrammarKind.JSON_SCHEMA, wanted.json_schema, text_only=True)


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
        "tools": [_repeated(tool) for tool in asked.tools or () if not isinstance(tool, ResponseOtherTool)],
        "top_logprobs": 0,
        "truncation": "disabled",
    }
    try:
        return json.dumps(members, allow_nan=False)[1:-1] + ","
    except ValueError:
        raise InvalidArgument("body", "has a number, as NaN, that is not in JSON") from None


def _repeated(tool: ResponseTool) -> dict[str, Any]:
    """Return a tool as the response repeats it."""
    if isinstance(tool, ResponseNamespaceTool):
        members = [_repeated(each) for each in tool.tools if not isinstance(each, ResponseOtherTool)]
        return {**tool.model_dump(exclude={"tools"}, exclude_none=True), "tools": members}
    return {"strict": None, "parameters": None, **tool.model_dump(exclude_none=True)}
