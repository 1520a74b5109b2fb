"""The reply to POST /v1/responses, whole or as the events of a stream."""

from __future__ import annotations

from typing import Any

from router.api.bodies.api_call import ApiCall
from router.api.openai.replies import MESSAGE_CHARS
from router.api.openai.responses.output import OutputItems
from router.api.replies.reply import NamedEventsReply, ReplyFacts, dumped, named_event
from router.requests.answer import Ending
from router.requests.request import Admitted
from router.text.answer_syntax.parser import AnswerDelta
from tandem.protocol.errors import ResourceExhausted, TandemError, clipped
from tandem.protocol.messages import FinishReason

_STATUS = {FinishReason.STOP: "completed", FinishReason.LENGTH: "incomplete", FinishReason.ABORT: "cancelled"}


class ResponseReply(NamedEventsReply):
    """Builds the response object and its events."""

    def __init__(self, call: ApiCall, admitted: Admitted, facts: ReplyFacts) -> None:
        super().__init__(admitted, streamed=call.stream)
        self.answer_id = f"resp_{facts.request_id}"
        self._head = {
            "id": self.answer_id,
            "object": "response",
            "created_at": facts.created,
            "model": facts.model,
            "temperature": admitted.sampling.temperature,
            "top_p": admitted.sampling.top_p,
        }
        self._echo = call.echo
        self._output = OutputItems(facts.request_id, call.namespaced)
        self._reasoning = _ReasoningTokens()
        self._count = 0
        """Number of events so far."""
        self._body = ""

    def opening(self, choices: int = 1) -> bytes:
        """Return the events `response.created` and `response.in_progress`."""
        begun = self._response("in_progress")
        return self._response_event("response.created", begun) + self._response_event("response.in_progress", begun)

    def failure(self, error: TandemError) -> bytes:
        """Return the event `response.failed`, after the first ones if the answer has not begun."""
        opening = b"" if self._count else self.opening()
        last = self._events(self._output.finish("incomplete")) if self._output.items else b""
        code = "rate_limit_exceeded" if isinstance(error, ResourceExhausted) else "server_error"
        failed = self._response("failed", error={"code": code, "message": clipped(error.message, MESSAGE_CHARS)})
        return opening + last + self._response_event("response.failed", failed)

    def whole(self) -> bytes:
        """Return the response object of an answer that has ended."""
        return self._body.encode()

    def _add(self, delta: AnswerDelta, tokens: int) -> bytes:
        self._reasoning.add(delta, tokens)
        return self._events(self._output.add(delta))

    def _finish(self, ending: Ending, *, called: bool) -> bytes:
        status = _STATUS[ending.finish_reason]
        last = self._events(self._output.finish("completed" if status == "completed" else "incomplete"))
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        self._body = self._response(status, usage=self._usage(ending), incomplete_details=reason)
        return last + self._response_event(
            f"response.{'completed' if status == 'completed' else 'incomplete'}", self._body
        )

    def _response(
        self,
        status: str,
        *,
        usage: dict[str, Any] | None = None,
        incomplete_details: dict[str, str] | None = None,
        error: dict[str, str] | None = None,
    ) -> str:
        head = dumped({**self._head, "status": status})
        output = self._output.items if status != "in_progress" else []
        tail = dumped({"output": output, "error": error, "incomplete_details": incomplete_details, "usage": usage})
        return f"{head[:-1]},{self._echo}{tail[1:]}"

    def _usage(self, ending: Ending) -> dict[str, Any]:
        prompt, answer = ending.prompt_tokens, ending.completion_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": ending.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": answer,
            "output_tokens_details": {"reasoning_tokens": min(self._reasoning.count, answer)},
            "total_tokens": prompt + answer,
        }

    def _event(self, event: dict[str, Any]) -> bytes:
        return super()._event({**event, **self._numbered()})

    def _response_event(self, kind: str, response: str) -> bytes:
        head = dumped({"type": kind, **self._numbered()})
        return named_event(kind, f'{head[:-1]},"response":{response}}}')

    def _numbered(self) -> dict[str, int]:
        self._count += 1
        return {"sequence_number": self._count - 1}


class _ReasoningTokens:
    """Counts the tokens of reasoning, its tags included.

    The count is exact if tokens arrive one by one; tokens that arrive together are divided by their characters.
    """

    def __init__(self) -> None:
        self.count = 0
        self._waiting = 0
        """Tokens whose text is not certain yet."""

    def add(self, delta: AnswerDelta, tokens: int) -> None:
        """Add the next parts, parsed when `tokens` more had arrived."""
        self._waiting += tokens
        reasoning = len(delta.reasoning)
        other = len(delta.content) + sum(len(call.name) + len(call.arguments) for call in delta.calls)
        if reasoning or other:
            self.count += round(self._waiting * reasoning / (reasoning + other))
            self._waiting = 0
