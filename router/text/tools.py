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
"""Most items in the arguments of one call; parsing more would hold the GIL too long."""


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
    chars: int = field(init=False, default=0)
    """About how many characters the tools have; counted where a body is read, as it takes long for large ones."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "chars", len(str(self.tools)))

    @property
    def forced(self) -> bool:
        """True if the answer must be a call."""
        return self.choice in (ToolChoice.REQUIRED, ToolChoice.FUNCTION)

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """The JSON schemas of the functions' parameters, by the functions' names."""
        functions = [each["function"] for each in self.tools]
        return {each["name"]: each.get("parameters", {}) for each in functions}

    @property
    def shown(self) -> tuple[Mapping[str, Any], ...]:
        """The tools that the chat template gets: none if the model must not call them."""
        return () if self.choice is ToolChoice.NONE else self.tools


def call_arguments(field: str, text: str) -> Any:
    """Return the arguments of an earlier call for the chat template: as an object if they are one, else their text.

    Raises InvalidArgument with `field` if they have too many items.
    """
    if not text:
        return {}
    try:
        check_json_items(text.encode(errors="replace"), _ARGUMENT_ITEMS_MAX)
        found = json.loads(text)
    except InvalidArgument as error:
        raise InvalidArgument(field, error.problem) from error
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text
