"""Splits the answers to one request into the parts of `Chunk`: text, reasoning and tool calls."""

from __future__ import annotations

from typing import Any

from router.api.answer_parts import AnswerParsers
from router.text.answer_syntax.formats import AnswerSyntax
from router.text.answer_syntax.parser import AnswerDelta
from wire.generated.tandem.v1 import inference_pb2, types_pb2


class AnswerChunks:
    """The parsers of the answers; without a syntax all text is `text`."""

    def __init__(self, syntax: AnswerSyntax | None) -> None:
        self._parsers = AnswerParsers(syntax)

    def feed(self, index: int, text: str) -> dict[str, Any]:
        """Return the fields of a chunk for the next text of answer number `index`."""
        return _fields(self._parsers.feed(index, text))

    def finish(self, index: int) -> dict[str, Any]:
        """Return the fields of the last chunk of an answer that has ended, {} if nothing is left."""
        rest = self._parsers.finish(index)
        return _fields(rest) if rest.content or rest.reasoning or rest.calls else {}

    def finish_reason(self, index: int, reason: types_pb2.FinishReason) -> types_pb2.FinishReason:
        """Return the reason for clients: that of an answer with calls is not that it stopped."""
        called = reason == types_pb2.FINISH_REASON_STOP and self._parsers.called(index)
        return types_pb2.FINISH_REASON_TOOL_CALLS if called else reason


def _fields(delta: AnswerDelta) -> dict[str, Any]:
    if not delta.reasoning and not delta.calls:
        return {"text": delta.content}
    calls = [
        inference_pb2.ToolCallDelta(index=call.index, id=call.call_id, name=call.name, arguments=call.arguments)
        for call in delta.calls
    ]
    return {"text": delta.content, "reasoning": delta.reasoning, "tool_calls": calls}
