"""The tools that a client offers to the model, and its choice among them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from router.text.request_items import check_json_items
from tandem.protocol.errors import InvalidArgument

_ARGUMENT_ITEMS_MAX = 1 << 16
"""Maximum number of JSON items in the arguments of one call; parsing more would hold the GIL too long."""


class ToolChoice(StrEnum):
    """The tool choice of a request: no call, a call if the model decides so, any call, or a call of one function."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    FUNCTION = "function"


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """The tools of a request and the choice among them. An immutable part of `Conversation`."""

    tools: tuple[Mapping[str, Any], ...] = ()
    """The tools as chat templates expect them: `type`, and `function` with name, description and parameters."""
    choice: ToolChoice = ToolChoice.NONE
    function: str = ""
    """The name of the function to call if `choice` is FUNCTION, else ""."""
    parallel: bool = True
    """False if only the first tool call of an answer is returned."""
    chars: int = field(init=False, default=0)
    """The approximate size in characters; computed while the body is parsed (large bodies: in a thread)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "chars", len(str(self.tools)))

    @property
    def forced(self) -> bool:
        """True if the answer must be a tool call."""
        return self.choice in (ToolChoice.REQUIRED, ToolChoice.FUNCTION)

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """The JSON schemas of the functions' parameters, by the functions' names."""
        functions = [tool["function"] for tool in self.tools]
        return {function["name"]: function.get("parameters", {}) for function in functions}

    @property
    def shown(self) -> tuple[Mapping[str, Any], ...]:
        """The tools that the chat template gets; none if the model must not call a tool."""
        return () if self.choice is ToolChoice.NONE else self.tools


def function_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Return a function as a tool in the form that chat templates expect."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    if parameters:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


def call_arguments(field: str, text: str) -> Any:
    """Return an earlier call's arguments for the chat template: parsed if they are a JSON object, else as text.

    Raises InvalidArgument, which names `field`, if they have too many items.
    """
    if not text:
        return {}
    try:
        check_json_items(text.encode(errors="replace"), _ARGUMENT_ITEMS_MAX)
        arguments = json.loads(text)
    except InvalidArgument as error:
        raise InvalidArgument(field, error.problem) from error
    except (ValueError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text
