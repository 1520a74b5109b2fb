"""What OpenAI clients expect back: bodies, stream events and errors, as bytes ready to send."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Whole:
    """One answer that is complete."""

    text: str
    scores: Sequence[TokenScore]
    ending: Ending


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
        # One event a token and stream: everything but the text is made once for each choice.
        self._around: list[tuple[str, str]] = []

    def opening(self, choices: int = 1) -> bytes:
        """The first events of a stream, one for each choice."""
        usage = {"usage": None} if self._include_usage else {}
        for index in range(choices):
            whole = _dumps({**self._stream_head(), "choices": [self._choice(index, "\x00", None)], **usage})
            before, after = whole.split('"\\u0000"')
            self._around.append((f"data: {before}", f"{after}\n\n"))
        if not self._chat:
            return b""
        begun: dict[str, Any] = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return b"".join(self._event([{"index": index, **begun}]) for index in range(choices))

    def piece(self, index: int, text: str, scores: Sequence[TokenScore]) -> bytes:
        """The event that carries the next text and log probabilities; empty if there are none of either."""
        if self._logprobs and (text or scores):
            return self._event([{**self._choice(index, text, None), "logprobs": self._scores(scores)}])
        if not text:
            return b""
        before, after = self._around[index]
        return f"{before}{json.dumps(text)}{after}".encode()

    def ending(self, index: int, ending: Ending) -> bytes:
        """The last event of a choice: its finish reason."""
        return self._event([self._choice(index, None if self._chat else "", _FINISH[ending.finish_reason])])

    def closing(self, endings: Mapping[int, Ending]) -> bytes:
        """The last events of a stream, behind those of its choices: usage if asked for, DONE."""
        if not self._include_usage:
            return DONE
        ends = [endings[index] for index in sorted(endings)]
        return _sse({**self._stream_head(), "choices": [], "usage": _usage(ends)}) + DONE

    def whole(self, choices: Sequence[Whole]) -> bytes:
        """The body of answers that are not streamed."""
        kind = "chat.completion" if self._chat else "text_completion"
        made = [self._whole_choice(index, each) for index, each in enumerate(choices)]
        usage = _usage([each.ending for each in choices])
        return _dumps({**self._head, "object": kind, "choices": made, "usage": usage}).encode()

    def _whole_choice(self, index: int, whole: Whole) -> dict[str, Any]:
        finish = _FINISH[whole.ending.finish_reason]
        logprobs = self._scores(whole.scores) if self._logprobs else None
        choice: dict[str, Any] = {"index": index, "logprobs": logprobs, "finish_reason": finish}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": whole.text, "refusal": None}
        else:
            choice["text"] = whole.text
        return choice

    def _scores(self, scores: Sequence[TokenScore]) -> dict[str, Any]:
        return chat_logprobs(scores) if self._chat else completion_logprobs(scores)

    def _event(self, choices: list[dict[str, Any]]) -> bytes:
        usage = {"usage": None} if self._include_usage else {}
        return _sse({**self._stream_head(), "choices": choices, **usage})

    def _stream_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk" if self._chat else "text_completion"}

    def _choice(self, index: int, text: str | None, finish: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": finish}
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


def _usage(endings: Sequence[Ending]) -> dict[str, Any]:
    """The prompt counts once, as the first answer found it."""
    first = endings[0]
    completion = sum(ending.completion_tokens for ending in endings)
    return {
        "prompt_tokens": first.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": first.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": first.cached_tokens},
    }


def _sse(value: dict[str, Any]) -> bytes:
    return f"data: {_dumps(value)}\n\n".encode()


def _dumps(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))
