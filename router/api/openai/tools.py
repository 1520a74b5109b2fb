"""Turns the tools and the tool calls of a chat request into the form that chat templates expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.api.openai.messages import NamedTool, Tool, ToolCall, Tools
from router.text.tools import ToolChoice, ToolOptions, call_arguments, function_tool
from tandem.protocol.errors import InvalidArgument


def tool_options(body: Tools) -> ToolOptions:
    """Return the tools and the choice among them. Raises InvalidArgument if the choice names no offered tool."""
    tools = tuple(map(_tool, body.tools or ()))
    wanted = body.tool_choice
    if isinstance(wanted, NamedTool):
        choice, function = ToolChoice.FUNCTION, wanted.function.name
    else:
        choice, function = ToolChoice(wanted or "auto"), ""
    if choice is ToolChoice.AUTO and not tools:
        choice = ToolChoice.NONE
    options = ToolOptions(tools, choice, function, body.parallel_tool_calls is not False)
    if options.forced and not tools:
        raise InvalidArgument("tool_choice", "needs tools; send them, or leave it out")
    if function and function not in options.schemas:
        raise InvalidArgument("tool_choice.function.name", "is the name of none of the tools")
    return options


def tool_calls(calls: Sequence[ToolCall], path: str) -> list[dict[str, Any]]:
    """Return the tool calls of the message at `path`, with their arguments parsed if they are a JSON object."""
    return [_call(call, f"{path}.tool_calls[{number}]") for number, call in enumerate(calls)]


def _tool(tool: Tool) -> dict[str, Any]:
    return function_tool(tool.function.name, tool.function.description, tool.function.parameters)


def _call(call: ToolCall, path: str) -> dict[str, Any]:
    given = call.function.arguments
    arguments = call_arguments(f"{path}.function.arguments", given) if isinstance(given, str) else given or {}
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
