"""The messages of the internal chat request, as a body is read."""

from __future__ import annotations

from typing import Any

from router.text.chat_template import ChatTurn


class Turns:
    """Collects messages, and for each one the field of the body that it was made of."""

    def __init__(self) -> None:
        self.turns: list[ChatTurn] = []
        self.fields: list[str] = []
        self._functions: dict[str, str] = {}
        """The functions of the calls so far, by the calls' ids."""

    def add(self, field: str, role: str, content: str, **extras: Any) -> None:
        """Add a message; `extras` that are empty are left out."""
        self.turns.append(ChatTurn(role, content, {name: value for name, value in extras.items() if value}))
        self.fields.append(field)

    def call(self, call_id: str, function: str, arguments: Any) -> dict[str, Any]:
        """Return one of the `tool_calls` of an assistant's message."""
        self._functions[call_id] = function
        return {"id": call_id, "type": "function", "function": {"name": function, "arguments": arguments}}

    def result(self, field: str, call_id: str, content: str) -> None:
        """Add the result of a call; the message names the function, as some chat templates show it."""
        self.add(field, "tool", content, tool_call_id=call_id, name=self._functions.get(call_id))
