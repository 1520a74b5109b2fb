"""The tools that a client offers to the model, and its choice among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class ToolChoice(StrEnum):
    """The calls that the answer may or must have."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    FUNCTION = "function"


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """The fields of a request about tools."""

    tools: tuple[Mapping[str, Any], ...] = ()
    """The tools in the form for chat templates: type and function, with name, description and parameters."""
    choice: ToolChoice = ToolChoice.NONE
    function: str = ""
    """The function to call if `choice` names one."""
    parallel: bool = True
    """False if only the first call is returned."""

    @property
    def forced(self) -> bool:
        """True if the answer must be a call."""
        return self.choice in (ToolChoice.REQUIRED, ToolChoice.FUNCTION)

    @property
    def names(self) -> frozenset[str]:
        """The names of the functions."""
        return frozenset(each["function"]["name"] for each in self.tools)

    @property
    def shown(self) -> tuple[Mapping[str, Any], ...]:
        """The tools that the chat template gets: none if the model must not call them."""
        return () if self.choice is ToolChoice.NONE else self.tools
