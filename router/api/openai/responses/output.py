"""The output items of a response, and the events that build them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from router.text.answer_syntax.parser import AnswerDelta, CallDelta

Event = dict[str, Any]
_COMPLETED, _IN_PROGRESS = "completed", "in_progress"
_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
_TEXT_TYPES = {"reasoning": "reasoning_text", "message": "output_text"}


class OutputItems:
    """Reasoning, messages and function calls, in the order of the answer; only the last one is in progress."""

    def __init__(self, request_id: str, namespaced: Mapping[str, tuple[str, str]]) -> None:
        """`request_id` is a part of the items' ids; `namespaced` is that of `ApiCall`."""
        self._request_id = request_id
        self._namespaced = namespaced
        self.items: list[dict[str, Any]] = []
        self._open = ""
        """The type of the item in progress; "" = none is."""
        self._texts: list[str] = []

    def add(self, delta: AnswerDelta) -> Iterator[Event]:
        """Add the next parts of the answer; yields their events."""
        if delta.reasoning:
            yield from self._text("reasoning", delta.reasoning)
        if delta.content:
            yield from self._text("message", delta.content)
        for call in delta.calls:
            yield from self._call(call)

    def finish(self, status: str) -> Iterator[Event]:
        """Complete the item in progress with this status; an answer without items becomes an empty message."""
        if not self.items:
            yield from self._begin({"type": "message", "role": "assistant", "content": []})
        yield from self._end(status)

    def _text(self, kind: str, text: str) -> Iterator[Event]:
        if self._open != kind:
            yield from self._end(_COMPLETED)
            message = {"role": "assistant", "content": []}
            yield from self._begin({"type": kind, **(message if kind == "message" else {"summary": [], "content": []})})
        self._texts.append(text)
        logprobs: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        yield self._event(f"{_TEXT_TYPES[kind]}.delta", content_index=0, delta=text, **logprobs)

    def _call(self, call: CallDelta) -> Iterator[Event]:
        if call.name:
            yield from self._end(_COMPLETED)
            namespace, name = self._namespaced.get(call.name, ("", call.name))
            within = {"namespace": namespace} if namespace else {}
            yield from self._begin(
                {"type": "function_call", "call_id": call.call_id, **within, "name": name, "arguments": ""}
            )
        if call.arguments:
            self._texts.append(call.arguments)
            yield self._event("function_call_arguments.delta", delta=call.arguments)

    def _begin(self, item: dict[str, Any]) -> Iterator[Event]:
        self._open = kind = item["type"]
        self._texts = []
        item_id = f"{_PREFIXES[kind]}_{len(self.items)}_{self._request_id}"
        self.items.append({"id": item_id, "status": _IN_PROGRESS, **item})
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": self.items[-1]}
        if kind in _TEXT_TYPES:
            yield self._event("content_part.added", content_index=0, part=self._part(""))

    def _end(self, status: str) -> Iterator[Event]:
        if not self._open:
            return
        item, text = self.items[-1], "".join(self._texts)
        item["status"] = status
        if self._open == "function_call":
            item["arguments"] = text
            yield self._event("function_call_arguments.done", name=item["name"], arguments=text)
        else:
            part = self._part(text)
            item["content"] = [part]
            logprobs: dict[str, Any] = {"logprobs": []} if self._open == "message" else {}
            yield self._event(f"{part['type']}.done", content_index=0, text=text, **logprobs)
            yield self._event("content_part.done", content_index=0, part=part)
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}
        self._open = ""

    def _part(self, text: str) -> dict[str, Any]:
        part: dict[str, Any] = {"type": _TEXT_TYPES[self._open], "text": text}
        return {**part, "annotations": [], "logprobs": []} if self._open == "message" else part

    def _event(self, kind: str, **fields: Any) -> Event:
        position = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": f"response.{kind}", **position, **fields}
