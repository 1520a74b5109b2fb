"""Turns the parsed parts of an answer into the fields of OpenAI's chat API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.text.answer_syntax.parser import AnswerDelta, CallDelta


def delta_fields(delta: AnswerDelta) -> dict[str, Any]:
    """Return the `delta` of a stream event; reasoning is given under both of vLLM's names."""
    fields: dict[str, Any] = {}
    if delta.reasoning:
        fields |= {"reasoning_content": delta.reasoning, "reasoning": delta.reasoning}
    if delta.content:
        fields["content"] = delta.content
    if delta.calls:
        fields["tool_calls"] = [_call_delta(call) for call in delta.calls]
    return fields


def message_fields(parts: Sequence[AnswerDelta]) -> dict[str, Any]:
    """Return the fields of a whole answer's `message`; empty content is null if the answer has tool calls."""
    content, reasoning = "".join(part.content for part in parts), "".join(part.reasoning for part in parts)
    calls: list[CallDelta] = []
    for delta in (call for part in parts for call in part.calls):
        if delta.name:
            calls.append(CallDelta(delta.index, delta.call_id, delta.name, delta.arguments))
        else:
            calls[-1].arguments += delta.arguments
    fields: dict[str, Any] = {"content": content or (None if calls else "")}
    if reasoning:
        fields |= {"reasoning_content": reasoning, "reasoning": reasoning}
    if calls:
        fields["tool_calls"] = [_whole_call(call) for call in calls]
    return fields


def _call_delta(call: CallDelta) -> dict[str, Any]:
    if not call.name:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **_whole_call(call)}


def _whole_call(call: CallDelta) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
