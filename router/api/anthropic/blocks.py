"""The content blocks of an answer, and the events that build them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from router.text.answer_syntax.parser import AnswerDelta

Event = dict[str, Any]
_FIELDS = {"text": "text", "thinking": "thinking"}
"""The field of a block that has its text."""


class ContentBlocks:
    """Thinking, text and calls of tools, in the order of the answer; only the last block is in progress."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._open = ""
        """The type of the block in progress; "" = none is."""
        self._texts: list[str] = []

    def add(self, delta: AnswerDelta) -> Iterator[Event]:
        """Add the next parts of the answer; yields their events."""
        if delta.reasoning:
            yield from self._text({"type": "thinking", "thinking": "", "signature": ""}, delta.reasoning)
        if delta.content:
            yield from self._text({"type": "text", "text": ""}, delta.content)
        for call in delta.calls:
            if call.name:
                yield from self._begin({"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}})
            if call.arguments:
                self._texts.append(call.arguments)
                yield self._delta("input_json_delta", "partial_json", call.arguments)

    def end(self) -> Iterator[Event]:
        """Complete the block in progress, if there is one."""
        if not self._open:
            return
        block, text = self.blocks[-1], "".join(self._texts)
        if self._open == "tool_use":
            block["input"] = _object(text)
        else:
            block[_FIELDS[self._open]] = text
        if self._open == "thinking":
            yield self._delta("signature_delta", "signature", "")
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}
        self._open, self._texts = "", []

    def _text(self, block: dict[str, Any], text: str) -> Iterator[Event]:
        kind = block["type"]
        if self._open != kind:
            yield from self._begin(block)
        self._texts.append(text)
        yield self._delta(f"{kind}_delta", _FIELDS[kind], text)

    def _begin(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self.end()
        self._open = block["type"]
        self.blocks.append(block)
        yield {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": block}

    def _delta(self, kind: str, field: str, text: str) -> Event:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": {"type": kind, field: text}}


def _object(text: str) -> dict[str, Any]:
    """Return the arguments of a call; {} if the answer was cut before their end."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
