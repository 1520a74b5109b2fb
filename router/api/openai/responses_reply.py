"""The reply to POST /v1/responses, as a whole or as stream events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from router.api.openai.errors import MESSAGE_CHARS
from router.api.openai.responses_request import ResponsesCall
from router.api.openai.responses_tools import Namespaced
from router.api.reply import NamedEventsReply, ReplyFacts, dumped, sse_event
from router.requests.answer import AnswerEnd
from router.requests.request import Admitted
from router.text.answer_syntax.parser import AnswerDelta, CallDelta
from tandem.protocol.errors import ResourceExhausted, TandemError, clipped
from tandem.protocol.messages import FinishReason

Event = dict[str, Any]
_COMPLETED, _IN_PROGRESS = "completed", "in_progress"
_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
_TEXT_TYPES = {"reasoning": "reasoning_text", "message": "output_text"}


class OutputItems:
    """Builds the output items of an answer in order: reasoning, messages and function calls.

    Only the last item is unfinished.
    """

    def __init__(self, request_id: str, namespaced: Namespaced) -> None:
        """`request_id` becomes part of the items' ids; `namespaced` maps flat names of functions to namespaces."""
        self._request_id = request_id
        self._namespaced = namespaced
        self.items: list[dict[str, Any]] = []
        self._open = ""
        """The type of the unfinished item; "" if there is none."""
        self._texts: list[str] = []

    def add(self, delta: AnswerDelta) -> Iterator[Event]:
        """Add the next parts of the answer, and yield their events."""
        if delta.reasoning:
            yield from self._text("reasoning", delta.reasoning)
        if delta.content:
            yield from self._text("message", delta.content)
        for call in delta.calls:
            yield from self._call(call)

    def finish(self, status: str) -> Iterator[Event]:
        """Complete the unfinished item with `status`, and yield its events; an empty answer gets an empty message."""
        if not self.items:
            yield from self._begin({"type": "message", "role": "assistant", "content": []})
        yield from self._end(status)

    def _text(self, kind: str, text: str) -> Iterator[Event]:
        if self._open != kind:
            yield from self._end(_COMPLETED)
            message = {"role": "assistant", "content": []}
            yield from self._begin({"type": kind, **(message if kind == "message" else {"summary": [], "content": []})})
        self._texts.append(text)
        logprobs: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        yield self._event(f"{_TEXT_TYPES[kind]}.delta", content_index=0, delta=text, **logprobs)

    def _call(self, call: CallDelta) -> Iterator[Event]:
        if call.name:
            yield from self._end(_COMPLETED)
            namespace, name = self._namespaced.get(call.name, ("", call.name))
            within = {"namespace": namespace} if namespace else {}
            yield from self._begin(
                {"type": "function_call", "call_id": call.call_id, **within, "name": name, "arguments": ""}
            )
        if call.arguments:
            self._texts.append(call.arguments)
            yield self._event("function_call_arguments.delta", delta=call.arguments)

    def _begin(self, item: dict[str, Any]) -> Iterator[Event]:
        self._open = kind = item["type"]
        self._texts = []
        item_id = f"{_PREFIXES[kind]}_{len(self.items)}_{self._request_id}"
        self.items.append({"id": item_id, "status": _IN_PROGRESS, **item})
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": self.items[-1]}
        if kind in _TEXT_TYPES:
            yield self._event("content_part.added", content_index=0, part=self._part(""))

    def _end(self, status: str) -> Iterator[Event]:
        if not self._open:
            return
        item, text = self.items[-1], "".join(self._texts)
        item["status"] = status
        if self._open == "function_call":
            item["arguments"] = text
            yield self._event("function_call_arguments.done", name=item["name"], arguments=text)
        else:
            part = self._part(text)
            item["content"] = [part]
            logprobs: dict[str, Any] = {"logprobs": []} if self._open == "message" else {}
            yield self._event(f"{part['type']}.done", content_index=0, text=text, **logprobs)
            yield self._event("content_part.done", content_index=0, part=part)
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}
        self._open = ""

    def _part(self, text: str) -> dict[str, Any]:
        part: dict[str, Any] = {"type": _TEXT_TYPES[self._open], "text": text}
        return {**part, "annotations": [], "logprobs": []} if self._open == "message" else part

    def _event(self, kind: str, **fields: Any) -> Event:
        position = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": f"response.{kind}", **position, **fields}


