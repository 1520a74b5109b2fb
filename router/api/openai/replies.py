"""The replies of chat completions and completions: bodies and stream events, as bytes to send."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from router.api.answers import AnswerParsers, CompleteAnswer, best_of, collected
from router.api.logprobs import chat_logprobs, completion_logprobs
from router.api.openai.answer_parts import delta_fields, message_fields
from router.api.openai.errors import error_body
from router.api.openai.requests import OpenAICall
from router.api.prompt_replies import PromptReplies, PromptReply
from router.api.reply import ReplyFacts, dumped, sse_event
from router.requests.answer import AnswerChunk, AnswerEnd
from router.requests.choices import Choices
from router.requests.request import Admitted
from router.text.answer_syntax.parser import AnswerDelta
from router.text.token_scores import TokenScore
from tandem.protocol.errors import TandemError
from tandem.protocol.messages import FinishReason

_FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}
DONE = b"data: [DONE]\n\n"
"""The last event of a stream that ended without an error."""


class OpenAIReply:
    """The `Reply` to one call of chat completions or of completions; the two differ only in the names of fields."""

    def __init__(self, call: OpenAICall, admitted: Sequence[Admitted], facts: ReplyFacts, *, chat: bool) -> None:
        """`chat` is True for chat completions, False for completions.

        Answers are parsed into reasoning, content and tool calls if the requests have an answer syntax.
        """
        options, syntax = call.request.options, admitted[0].syntax
        self._call = call
        self._prompts = [one.prompt_token_ids for one in admitted]
        self._per_prompt = options.n or 1
        self._generated_per_prompt = admitted[0].n
        self._echoed: dict[int, int] = {}
        """The length of each choice's echoed prompt in characters, which is added to the text offsets of the answer."""
        self._parsers = AnswerParsers(syntax)
        self._first_content = None if syntax is not None and syntax.forced else ""
        self._chat = chat
        self._logprobs = options.alternatives is not None
        self._prompt_tokens = sum(map(len, self._prompts))
        self._completion_tokens = 0
        """Number of tokens sent so far, over all choices."""
        self.answer_id = f"{'chatcmpl' if chat else 'cmpl'}-{facts.request_id}"
        """The `id` of the reply."""
        self._head = {"id": self.answer_id, "created": facts.created, "model": facts.model}
        # There is one event per token. So everything around the text is serialized once per choice, and only the text
        # is inserted into each event.
        self._around: list[tuple[str, str]] = []

    def opening(self, choices: int = 1) -> bytes:
        """Return the first events of a stream, one for each choice."""
        for index in range(choices):
            whole = dumped(
                {**self._stream_head(), "choices": [self._choice(index, "\x00", None)], **self._usage_so_far()}
            )
            before, after = whole.split('"\\u0000"')
            self._around.append((f"data: {before}", f"{after}\n\n"))
        delta = {"role": "assistant", "content": self._first_content}
        begun: dict[str, Any] = {"delta": delta, "logprobs": None, "finish_reason": None}
        if self._chat:
            events = [self._event([{"index": index, **begun}], **self._prompt_ids(index)) for index in range(choices)]
        elif self._call.return_token_ids:
            empty = [{**self._choice(index, "", None), **self._prompt_ids(index)} for index in range(choices)]
            events = [self._event([choice]) for choice in empty]
        else:
            events = []
        return b"".join(events)

    def prompt(self, index: int, prompt: PromptReply) -> bytes:
        """Return the event with the prompt of choice number `index`; b"" if the prompt is not echoed."""
        if not prompt.form.echo:
            return b""
        self._echoed[index] = len(prompt.text)
        return self._event([prompt.echo(self._choice(index, "", None), ())])

    def event(self, event: AnswerChunk | AnswerEnd) -> AnswerChunk | AnswerEnd:
        """Return an answer's event as the client sees it.

        If the client requested only the echoed prompt (`echo` with `max_tokens` 0), the sampled token is left out;
        otherwise the event is unchanged.
        """
        return self._call.prompts.shown(event)

    def chunk(self, index: int, chunk: AnswerChunk) -> bytes:
        """Return the event with the next text, tokens and log probabilities; b"" if the reply shows none of them."""
        if echoed := self._echoed.get(index):
            chunk = replace(chunk, scores=[replace(score, offset=score.offset + echoed) for score in chunk.scores])
        delta = self._parsers.feed(index, chunk.text)
        text = delta.content
        self._completion_tokens += len(chunk.token_ids)
        if delta.calls or delta.reasoning:
            return self._parts(index, delta, chunk)
        if (self._logprobs and (text or chunk.scores)) or self._call.return_token_ids:
            return self._event([{**self._choice(index, text, None), **self._tokens(chunk)}])
        if not text:
            return b""
        if self._call.continuous_usage:
            return self._event([self._choice(index, text, None)])
        before, after = self._around[index]
        return f"{before}{json.dumps(text)}{after}".encode()

    def ending(self, index: int, ending: AnswerEnd) -> bytes:
        """Return the last event of a choice, which has its finish reason."""
        rest = self._parsers.finish(index)
        before = b""
        if rest.calls or rest.reasoning or rest.content:
            before = self._parts(index, rest, AnswerChunk("", [], []))
        return before + self._event([self._choice(index, None if self._chat else "", self._finish(index, ending))])

    def _parts(self, index: int, delta: AnswerDelta, chunk: AnswerChunk) -> bytes:
        choice = {**self._choice(index, None, None), "delta": delta_fields(delta)}
        return self._event([{**choice, **self._tokens(chunk)}])

    def _tokens(self, some: AnswerChunk | CompleteAnswer) -> dict[str, Any]:
        """Return a choice's fields `logprobs` and, if requested, `token_ids`."""
        fields: dict[str, Any] = {"logprobs": self._scores(some.scores) if self._logprobs else None}
        return {**fields, "token_ids": some.token_ids} if self._call.return_token_ids else fields

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        return {"prompt_token_ids": self._prompts[index // self._per_prompt]} if self._call.return_token_ids else {}

    def _finish(self, index: int, ending: AnswerEnd) -> str:
        called = ending.finish_reason is FinishReason.STOP and self._parsers.called(index)
        return "tool_calls" if called else _FINISH[ending.finish_reason]

    def closing(self, endings: Mapping[int, AnswerEnd]) -> bytes:
        """Return the last events of a stream: usage if requested, then DONE."""
        if not self._call.include_usage:
            return DONE
        ends = [endings[index] for index in sorted(endings)]
        return sse_event(dumped({**self._stream_head(), "choices": [], "usage": self._usage(ends)})) + DONE

    async def whole(self, choices: Choices, prompts: PromptReplies) -> bytes:
        """Read all answers until they end, and return the body of a reply that is not streamed."""
        answers = await collected(choices, self._call.prompts)
        if not self._call.prompts.needed:
            return self._body(answers)
        answers = [replace(answer, prompt=await prompts.of(index)) for index, answer in enumerate(answers)]
        # The scores of a prompt may be megabytes of text, which would block the event loop.
        return await asyncio.to_thread(self._body, answers)

    def _body(self, answers: Sequence[CompleteAnswer]) -> bytes:
        """Return the body: the best answers to each prompt, and the usage of all answers."""
        best = best_of(answers, self._per_prompt, self._generated_per_prompt)
        made = [self._whole_choice(index, answer) for index, answer in enumerate(best)]
        usage = self._usage([answer.ending for answer in answers])
        body = {**self._head, "object": "text_completion", "choices": made, "usage": usage}
        if self._chat:
            prompt = best[0].prompt
            body |= {"object": "chat.completion", **self._prompt_ids(0), **({} if prompt is None else prompt.listed())}
        return dumped(body).encode()

    def _whole_choice(self, index: int, whole: CompleteAnswer) -> dict[str, Any]:
        parts = self._parsers.feed(index, whole.text), self._parsers.finish(index)
        finish = self._finish(index, whole.ending)
        choice: dict[str, Any] = {"index": index, **self._tokens(whole), "finish_reason": finish}
        if self._chat:
            choice["message"] = {"role": "assistant", **message_fields(parts), "refusal": None}
        else:
            choice |= {"text": whole.text, **self._prompt_ids(index)}
            if whole.prompt is not None:
                choice = {**whole.prompt.echo(choice, whole.scores), **whole.prompt.listed()}
        return choice

    def _scores(self, scores: Sequence[TokenScore]) -> dict[str, Any]:
        return chat_logprobs(scores) if self._chat else completion_logprobs(scores)

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return sse_event(dumped({**self._stream_head(), "choices": choices, **self._usage_so_far(), **more}))

    def _usage_so_far(self) -> dict[str, Any]:
        """Return the field `usage` that a stream event shows before all answers have ended.

        With `continuous_usage` it has the counts so far. Otherwise it is null if `include_usage` is set, and absent if
        it is not.
        """
        if self._call.continuous_usage:
            return {"usage": _counts(self._prompt_tokens, self._completion_tokens)}
        return {"usage": None} if self._call.include_usage else {}

    def _usage(self, endings: Sequence[AnswerEnd]) -> dict[str, Any]:
        """Return the usage of all answers; each prompt counts once, with the cached tokens of its first answer."""
        firsts = endings[:: len(endings) // len(self._prompts)]
        completion = sum(ending.completion_tokens for ending in endings)
        return {
            **_counts(sum(first.prompt_tokens for first in firsts), completion),
            "prompt_tokens_details": {
                "cached_tokens": sum(first.cached_tokens for first in firsts),
                "cache_write_tokens": sum(first.cache_written_tokens for first in firsts),
            },
        }

    def failure(self, error: TandemError) -> bytes:
        """Return the event that ends a stream with an error."""
        return sse_event(error_body(error))

    def _stream_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk" if self._chat else "text_completion"}

    def _choice(self, index: int, text: str | None, finish: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": finish}
        if self._chat:
            choice["delta"] = {} if text is None else {"content": text}
        else:
            choice["text"] = text
        return choice


def _counts(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
