"""Splits the answers to one request into the parts of `Chunk`: text, reasoning and tool calls."""

from __future__ import annotations

from router.api.answer_parts import AnswerParsers
from router.text.answer_syntax.formats import AnswerSyntax
from router.text.answer_syntax.parser import AnswerDelta
from tandem.protocol.generated.tandem.v1 import inference_pb2, types_pb2


class AnswerChunks:
    """The parsers of the answers; without a syntax all text is `text`."""

    def __init__(self, syntax: AnswerSyntax | None) -> None:
        self._parsers = AnswerParsers(syntax)

    def feed(self, index: int, text: str, chunk: inference_pb2.Chunk) -> None:
        """Set the fields of a chunk for the next text of answer number `index`."""
        _fill(chunk, self._parsers.feed(index, text))

    def finish(self, index: int) -> inference_pb2.Chunk | None:
        """Return the last chunk of an answer that has ended, None if nothing is left."""
        rest, chunk = self._parsers.finish(index), inference_pb2.Chunk()
        _fill(chunk, rest)
        return chunk if rest.content or rest.reasoning or rest.calls else None

    def finish_reason(self, index: int, reason: types_pb2.FinishReason) -> types_pb2.FinishReason:
        """Return the reason for clients: that of an answer with calls is not that it stopped."""
        called = reason == types_pb2.FINISH_REASON_STOP and self._parsers.called(index)
        return types_pb2.FINISH_REASON_TOOL_CALLS if called else reason


def _fill(chunk: inference_pb2.Chunk, delta: AnswerDelta) -> None:
    chunk.text = delta.content
    if delta.reasoning:
        chunk.reasoning = delta.reasoning
    for call in delta.calls:
        chunk.tool_calls.add(index=call.index, id=call.call_id, name=call.name, arguments=call.arguments)