_STATUS = {FinishReason.STOP: "completed", FinishReason.LENGTH: "incomplete", FinishReason.ABORT: "cancelled"}


class ResponseReply(NamedEventsReply):
    """Builds the response object of one answer, and its events if it is streamed."""

    def __init__(self, call: ResponsesCall, admitted: Sequence[Admitted], facts: ReplyFacts) -> None:
        super().__init__(admitted[0], streamed=call.stream)
        self.answer_id = f"resp_{facts.request_id}"
        self._head = {
            "id": self.answer_id,
            "object": "response",
            "created_at": facts.created,
            "model": facts.model,
            "temperature": admitted[0].sampling.temperature,
            "top_p": admitted[0].sampling.top_p,
        }
        self._echo = call.echo
        self._output = OutputItems(facts.request_id, call.namespaced)
        self._reasoning = _ReasoningTokens()
        self._count = 0
        """Number of events so far, and therefore the sequence number of the next event."""
        self._ended = ""

    def opening(self, choices: int = 1) -> bytes:
        """Return the events `response.created` and `response.in_progress`."""
        begun = self._response("in_progress")
        return self._response_event("response.created", begun) + self._response_event("response.in_progress", begun)

    def failure(self, error: TandemError) -> bytes:
        """Return the event `response.failed`, with the events that must precede it."""
        opening = b"" if self._count else self.opening()
        last = self._events(self._output.finish("incomplete")) if self._output.items else b""
        code = "rate_limit_exceeded" if isinstance(error, ResourceExhausted) else "server_error"
        failed = self._response("failed", error={"code": code, "message": clipped(error.message, MESSAGE_CHARS)})
        return opening + last + self._response_event("response.failed", failed)

    def _body(self) -> bytes:
        return self._ended.encode()

    def _add(self, delta: AnswerDelta, tokens: int) -> bytes:
        self._reasoning.add(delta, tokens)
        return self._events(self._output.add(delta))

    def _finish(self, ending: AnswerEnd, *, called: bool) -> bytes:
        status = _STATUS[ending.finish_reason]
        last = self._events(self._output.finish("completed" if status == "completed" else "incomplete"))
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        self._ended = self._response(status, usage=self._usage(ending), incomplete_details=reason)
        return last + self._response_event(
            f"response.{'completed' if status == 'completed' else 'incomplete'}", self._ended
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

    def _usage(self, ending: AnswerEnd) -> dict[str, Any]:
        prompt, answer = ending.prompt_tokens, ending.completion_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {
                "cached_tokens": ending.cached_tokens,
                "cache_write_tokens": ending.cache_written_tokens,
            },
            "output_tokens": answer,
            "output_tokens_details": {"reasoning_tokens": min(self._reasoning.count, answer)},
            "total_tokens": prompt + answer,
        }

    def _event(self, event: dict[str, Any]) -> bytes:
        return super()._event({**event, **self._numbered()})

    def _response_event(self, kind: str, response: str) -> bytes:
        head = dumped({"type": kind, **self._numbered()})
        return sse_event(f'{head[:-1]},"response":{response}}}', name=kind)

    def _numbered(self) -> dict[str, int]:
        self._count += 1
        return {"sequence_number": self._count - 1}


class _ReasoningTokens:
    """Counts the tokens of reasoning, including the tokens of its tags.

    The count is exact if tokens arrive one by one. Tokens that arrive together are divided between reasoning and other
    text in proportion to the number of characters.
    """

    def __init__(self) -> None:
        self.count = 0
        self._waiting = 0
        """Number of tokens that have arrived but whose text is not final yet."""

    def add(self, delta: AnswerDelta, tokens: int) -> None:
        """Count the next parts of the answer; `tokens` is the number of tokens since the last call."""
        self._waiting += tokens
        reasoning = len(delta.reasoning)
        other_chars = len(delta.content) + sum(len(call.name) + len(call.arguments) for call in delta.calls)
        if reasoning or other_chars:
            self.count += round(self._waiting * reasoning / (reasoning + other_chars))
            self._waiting = 0
