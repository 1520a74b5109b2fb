"""Parses a `ChatRequest` into a conversation, with the checks of the OpenAI-compatible API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from router.api.json_fields import JsonFields, UnknownFields
from router.api.openai.requests import prompt_end
from router.api.openai.tool_fields import tool_calls, tool_options
from router.requests.request import Conversation
from router.text.chat_template import ChatTurn
from router.text.request_items import check_json_items
from router.text.tools import ToolOptions
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.generated.tandem.v1 import inference_pb2

_SCHEMA_ITEMS_MAX = 1 << 18
"""Most items in the parameters of all tools together, each of which may have an equal part."""


def conversation(request: inference_pb2.ChatRequest, variables: Mapping[str, Any]) -> Conversation:
    """Return the conversation, whose answers are split into reasoning, content and tool calls.

    `variables` are those of the chat template. Raises InvalidArgument for a wrong field.
    """
    turns = tuple(_turn(message, f"messages[{number}]") for number, message in enumerate(request.messages))
    prompt = request.add_generation_prompt if request.HasField("add_generation_prompt") else None
    fields = _fields(add_generation_prompt=prompt, continue_final_message=request.continue_final_message)
    return Conversation(turns, variables, _tools(request), prompt_end(fields), parsed=True)


def _turn(message: inference_pb2.ChatMessage, path: str) -> ChatTurn:
    extras: dict[str, Any] = {}
    if message.role == "assistant":
        extras = {"tool_calls": _calls(message, path), "reasoning_content": message.reasoning_content}
    elif message.role == "tool":
        if not message.tool_call_id:
            raise InvalidArgument(f"{path}.tool_call_id", "is missing; name the call that this message answers")
        extras = {"tool_call_id": message.tool_call_id, "name": message.name}
    role = "system" if message.role == "developer" else message.role
    return ChatTurn(role, message.content, {name: value for name, value in extras.items() if value})


def _calls(message: inference_pb2.ChatMessage, path: str) -> list[dict[str, Any]]:
    if not message.tool_calls:
        return []
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    try:
        return tool_calls(_fields(tool_calls=calls), path)
    except InvalidArgument as error:
        raise _renamed(error) from error


def _tools(request: inference_pb2.ChatRequest) -> ToolOptions:
    if not request.tools and not request.tool_choice and not request.tool_function:
        return ToolOptions()
    choice: Any = request.tool_choice or None
    if request.tool_function:
        if choice:
            raise InvalidArgument("tool_function", "takes the place of tool_choice; send one of them")
        choice = {"type": "function", "function": {"name": request.tool_function}}
    parallel = request.parallel_tool_calls if request.HasField("parallel_tool_calls") else None
    tools = [_tool(tool, number, len(request.tools)) for number, tool in enumerate(request.tools)]
    try:
        return tool_options(_fields(tools=tools, tool_choice=choice, parallel_tool_calls=parallel))
    except InvalidArgument as error:
        raise _renamed(error) from error


def _tool(tool: inference_pb2.Tool, number: int, count: int) -> dict[str, Any]:
    parameters = None
    if tool.parameters:
        field = f"tools[{number}].parameters"
        try:
            check_json_items(tool.parameters.encode(), _SCHEMA_ITEMS_MAX // count)
            parameters = json.loads(tool.parameters)
        except InvalidArgument as error:
            raise InvalidArgument(field, error.problem) from error
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(field, f"is not valid JSON ({error})") from error
        if not isinstance(parameters, dict):
            raise InvalidArgument(field, "must be a JSON schema, an object")
    function = {"name": tool.name, "description": tool.description or None, "parameters": parameters}
    return {"type": "function", "function": function}


def _fields(**values: Any) -> JsonFields:
    return JsonFields(values, UnknownFields(strict=True))


def _renamed(error: InvalidArgument) -> InvalidArgument:
    """Return the error with the name that its field has in the schema."""
    field = error.field.replace(".function", "")
    return InvalidArgument("tool_function" if field == "tool_choice.name" else field, error.problem)
