"""Turns the bodies of chat completions and completions into a `ClientRequest` for each prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router.api.body import UnknownFields, read_body
from router.api.call import ApiCall
from router.api.openai.bodies import ChatCompletionRequest, ChatEncoding, CompletionRequest, Encoding, Generation
from router.api.openai.formats import answer_format
from router.api.openai.messages import AssistantMessage, Message, ToolMessage
from router.api.openai.prompts import check_answers
from router.api.openai.tools import tool_calls, tool_options
from router.api.prompt_replies import PromptForm
from router.requests.request import ClientRequest, Conversation, Options
from router.text.chat_template import ChatTurn, PromptEnd
from tandem.protocol.errors import InvalidArgument, shown
from tandem.protocol.lifecycle.events import EventTime


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAICall(ApiCall):
    """A parsed call of chat completions or completions. An immutable value."""

    include_usage: bool
    """True if the stream has one more event, after all answers, with their usage."""
    continuous_usage: bool
    """True if every event of the stream has the usage so far."""
    return_token_ids: bool
    """True if the reply has the token ids of the prompt and of the answers."""


def parse_chat(data: bytes, received: EventTime, *, strict: bool = False) -> OpenAICall:
    """Parse the body of /v1/chat/completions.

    Raises InvalidArgument, which names the field, for a wrong field, and with `strict` for an unknown one.
    """
    unknown = UnknownFields(strict=strict)
    body = read_body(ChatCompletionRequest, data, unknown)
    if body.top_logprobs and not body.logprobs:
        raise InvalidArgument("top_logprobs", "needs logprobs to be true")
    options = _options(body, top_logprobs=(body.top_logprobs or 0) if body.logprobs else None)
    form = PromptForm.of(options, echo=False)
    request = ClientRequest("", body.model or "", conversation(body), form.options(options), received)
    return _call(body, (request,), form, unknown)


def parse_completion(data: bytes, received: EventTime, *, strict: bool = False) -> OpenAICall:
    """Parse the body of /v1/completions; arguments and errors are those of `parse_chat`."""
    unknown = UnknownFields(strict=strict)
    body = read_body(CompletionRequest, data, unknown)
    best_of = None if body.best_of == (body.n or 1) else body.best_of
    given = _options(body, logprobs=body.logprobs, best_of=best_of)
    form = PromptForm.of(given, echo=bool(body.echo))
    options = form.options(given)
    if body.stream and best_of is not None:
        raise InvalidArgument("best_of", "cannot be combined with stream")
    check_answers(len(body.prompt), options.answers)
    requests = tuple(ClientRequest("", body.model or "", prompt, options, received) for prompt in body.prompt)
    return _call(body, requests, form, unknown)


def _call(
    body: Generation, requests: tuple[ClientRequest, ...], form: PromptForm, unknown: UnknownFields
) -> OpenAICall:
    wanted = body.stream_options
    if wanted is not None and not body.stream:
        raise InvalidArgument("stream_options", "needs stream to be true")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidArgument("prompt_logprobs", "cannot be combined with stream")
    include_usage = wanted is not None and bool(wanted.include_usage)
    return OpenAICall(
        requests=requests,
        stream=bool(body.stream),
        ignored=unknown.names,
        prompts=form,
        include_usage=include_usage,
        continuous_usage=include_usage and wanted is not None and bool(wanted.continuous_usage_stats),
        return_token_ids=bool(body.return_token_ids),
    )


def _options(body: ChatCompletionRequest | CompletionRequest, **given: Any) -> Options:
    return body.options(
        max_tokens=body.max_tokens,
        max_completion_tokens=body.max_completion_tokens,
        prompt_logprobs=body.prompt_logprobs,
        logit_bias=_biases(body.logit_bias or {}),
        n=body.n,
        stop=(body.stop,) if isinstance(body.stop, str) and body.stop else tuple(body.stop or ()),
        include_stop=bool(body.include_stop_str_in_output),
        answer_format=answer_format(body),
        **body.cache_hints(),
        **encoding(body),
        **given,
    )


def _biases(biases: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    for name in biases:
        if not (name.isascii() and name.isdecimal() and len(name) <= len(str(1 << 32))):
            raise InvalidArgument("logit_bias", f"{shown(name)} is no token id")
    return tuple((int(name), bias) for name, bias in biases.items())


def encoding(body: Encoding) -> dict[str, Any]:
    """Return the options that control how a prompt becomes token ids."""
    return {"add_special_tokens": body.add_special_tokens, "truncate_prompt_tokens": body.truncate_prompt_tokens}


def conversation(body: ChatEncoding) -> Conversation:
    """Return the conversation of a body: its messages, its tools, and the variables of the chat template."""
    variables = body.chat_template_kwargs or {}
    if body.reasoning_effort is not None:
        variables = {"reasoning_effort": body.reasoning_effort, **variables}
    turns = tuple(_turn(message, number) for number, message in enumerate(body.messages))
    end = prompt_end(body.add_generation_prompt, continued=bool(body.continue_final_message))
    return Conversation(turns, variables, tool_options(body), end, parsed=True)


def prompt_end(next_turn: bool | None, *, continued: bool) -> PromptEnd:
    """Return where a prompt ends.

    `next_turn` is the client's `add_generation_prompt`; None (not given) means true unless the final message is
    `continued`. Raises InvalidArgument if the client sets both.
    """
    if next_turn and continued:
        raise InvalidArgument("continue_final_message", "cannot be combined with add_generation_prompt; send one")
    if continued:
        return PromptEnd.WITHIN_LAST_TURN
    return PromptEnd.LAST_TURN if next_turn is False else PromptEnd.NEXT_TURN


def _turn(message: Message, number: int) -> ChatTurn:
    content = message.content or ""
    if isinstance(message, AssistantMessage):
        calls = tool_calls(message.tool_calls or (), f"messages[{number}]")
        extras = {"tool_calls": calls, "reasoning_content": message.reasoning_content or message.reasoning}
    elif isinstance(message, ToolMessage):
        extras = {"tool_call_id": message.tool_call_id, "name": message.name}
    else:
        return ChatTurn("system" if message.role == "developer" else message.role, content)
    return ChatTurn(message.role, content, {name: value for name, value in extras.items() if value})
