"""The reply to POST /v1/messages, whole or as the events of a stream."""

from __future__ import annotations

from typing import Any

from router.api.anthropic.blocks import ContentBlocks
from router.api.anthropic.errors import message_error
from router.api.bodies.api_call import ApiCall
from router.api.replies.reply import NamedEventsReply, ReplyFacts, dumped, named_event
from router.requests.answer import Ending
from router.requests.request import Admitted
from router.text.answer_syntax.parser import AnswerDelta
from tandem.protocol.errors import TandemError
from tandem.protocol.messages import FinishReason


class MessageReply(NamedEventsReply):
    """Builds the message and its events."""

    def __init__(self, call: ApiCall, admitted: Admitted, facts: ReplyFacts) -> None:
        super().__init__(admitted, streamed=call.stream)
        self.answer_id = f"msg_{facts.request_id}"
        self._blocks = ContentBlocks()
        self._message: dict[str, Any] = {
            "id": self.answer_id,
            "type": "message",
            "role": "assistant",
            "model": facts.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            # How much of the prompt was cached is known at the answer's end.
            "usage": _usage(len(admitted.prompt_token_ids), 0, 0),
        }

    def opening(self, choices: int = 1) -> bytes:
        """Return the events `message_start` and `ping`."""
        return self._events([{"type": "message_start", "message": self._message}, {"type": "ping"}])

    def failure(self, error: TandemError) -> bytes:
        """Return the event `error`."""
        return named_event("error", message_error(error))

    def whole(self) -> bytes:
        """Return the message, after the answer's end."""
        return dumped(self._message).encode()

    def _add(self, delta: AnswerDelta, tokens: int) -> bytes:
        return self._events(self._blocks.add(delta))

    def _finish(self, ending: Ending, *, called: bool) -> bytes:
        last = self._events(self._blocks.end())
        stop = {"stop_reason": _stop_reason(ending, called=called), "stop_sequence": ending.matched_stop or None}
        usage = _usage(ending.prompt_tokens, ending.completion_tokens, ending.cached_tokens)
        self._message |= {"content": self._blocks.blocks, **stop, "usage": usage}
        return last + self._events([{"type": "message_delta", "delta": stop, "usage": usage}, {"type": "message_stop"}])


def _stop_reason(ending: Ending, *, called: bool) -> str | None:
    """Return Anthropic's name of the outcome; None for an answer that another call has aborted."""
    if ending.finish_reason is FinishReason.LENGTH:
        return "max_tokens"
    if ending.finish_reason is not FinishReason.STOP:
        return None
    if ending.matched_stop:
        return "stop_sequence"
    return "tool_use" if called else "end_turn"


def _usage(prompt: int, answer: int, cached: int) -> dict[str, int]:
    """Return the usage; Anthropic counts cached tokens of the prompt apart from the others."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": answer,
    }
