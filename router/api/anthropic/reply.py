"""The reply to POST /v1/messages, whole or as the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from router.api.anthropic.errors import message_error
from router.api.cache_hints import seconds_of
from router.api.call import ApiCall
from router.api.reply import NamedEventsReply, ReplyFacts, dumped, sse_event
from router.requests.answer import AnswerEnd
from router.requests.request import Admitted
from router.text.answer_syntax.parser import AnswerDelta
from tandem.protocol.errors import TandemError
from tandem.protocol.messages import FinishReason

Event = dict[str, Any]
_FIELDS = {"text": "text", "thinking": "thinking"}
"""The name of the field with the text of a content block, by the block's type."""


class ContentBlocks:
    """Builds the content blocks of an answer in order: thinking, text and tool calls; only the last is unfinished."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._open = ""
        """The type of the unfinished block; "" if there is none."""
        self._texts: list[str] = []

    def add(self, delta: AnswerDelta) -> Iterator[Event]:
        """Add the next parts of the answer, and yield their events."""
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
        """Complete the unfinished block, if there is one, and yield its last events."""
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
    """Return the arguments of a tool call; {} if they are not a JSON object, as in an answer that was cut off."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return arguments if isinstance(arguments, dict) else {}


class MessageReply(NamedEventsReply):
    """Builds the message of one answer, and its events if it is streamed."""

    def __init__(self, call: ApiCall, admitted: Sequence[Admitted], facts: ReplyFacts) -> None:
        super().__init__(admitted[0], streamed=call.stream)
        self.answer_id = f"msg_{facts.request_id}"
        self._blocks = ContentBlocks()
        self._retention_s, self._hinted = admitted[0].cache_retention_s, admitted[0].hinted_tokens
        self._message: dict[str, Any] = {
            "id": self.answer_id,
            "type": "message",
            "role": "assistant",
            "model": facts.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            # How many prompt tokens were read from a cache, and written to it, is only known when the answer ends.
            "usage": _usage(len(admitted[0].prompt_token_ids), 0, 0, 0),
        }

    def opening(self, choices: int = 1) -> bytes:
        """Return the events `message_start` and `ping`."""
        return self._events([{"type": "message_start", "message": self._message}, {"type": "ping"}])

    def failure(self, error: TandemError) -> bytes:
        """Return the event `error`, which ends the stream."""
        return sse_event(message_error(error), name="error")

    def _body(self) -> bytes:
        return dumped(self._message).encode()

    def _add(self, delta: AnswerDelta, tokens: int) -> bytes:
        return self._events(self._blocks.add(delta))

    def _finish(self, ending: AnswerEnd, *, called: bool) -> bytes:
        last = self._events(self._blocks.end())
        stop = {"stop_reason": _stop_reason(ending, called=called), "stop_sequence": ending.matched_stop or None}
        read, written = ending.cached_tokens, ending.cache_written_tokens if self._retention_s else 0
        if self._hinted is not None:
            written = min(written, max(0, self._hinted - read))
        usage = _usage(ending.prompt_tokens, ending.completion_tokens, read, written)
        if self._retention_s:
            longer = self._retention_s > seconds_of("5m")
            ttl, other = ("1h", "5m") if longer else ("5m", "1h")
            usage["cache_creation"] = {f"ephemeral_{ttl}_input_tokens": written, f"ephemeral_{other}_input_tokens": 0}
        self._message |= {"content": self._blocks.blocks, **stop, "usage": usage}
        return last + self._events([{"type": "message_delta", "delta": stop, "usage": usage}, {"type": "message_stop"}])


def _stop_reason(ending: AnswerEnd, *, called: bool) -> str | None:
    """Return Anthropic's stop reason; None for an answer that was aborted."""
    if ending.finish_reason is FinishReason.LENGTH:
        return "max_tokens"
    if ending.finish_reason is not FinishReason.STOP:
        return None
    if ending.matched_stop:
        return "stop_sequence"
    return "tool_use" if called else "end_turn"


def _usage(prompt: int, answer: int, read: int, written: int) -> dict[str, Any]:
    """Return the usage object; prompt tokens read from a cache, written to it, and all others are separate numbers.

    `written` is 0 for a request without `cache_control`: by Anthropic's count, such a request writes nothing.
    """
    return {
        "input_tokens": prompt - read - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": read,
        "output_tokens": answer,
    }
