"""The tools of a Responses request: functions, functions in namespaces, and tools that this server cannot offer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from router.api.body import UnknownFields
from router.api.openai.responses_body import (
    ResponseAllowedTools,
    ResponseFunctionTool,
    ResponseNamedFunction,
    ResponseNamespaceTool,
    ResponseOtherTool,
    ResponseTool,
)
from router.text.tools import ToolChoice, ToolOptions, function_tool
from tandem.protocol.errors import InvalidArgument

Namespaced = Mapping[str, tuple[str, str]]
"""A mapping from the flat name of a function in a namespace to the pair (namespace, name within the namespace)."""


def flat_name(namespace: str | None, name: str) -> str:
    """Return the function name that the model sees, as in vLLM: NAMESPACE__NAME, or NAME without a namespace."""
    return f"{namespace}__{name}" if namespace else name


class OfferedTools:
    """The functions of a request that the model may call, under their flat names."""

    def __init__(self, tools: Sequence[ResponseTool], unknown: UnknownFields, *, required: bool) -> None:
        """Collect the functions of `tools`; tools of other types are left out and recorded in `unknown`.

        Raises InvalidArgument for two functions with the same flat name. Raises it for a tool of another type if a tool
        call is `required` or if `unknown` rejects fields.
        """
        self.functions: list[tuple[str, dict[str, Any]]] = []
        self.namespaced: dict[str, tuple[str, str]] = {}
        self._names = set[str]()
        self._unknown = unknown
        self._required = required
        for number, tool in enumerate(tools):
            field = f"tools[{number}]"
            if isinstance(tool, ResponseFunctionTool):
                self._add(field, tool.name, tool.description, tool)
            elif isinstance(tool, ResponseNamespaceTool):
                self._flatten(field, tool)
            else:
                self._leave_out(field, tool)

    def options(
        self, wanted: str | ResponseNamedFunction | ResponseAllowedTools | None, *, parallel: bool
    ) -> ToolOptions:
        """Return the tools and the choice among them. Raises InvalidArgument if the choice names no offered tool."""
        tools = tuple(made for _, made in self.functions)
        if isinstance(wanted, ResponseNamedFunction):
            self._check({wanted.name})
            return ToolOptions(tools, ToolChoice.FUNCTION, wanted.name, parallel)
        if isinstance(wanted, ResponseAllowedTools):
            chosen = {function.name for function in wanted.tools}
            self._check(chosen)
            allowed = tuple(made for name, made in self.functions if name in chosen)
            return ToolOptions(allowed, ToolChoice(wanted.mode), "", parallel)
        if wanted == ToolChoice.REQUIRED and not tools:
            raise InvalidArgument("tool_choice", "needs tools; send them, or leave it out")
        return ToolOptions(tools, ToolChoice(wanted or "auto") if tools else ToolChoice.NONE, "", parallel)

    def _flatten(self, field: str, namespace: ResponseNamespaceTool) -> None:
        shared = namespace.description
        for number, tool in enumerate(namespace.tools):
            here = f"{field}.tools[{number}]"
            if isinstance(tool, ResponseOtherTool):
                self._leave_out(here, tool)
                continue
            name = flat_name(namespace.name, tool.name)
            self.namespaced[name] = namespace.name, tool.name
            # The description of a namespace can be pages of text: only its first function gets it.
            described = "\n\n".join(filter(None, (shared, tool.description)))
            self._add(here, name, described or None, tool)
            shared = None

    def _add(self, field: str, name: str, description: str | None, tool: ResponseFunctionTool) -> None:
        if self.namespaced and name in self._names:
            raise InvalidArgument(f"{field}.name", "is the name of another function, its namespace included")
        self._names.add(name)
        self.functions.append((name, function_tool(name, description, tool.parameters)))

    def _leave_out(self, field: str, tool: ResponseOtherTool) -> None:
        if self._required or self._unknown.strict:
            message = "must be function or namespace; the server runs no tools of its own"
            raise InvalidArgument(f"{field}.type", message)
        self._unknown.ignore(f"tools[{tool.type}]")

    def _check(self, chosen: set[str]) -> None:
        if not chosen or not chosen <= {name for name, _ in self.functions}:
            raise InvalidArgument("tool_choice", "names a function that is not one of the tools")
