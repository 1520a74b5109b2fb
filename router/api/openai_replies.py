"""The replies of the OpenAI-compatible API: bodies, stream events and errors, as bytes ready to send."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.api.answer_parts import AnswerParsers, delta_fields, message_fields
from router.api.openai_logprobs import chat_logprobs, completion_logprobs
from router.api.openai_requests import StreamOptions
from router.requests.answer import AnswerChunk, Ending
from router.text.answer_syntax.formats import AnswerSyntax
from router.text.answer_syntax.parser import AnswerDelta
from router.text.token_scores import TokenScore
from wire.errors import InvalidArgument, NotFound, TandemError, clipped
from wire.messages import FinishReason

_FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    429: "rate_limit_error",
}

_MESSAGE_CHARS = 2048
"""Longest message of an error, in characters."""

DONE = b"data: [DONE]\n\n"
"""The last event of a stream that ended without an error."""


@dataclass(frozen=True, slots=True)
class CompleteAnswer:
    """One complete answer of a request that is not streamed."""

    text: str
    scores: Sequence[TokenScore]
    ending: Ending


class ReplyShape:
    """Builds the replies to one request; chat completions and text completions differ in names only."""

    def __init__(
        self,
        *,
        chat: bool,
        request_id: str,
        model: str,
        created: int,
        prompt_tokens: int,
        stream_options: StreamOptions,
        logprobs: bool,
        syntax: AnswerSyntax | None = None,
    ) -> None:
        """`created` is in Unix seconds; with a `syntax` answers are split into reasoning, content and tool calls."""
        self._parsers = AnswerParsers(syntax)
        self._chat = chat
        self._logprobs = logprobs
        self._include_usage = stream_options.include_usage
        self._continuous_usage = stream_options.continuous_usage
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = 0
        """Number of tokens sent so far, over all choices."""
        self.answer_id = f"{'chatcmpl' if chat else 'cmpl'}-{request_id}"
        """The `id` of the reply."""
        self._head = {"id": self.answer_id, "created": created, "model": model}
        # There is one event per token, so everything but the text is serialized once for each choice.
        self._around: list[tuple[str, str]] = []

    def opening(self, choices: int = 1) -> bytes:
        """Return the first events of a stream, one for each choice."""
        for index in range(choices):
            whole = _dumps(
                {**self._stream_head(), "choices": [self._choice(index, "\x00", None)], **self._usage_so_far()}
            )
            before, after = whole.split('"\\u0000"')
            self._around.append((f"data: {before}", f"{after}\n\n"))
        if not self._chat:
            return b""
        begun: dict[str, Any] = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return b"".join(self._event([{"index": index, **begun}]) for index in range(choices))

    def chunk(self, index: int, chunk: AnswerChunk) -> bytes:
        """Return the event with the next text and log probabilities; empty if there is neither."""
        delta = self._parsers.feed(index, chunk.text)
        text = delta.content
        self._completion_tokens += len(chunk.token_ids)
        if delta.calls or delta.reasoning:
            return self._parts(index, delta, chunk.scores)
        if self._logprobs and (text or chunk.scores):
            return self._event([{**self._choice(index, text, None), "logprobs": self._scores(chunk.scores)}])
        if not text:
            return b""
        if self._continuous_usage:
            return self._event([self._choice(index, text, None)])
        before, after = self._around[index]
        return f"{before}{json.dumps(text)}{after}".encode()

    def ending(self, index: int, ending: Ending) -> bytes:
        """Return the last event of a choice, which has its finish reason."""
        rest = self._parsers.finish(index)
        before = self._parts(index, rest, ()) if rest.calls or rest.reasoning or rest.content else b""
        return before + self._event([self._choice(index, None if self._chat else "", self._finish(index, ending))])

    def _parts(self, index: int, delta: AnswerDelta, scores: Sequence[TokenScore]) -> bytes:
        logprobs = self._scores(scores) if self._logprobs else None
        return self._event([{**self._choice(index, None, None), "delta": delta_fields(delta), "logprobs": logprobs}])

    def _finish(self, index: int, ending: Ending) -> str:
        called = ending.finish_reason is FinishReason.STOP and self._parsers.called(index)
        return "tool_calls" if called else _FINISH[ending.finish_reason]

    def closing(self, endings: Mapping[int, Ending]) -> bytes:
        """Return the last events of a stream: usage if requested, then DONE."""
        if not self._include_usage:
            return DONE
        ends = [endings[index] for index in sorted(endings)]
        return _sse({**self._stream_head(), "choices": [], "usage": _usage(ends)}) + DONE

    def whole(self, choices: Sequence[CompleteAnswer]) -> bytes:
        """Return the body of a reply that is not streamed."""
        kind = "chat.completion" if self._chat else "text_completion"
        made = [self._whole_choice(index, each) for index, each in enumerate(choices)]
        usage = _usage([each.ending for each in choices])
        return _dumps({**self._head, "object": kind, "choices": made, "usage": usage}).encode()

    def _whole_choice(self, index: int, whole: CompleteAnswer) -> dict[str, Any]:
        parts = self._parsers.feed(index, whole.text), self._parsers.finish(index)
        finish = self._finish(index, whole.ending)
        logprobs = self._scores(whole.scores) if self._logprobs else None
        choice: dict[str, Any] = {"index": index, "logprobs": logprobs, "finish_reason": finish}
        if self._chat:
            choice["message"] = {"role": "assistant", **message_fields(parts), "refusal": None}
        else:
            choice["text"] = whole.text
        return choice

    def _scores(self, scores: Sequence[TokenScore]) -> dict[str, Any]:
        return chat_logprobs(scores) if self._chat else completion_logprobs(scores)

    def _event(self, choices: list[dict[str, Any]]) -> bytes:
        return _sse({**self._stream_head(), "choices": choices, **self._usage_so_far()})

    def _usage_so_far(self) -> dict[str, Any]:
        """Return the `usage` field of a chunk: the counts so far, null if only the end has them, or nothing."""
        if self._continuous_usage:
            return {"usage": _counts(self._prompt_tokens, self._completion_tokens)}
        return {"usage": None} if self._include_usage else {}

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
    """Return OpenAI's error object; `param` is the field that is wrong, if any."""
    return json_error(
        error.http_status,
        error.message,
        code="model_not_found" if isinstance(error, NotFound) else error.code.lower(),
        param=_param(error),
    )


