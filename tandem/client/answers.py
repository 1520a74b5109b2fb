"""The answers to a request: the chunks of a stream, and the complete answers collected from them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tandem.client.requests import Message, ToolCall
from tandem.protocol import conversion
from tandem.protocol.errors import Unavailable
from tandem.protocol.generated.tandem.v1 import inference_pb2, types_pb2
from tandem.protocol.lifecycle.events import Timeline


class FinishReason(StrEnum):
    """The reason why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with the natural logarithm of its probability."""

    token_id: int
    utf8: bytes
    """The bytes of the token, which may be only a part of a UTF-8 character."""
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenScore:
    """The log probability of a token of an answer or prompt, and those of the most likely tokens at its position."""

    chosen: ScoredToken
    top: Sequence[ScoredToken]


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The next part of a tool call in a stream; the first part of a call has its id and name."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """A message of the stream with the next part of one answer."""

    index: int
    """The index of the answer within the request, from 0."""
    text: str
    reasoning: str
    tool_calls: Sequence[ToolCallDelta]
    token_ids: Sequence[int]
    logprobs: Sequence[TokenScore]
    """One entry per token if the request sets `logprobs`, otherwise empty."""
    received_s: float
    """The time at which the client received the message, in seconds of `time.monotonic`."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of an answer; each field is empty unless an option of the request selects it."""

    text: str = ""
    """The prompt's text, if the request sets `echo`."""
    token_ids: Sequence[int] = ()
    """The prompt's token ids, if the request sets `return_token_ids`."""
    logprobs: Sequence[TokenScore] = ()
    """One entry per token, if the request sets `prompt_logprobs`, or `logprobs` with `echo`.

    The first token has no log probability.
    """


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer; all counts are in tokens."""

    request_id: str
    index: int
    text: str
    reasoning: str
    tool_calls: Sequence[ToolCall]
    token_ids: Sequence[int]
    logprobs: Sequence[TokenScore]
    finish_reason: FinishReason
    matched_stop: str
    """The stop string that ended the answer; "" if it ended for another reason."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """The number of prompt tokens whose KV came from a prefix cache."""
    cache_written_tokens: int
    """The number of prompt tokens whose KV this request has added to a prefix cache."""
    prompt: Prompt
    """The parts of the prompt that the request's options select."""
    timeline: Timeline
    """The lifecycle events of the request in the cluster, and the workers that served it."""

    @property
    def message(self) -> Message:
        """The answer as an assistant's message, for the next request of the conversation."""
        return Message("assistant", self.text, self.tool_calls, reasoning=self.reasoning)


@dataclass(frozen=True, slots=True)
class Tokens:
    """The token ids of a text or a conversation."""

    token_ids: Sequence[int]
    token_strs: Sequence[str]
    """The text of each token if the call sets `token_strs`, otherwise empty."""
    max_context: int
    """The maximum number of tokens of prompt and answer together."""


def tokens_of(message: inference_pb2.TokenizeResponse) -> Tokens:
    """Convert a tokenize response."""
    return Tokens(list(message.token_ids), list(message.token_strs), message.max_context)


@dataclass(slots=True)
class _Parts:
    """The parts of one answer that have arrived."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, ToolCall] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenScore] = field(default_factory=list)

    def add(self, chunk: Chunk) -> None:
        self.text.append(chunk.text)
        self.reasoning.append(chunk.reasoning)
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        for part in chunk.tool_calls:
            call = self.calls.get(part.index, ToolCall(part.id, part.name, ""))
            self.calls[part.index] = ToolCall(call.id, call.name, call.arguments + part.arguments)


class AnswerCollector:
    """Collects the messages of one request's stream into answers. It belongs to a `Stream` or `AsyncStream`."""

    def __init__(self, prompts: int, n: int) -> None:
        """Prepare for `n` answers to each prompt; `prompts` is the number of prompts in the request."""
        self._count = prompts * n
        self._n = n
        self._parts: dict[int, _Parts] = {}
        self._answers: dict[int, Answer] = {}
        self._prompts: dict[int, Prompt] = {}

    @property
    def begun(self) -> bool:
        """True once a part of an answer has arrived."""
        return bool(self._parts)

    def add(self, message: inference_pb2.GenerateResponse) -> Chunk | None:
        """Add a message that has just been received; return its chunk, or None if the message has no chunk."""
        received_s = time.monotonic()
        kind = message.WhichOneof("event")
        if kind == "complete":
            parts = self._parts.setdefault(message.index, _Parts())
            prompt = self._prompts.get(message.index // self._n, Prompt())
            self._answers[message.index] = _answer(message, parts, prompt)
        if kind == "prompt":
            self._prompts[message.index // self._n] = _prompt(message.prompt)
        if kind != "chunk":
            return None
        chunk = _chunk(message, received_s)
        self._parts.setdefault(message.index, _Parts()).add(chunk)
        return chunk

    def answers(self) -> list[Answer]:
        """Return the complete answers in order. Raises Unavailable if an answer is missing or incomplete."""
        if self._parts.keys() - self._answers.keys() or len(self._answers) < self._count:
            raise Unavailable("the stream ended before its answers were complete; send the request again")
        return [self._answers[index] for index in sorted(self._answers)]


def _chunk(message: inference_pb2.GenerateResponse, received_s: float) -> Chunk:
    chunk = message.chunk
    return Chunk(
        index=message.index,
        text=chunk.text,
        reasoning=chunk.reasoning,
        tool_calls=[ToolCallDelta(call.index, call.id, call.name, call.arguments) for call in chunk.tool_calls],
        token_ids=list(chunk.token_ids),
        logprobs=[_score(token) for token in chunk.logprobs],
        received_s=received_s,
    )


def _prompt(message: inference_pb2.PromptDetails) -> Prompt:
    return Prompt(message.text, list(message.token_ids), [_score(token) for token in message.tokens])


def _score(score: inference_pb2.TokenScore) -> TokenScore:
    return TokenScore(_scored(score.chosen), [_scored(token) for token in score.top])


def _scored(token: inference_pb2.ScoredToken) -> ScoredToken:
    return ScoredToken(token.token_id, token.utf8, token.logprob)


def _answer(message: inference_pb2.GenerateResponse, parts: _Parts, prompt: Prompt) -> Answer:
    end = message.complete
    reason = types_pb2.FinishReason.Name(end.finish_reason).removeprefix("FINISH_REASON_")
    return Answer(
        request_id=message.request_id,
        index=message.index,
        text="".join(parts.text),
        reasoning="".join(parts.reasoning),
        tool_calls=[call for _, call in sorted(parts.calls.items())],
        token_ids=parts.token_ids,
        logprobs=parts.logprobs,
        finish_reason=FinishReason(reason.lower()),
        matched_stop=end.matched_stop,
        prompt_tokens=end.prompt_tokens,
        completion_tokens=end.completion_tokens,
        cached_tokens=end.cached_tokens,
        cache_written_tokens=end.cache_written_tokens,
        prompt=prompt,
        timeline=conversion.from_proto(end.timeline, Timeline),
    )
