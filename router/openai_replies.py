"""What OpenAI clients expect back: bodies, stream events and errors, as bytes ready to send."""

import json
import math
from collections.abc import Sequence
from typing import Any

from router.answer import Ending
from router.openai_logprobs import chat_logprobs, completion_logprobs
from router.token_scores import TokenScore
from wire.errors import InvalidArgument, NotFound, TandemError
from wire.messages import FinishReason

_FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    429: "rate_limit_error",
}

DONE = b"data: [DONE]\n\n"
"""The last event of a stream that ended well."""


class ReplyShape:
    """Chat completions and text completions differ in names only."""

    def __init__(
        self, *, chat: bool, request_id: str, model: str, created: int, include_usage: bool, logprobs: bool
    ) -> None:
        """`created` in Unix seconds."""
        self._chat = chat
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._head = {"id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}", "created": created, "model": model}
        # One event a token and stream: everything but the text is made once.
        usage = {"usage": None} if include_usage else {}
        before, after = _dumps({**self._stream_head(), "choices": [self._choice("\x00", None)], **usage}).split(
            '"\\u0000"'
        )
        self._before, self._after = f"data: {before}", f"{after}\n\n"

    def opening(self) -> bytes:
        """The first event of a stream."""
        if not self._chat:
            return b""
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return self._event([choice])

    def piece(self, text: str, scores: Sequence[TokenScore]) -> bytes:
        """The event that carries the next text and log probabilities; empty if there are none of either."""
        if self._logprobs and (text or scores):
            return self._event([{**self._choice(text, None), "logprobs": self._scores(scores)}])
        if not text:
            return b""
        return f"{self._before}{json.dumps(text)}{self._after}".encode()

    def closing(self, ending: Ending) -> bytes:
        """The last events of a stream: finish reason, usage if asked for, DONE."""
        events = self._event([self._choice(None if self._chat else "", _FINISH[ending.finish_reason])])
        if self._include_usage:
            events += _sse({**self._stream_head(), "choices": [], "usage": _usage(ending)})
        return events + DONE

    def whole(self, text: str, scores: Sequence[TokenScore], ending: Ending) -> bytes:
        """The body of an answer that is not streamed."""
        finish = _FINISH[ending.finish_reason]
        logprobs = self._scores(scores) if self._logprobs else None
        choice: dict[str, Any] = {"index": 0, "logprobs": logprobs, "finish_reason": finish}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        kind = "chat.completion" if self._chat else "text_completion"
        return _dumps({**self._head, "object": kind, "choices": [choice], "usage": _usage(ending)}).encode()

    def _scores(self, scores: Sequence[TokenScore]) -> dict[str, Any]:
        return chat_logprobs(scores) if self._chat else completion_logprobs(scores)

    def _event(self, choices: list[dict[str, Any]]) -> bytes:
        usage = {"usage": None} if self._include_usage else {}
        return _sse({**self._stream_head(), "choices": choices, **usage})

    def _stream_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk" if self._chat else "text_completion"}

    def _choice(self, text: str | None, finish: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish}
        if self._chat:
            choice["delta"] = {} if text is None else {"content": text}
        else:
            choice["text"] = text
        return choice


def error_body(error: TandemError) -> bytes:
    """OpenAI's error object; `param` is the field that is wrong, if one is."""
    return json_error(
        error.http_status,
        error.message,
        code="model_not_found" if isinstance(error, NotFound) else error.code.lower(),
        param=_param(error),
    )


def json_error(status: int, message: str, *, code: str, param: str | None = None) -> bytes:
    """OpenAI's error object for an HTTP status."""
    kind = _ERROR_TYPES.get(status, "server_error")
    return _dumps({"error": {"message": message, "type": kind, "param": param, "code": code}}).encode()


def error_event(error: TandemError) -> bytes:
    """The event that ends a stream with an error; no DONE follows it."""
    return b"data: " + error_body(error) + b"\n\n"


def error_headers(error: TandemError) -> dict[str, str]:
    """Retry-After in whole seconds, if a retry makes sense."""
    return {"retry-after": str(math.ceil(error.retry_after_s))} if error.retry_after_s else {}


def model_card(name: str, created: int, max_context: int | None) -> dict[str, Any]:
    """One entry of /v1/models; `max_model_len` is an extra many clients read."""
    return {"id": name, "object": "model", "created": created, "owned_by": "tandem", "max_model_len": max_context}


def _param(error: TandemError) -> str | None:
    if isinstance(error, InvalidArgument):
        return error.field
    return "model" if isinstance(error, NotFound) else None


def _usage(ending: Ending) -> dict[str, Any]:
    return {
        "prompt_tokens": ending.prompt_tokens,
        "completion_tokens": ending.completion_tokens,
        "total_tokens": ending.prompt_tokens + ending.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": ending.cached_tokens},
    }


def _sse(value: dict[str, Any]) -> bytes:
    return f"data: {_dumps(value)}\n\n".encode()


def _dumps(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))
