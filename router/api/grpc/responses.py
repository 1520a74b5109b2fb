"""Turns the answers to a call into `GenerateResponse` messages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from router.api.answers import AnswerParsers, best_of, collected
from router.api.grpc.calls import InferenceCall
from router.api.prompt_replies import PromptReplies, PromptReply
from router.requests.answer import AnswerChunk, AnswerEnd
from router.requests.choices import Choices
from router.requests.request import Admitted
from router.text.answer_syntax.formats import AnswerSyntax
from router.text.answer_syntax.parser import AnswerDelta
from router.text.token_scores import ScoredToken, TokenScore
from tandem.protocol import conversion
from tandem.protocol.generated.tandem.v1 import inference_pb2, types_pb2


class AnswerChunks:
    """Parses answers into the fields of `Chunk` messages; without a syntax all text goes into `text`."""

    def __init__(self, syntax: AnswerSyntax | None) -> None:
        self._parsers = AnswerParsers(syntax)

    def feed(self, index: int, text: str, chunk: inference_pb2.Chunk) -> None:
        """Parse the next text of answer number `index`, and set the fields of `chunk`."""
        _fill(chunk, self._parsers.feed(index, text))

    def finish(self, index: int) -> inference_pb2.Chunk | None:
        """Return a chunk with the rest of an ended answer; None if the parser has held nothing back."""
        rest, chunk = self._parsers.finish(index), inference_pb2.Chunk()
        _fill(chunk, rest)
        return chunk if rest.content or rest.reasoning or rest.calls else None

    def finish_reason(self, index: int, reason: types_pb2.FinishReason) -> types_pb2.FinishReason:
        """Return the finish reason for the client: STOP becomes TOOL_CALLS if the answer has a tool call."""
        called = reason == types_pb2.FINISH_REASON_STOP and self._parsers.called(index)
        return types_pb2.FINISH_REASON_TOOL_CALLS if called else reason


def _fill(chunk: inference_pb2.Chunk, delta: AnswerDelta) -> None:
    chunk.text = delta.content
    if delta.reasoning:
        chunk.reasoning = delta.reasoning
    for call in delta.calls:
        chunk.tool_calls.add(index=call.index, id=call.call_id, name=call.name, arguments=call.arguments)


Write = Callable[[inference_pb2.GenerateResponse], Awaitable[None]]
"""A function that sends a message, and returns when the next message may be sent."""


class Responses:
    """Writes the answers to one call as messages: all as they arrive, or the best at the end (`best_of`)."""

    def __init__(
        self, call: InferenceCall, admitted: Sequence[Admitted], choices: Choices, prompts: PromptReplies
    ) -> None:
        self._call = call
        self._admitted = admitted
        self._choices = choices
        self._prompts = prompts
        self._parts = AnswerChunks(admitted[0].syntax)

    async def send(self, write: Write) -> None:
        """Write all messages. Raises the first `TandemError` of any answer."""
        await (self._as_they_come(write) if self._call.options.best_of is None else self._best(write))

    async def _as_they_come(self, write: Write) -> None:
        answers = self._admitted[0].n
        described: set[int] = set()
        while not self._choices.over:
            index, event = await self._choices.next()
            number = index // answers
            if self._call.describes_prompts and number not in described:
                described.add(number)
                await write(self._response(number * answers, prompt=await self._prompt(number)))
            await self._write(write, index, self._call.prompts.shown(event))

    async def _best(self, write: Write) -> None:
        kept, made = self._call.options.n or 1, self._admitted[0].n
        whole = await collected(self._choices, self._call.prompts)
        for index, answer in enumerate(best_of(whole, kept, made)):
            if self._call.describes_prompts and index % kept == 0:
                await write(self._response(index, prompt=await self._prompt(index // kept)))
            scores = [] if self._call.options.alternatives is None else answer.scores
            chunk = AnswerChunk(answer.text, [*answer.token_ids], [*scores])
            for event in (chunk, answer.ending):
                await self._write(write, index, event)

    async def _prompt(self, number: int) -> inference_pb2.PromptDetails:
        reply = await self._prompts.of(number * self._admitted[0].n)
        ids = self._admitted[number].prompt_token_ids if self._call.return_token_ids else ()
        # There may be hundreds of thousands of scores, which would block the event loop.
        return await asyncio.to_thread(prompt_details, reply, ids)

    async def _write(self, write: Write, index: int, event: AnswerChunk | AnswerEnd) -> None:
        if isinstance(event, AnswerChunk):
            # There is one message per token, and setting fields is faster than passing them to constructors.
            response = self._response(index)
            chunk = response.chunk
            self._parts.feed(index, event.text, chunk)
            chunk.token_ids.extend(event.token_ids)
            if event.scores:
                chunk.logprobs.extend(map(_score, event.scores))
            await write(response)
            return
        if (rest := self._parts.finish(index)) is not None:
            await write(self._response(index, chunk=rest))
        complete = _complete(event)
        complete.finish_reason = self._parts.finish_reason(index, complete.finish_reason)
        await write(self._response(index, complete=complete))

    def _response(self, index: int, **event: Any) -> inference_pb2.GenerateResponse:
        return inference_pb2.GenerateResponse(request_id=self._choices.request_id, index=index, **event)


def prompt_details(reply: PromptReply | None, ids: Sequence[int]) -> inference_pb2.PromptDetails:
    """Return the message about a prompt: its token `ids`, and the text and scores in `reply`; may run in any thread."""
    details = inference_pb2.PromptDetails(token_ids=ids)
    if reply is not None:
        details.text = reply.text
        if reply.scores:
            first = replace(reply.scores[0], chosen=replace(reply.scores[0].chosen, logprob=0.0))
            details.tokens.extend([_score(first), *map(_score, reply.scores[1:])])
    return details


def _score(score: TokenScore) -> inference_pb2.TokenScore:
    return inference_pb2.TokenScore(chosen=_scored(score.chosen), top=[_scored(token) for token in score.top])


def _scored(token: ScoredToken) -> inference_pb2.ScoredToken:
    return inference_pb2.ScoredToken(token_id=token.token_id, utf8=token.utf8, logprob=token.logprob)


def _complete(ending: AnswerEnd) -> inference_pb2.Complete:
    return inference_pb2.Complete(
        finish_reason=cast(types_pb2.FinishReason, ending.finish_reason or 0),
        matched_stop=ending.matched_stop,
        prompt_tokens=ending.prompt_tokens,
        completion_tokens=ending.completion_tokens,
        cached_tokens=ending.cached_tokens,
        cache_written_tokens=ending.cache_written_tokens,
        timeline=conversion.to_proto(ending.timeline, inference_pb2.Timeline),
    )
