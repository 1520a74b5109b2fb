"""Parses the fields of chat requests about tools."""

from __future__ import annotations

from typing import Any

from router.api.json_fields import JsonFields
from router.text.tools import ToolChoice, ToolOptions, call_arguments
from tandem.protocol.errors import InvalidArgument


def tool_options(fields: JsonFields) -> ToolOptions:
    """Take `tools`, `tool_choice` and `parallel_tool_calls`."""
    value = fields.take("tools")
    if value is not None and not isinstance(value, list):
        raise fields.wrong("tools", "must be a list of tools")
    tools = tuple(_tool(fields, each, f"tools[{number}]") for number, each in enumerate(value or ()))
    parallel = fields.boolean("parallel_tool_calls", absent=True)
    choice, function = _choice(fields, ToolChoice.AUTO if tools else ToolChoice.NONE)
    if choice in (ToolChoice.REQUIRED, ToolChoice.FUNCTION) and not tools:
        raise fields.wrong("tool_choice", "needs tools; send them, or leave it out")
    options = ToolOptions(tools, choice, function, parallel)
    if function and function not in options.schemas:
        raise fields.wrong("tool_choice.function.name", "is the name of none of the tools")
    return options


def tool_calls(fields: JsonFields, path: str) -> list[dict[str, Any]]:
    """Take an assistant message's `tool_calls`, in the form for chat templates: arguments are objects."""
    value = fields.take("tool_calls")
    if value is not None and not isinstance(value, list):
        raise fields.wrong("tool_calls", "must be a list of tool calls")
    return [_call(fields, each, f"{path}.tool_calls[{number}]") for number, each in enumerate(value or ())]


def _tool(call: JsonFields, value: Any, path: str) -> dict[str, Any]:
    fields, function = _function(call, value, path)
    made: dict[str, Any] = {"name": _name(function)}
    if (description := function.text("description")) is not None:
        made["description"] = description
    if parameters := function.object("parameters"):
        made["parameters"] = parameters
    function.boolean("strict")
    function.end()
    fields.end()
    return {"type": "function", "function": made}


def _call(call: JsonFields, value: Any, path: str) -> dict[str, Any]:
    fields, function = _function(call, value, path)
    fields.drop(frozenset({"index"}))
    made = {"name": _name(function), "arguments": _arguments(function, path)}
    call_id = fields.text("id")
    if not call_id:
        raise fields.wrong("id", "is missing")
    function.end()
    fields.end()
    return {"id": call_id, "type": "function", "function": made}


def _function(call: JsonFields, value: Any, path: str) -> tuple[JsonFields, JsonFields]:
    if not isinstance(value, dict):
        raise InvalidArgument(path, "must be an object with type and function")
    fields = call.within(value, f"{path}.")
    if fields.text("type") != "function":
        raise fields.wrong("type", "must be function; other kinds are not supported")
    return fields, call.within(fields.object("function"), f"{path}.function.")


def _name(function: JsonFields) -> str:
    name = function.text("name")
    if not name:
        raise function.wrong("name", "is missing")
    return name


def _arguments(function: JsonFields, path: str) -> Any:
    """Return the arguments as an object if they are one, else their text."""
    value = function.take("arguments")
    if value is None or value == "":
        return {}
    if isinstance(value, dict):
        return value
    if not isinstance(value, str):
        raise function.wrong("arguments", "must be a JSON object as a string")
    return call_arguments(f"{path}.function.arguments", value)


def _choice(fields: JsonFields, absent: ToolChoice) -> tuple[ToolChoice, str]:
    value = fields.take("tool_choice")
    if value is None:
        return absent, ""
    if value in ("none", "required"):
        return ToolChoice(value), ""
    if value == "auto":
        return absent, ""
    if not isinstance(value, dict) or value.get("type") != "function":
        raise fields.wrong("tool_choice", "must be none, auto, required or an object of type function with a name")
    named = fields.within(value, "tool_choice.").object("function")
    return ToolChoice.FUNCTION, _name(fields.within(named, "tool_choice.function."))