def json_error(status: int, message: str, *, code: str, param: str | None = None) -> bytes:
    """Return OpenAI's error object for an HTTP status."""
    kind = _ERROR_TYPES.get(status, "server_error")
    message = clipped(message, _MESSAGE_CHARS)
    return _dumps({"error": {"message": message, "type": kind, "param": param, "code": code}}).encode()


def error_event(error: TandemError) -> bytes:
    """Return the event that ends a stream with an error; no DONE follows it."""
    return b"data: " + error_body(error) + b"\n\n"


def error_headers(error: TandemError) -> dict[str, str]:
    """Return the Retry-After header in whole seconds if the error has a retry hint."""
    return {"retry-after": str(math.ceil(error.retry_after_s))} if error.retry_after_s else {}


def _param(error: TandemError) -> str | None:
    if isinstance(error, InvalidArgument):
        return error.field
    return "model" if isinstance(error, NotFound) else None


def _usage(endings: Sequence[Ending]) -> dict[str, Any]:
    """Return the total usage of all answers; the prompt counts once, with the first answer's cached tokens."""
    first = endings[0]
    completion = sum(ending.completion_tokens for ending in endings)
    return {
        **_counts(first.prompt_tokens, completion),
        "prompt_tokens_details": {"cached_tokens": first.cached_tokens},
    }


def _counts(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _sse(value: dict[str, Any]) -> bytes:
    return f"data: {_dumps(value)}\n\n".encode()


def _dumps(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))
