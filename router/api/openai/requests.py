"""Parses the JSON bodies of the OpenAI-compatible API into a `ClientRequest`.

Field meanings follow OpenAI's API reference, and vLLM's for its extensions: top_k, min_p, repetition_penalty,
ignore_eos, stop_token_ids, min_tokens, include_stop_str_in_output, chat_template_kwargs, priority, cache_salt,
add_special_tokens, add_generation_prompt, continue_final_message, truncate_prompt_tokens, return_token_ids.
`slo_class` and `speculate` are Tandem's own. `router/api/unserved_fields.py` has the other fields.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from router.api.completions.fields import check_answers, take_bias, take_prompts
from router.api.completions.prompt_replies import PromptForm
from router.api.json_fields import JsonFields, UnknownFields
from router.api.openai.structured_output import answer_format
from router.api.openai.tool_fields import tool_calls, tool_options
from router.api.unserved_fields import CHAT_UNSERVED, COMPLETION_UNSERVED, INERT, MESSAGE_INERT, MESSAGE_UNSERVED
from router.requests.request import ClientRequest, Conversation, Options, Prompt
from router.text.chat_template import ChatTurn, PromptEnd
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.lifecycle.timeline import EdgeStamp


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """The additional contents of a stream's events."""

    include_usage: bool = False
    """True if an event after the answer has its usage."""
    continuous_usage: bool = False
    """True if every event has the usage so far, too."""


@dataclass(frozen=True, slots=True)
class OpenAICall:
    """A parsed body: the request, and the requested form of the reply."""

    requests: tuple[ClientRequest, ...]
    """One for each prompt, at least one; they differ in their prompts alone."""
    stream: bool
    stream_options: StreamOptions
    prompts: PromptForm
    return_token_ids: bool = False
    """True if the reply has the token ids of the prompt and of the answers."""
    ignored: tuple[str, ...] = ()
    """Names of the ignored fields, fit for a header (`UnknownFields`)."""

    @property
    def request(self) -> ClientRequest:
        """The first prompt's request."""
        return self.requests[0]


def parse_chat(body: bytes, received: EdgeStamp, *, strict: bool = False) -> OpenAICall:
    """Parse the body of /v1/chat/completions; InvalidArgument names a wrong field. `strict` rejects unknown fields."""
    fields = body_fields(body, UnknownFields(strict=strict))
    fields.refuse(CHAT_UNSERVED)
    top_logprobs = _top_logprobs(fields)
    return _call(fields, (conversation(fields),), received, top_logprobs=top_logprobs)


def parse_completion(body: bytes, received: EdgeStamp, *, strict: bool = False) -> OpenAICall:
    """Parse the body of /v1/completions, with the errors and arguments of `parse_chat`."""
    fields = body_fields(body, UnknownFields(strict=strict))
    fields.refuse(COMPLETION_UNSERVED)
    logprobs = fields.integer("logprobs")
    echo, best_of = fields.boolean("echo"), fields.integer("best_of")
    return _call(fields, take_prompts(fields), received, logprobs=logprobs, echo=echo, best_of=best_of)


def body_fields(body: bytes, unknown: UnknownFields) -> JsonFields:
    """Return the fields of a JSON body; raises InvalidArgument if it is no object."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("body", f"is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise InvalidArgument("body", "must be a JSON object")
    return JsonFields(value, unknown)


def _top_logprobs(fields: JsonFields) -> int | None:
    """Return the requested number of top log probabilities, None without log probabilities."""
    wanted, top = fields.boolean("logprobs"), fields.integer("top_logprobs") or 0
    if top and not wanted:
        raise fields.wrong("top_logprobs", "needs logprobs to be true")
    return top if wanted else None


def _call(
    fields: JsonFields,
    prompts: Sequence[Prompt],
    received: EdgeStamp,
    *,
    logprobs: int | None = None,
    top_logprobs: int | None = None,
    echo: bool = False,
    best_of: int | None = None,
) -> OpenAICall:
    """Take the fields that both calls have."""
    fields.drop(INERT)
    model = fields.text("model") or ""
    n, max_tokens, listed = (fields.integer(name) for name in ("n", "max_tokens", "prompt_logprobs"))
    given = Options(
        max_tokens=max_tokens,
        max_completion_tokens=fields.integer("max_completion_tokens"),
        temperature=fields.number("temperature"),
        top_k=_unless_minus_one(fields.integer("top_k"), 0),
        top_p=fields.number("top_p"),
        min_p=fields.number("min_p"),
        frequency_penalty=fields.number("frequency_penalty"),
        presence_penalty=fields.number("presence_penalty"),
        repetition_penalty=fields.number("repetition_penalty"),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        prompt_logprobs=listed,
        logit_bias=take_bias(fields),
        seed=_unless_minus_one(fields.integer("seed"), None),
        n=n,
        best_of=None if best_of == (n or 1) else best_of,
        stop=_stop(fields),
        stop_token_ids=fields.integers("stop_token_ids"),
        min_tokens=fields.integer("min_tokens") or 0,
        include_stop=fields.boolean("include_stop_str_in_output"),
        ignore_eos=fields.boolean("ignore_eos"),
        speculate=fields.boolean("speculate", absent=True),
        priority=fields.integer("priority") or 0,
        slo_class=fields.text("slo_class") or "",
        cache_salt=fields.text("cache_salt") or "",
        answer_format=answer_format(fields),
        **encoding(fields),
    )
    form = PromptForm.of(given, echo=echo)
    options = form.options(given)
    stream = fields.boolean("stream")
    stream_options = _stream_options(fields, stream)
    return_token_ids = fields.boolean("return_token_ids")
    fields.end()
    for name, value in (("best_of", options.best_of), ("prompt_logprobs", listed)):
        if stream and value is not None:
            raise fields.wrong(name, "cannot be combined with stream")
    check_answers(len(prompts), options.answers)
    requests = tuple(ClientRequest("", model, prompt, options, received) for prompt in prompts)
    return OpenAICall(requests, stream, stream_options, form, return_token_ids, fields.ignored)


def encoding(fields: JsonFields) -> dict[str, Any]:
    """Take the `Options` of how the prompt becomes token ids."""
    special = fields.boolean_or_none("add_special_tokens")
    return {"add_special_tokens": special, "truncate_prompt_tokens": fields.integer("truncate_prompt_tokens")}


def _unless_minus_one(value: int | None, off: int | None) -> int | None:
    """Replace -1 by `off`: vLLM's clients send -1 for a disabled filter and for a random seed."""
    return off if value == -1 else value


def _stop(fields: JsonFields) -> tuple[str, ...]:
    value = fields.take("stop")
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InvalidArgument("stop", "must be a string or a list of strings")
    return tuple(value)


def _stream_options(fields: JsonFields, stream: bool) -> StreamOptions:
    """Parse `stream_options` with vLLM's meaning: usage in every event requires `include_usage`."""
    value = fields.take("stream_options")
    if value is None:
        return StreamOptions()
    if not stream:
        raise InvalidArgument("stream_options", "needs stream to be true")
    if not isinstance(value, dict):
        raise InvalidArgument("stream_options", "must be an object")
    options = fields.within(value, "stream_options.")
    options.drop(frozenset({"include_obfuscation"}))
    include, continuous = options.boolean("include_usage"), options.boolean("continuous_usage_stats")
    options.end()
    return StreamOptions(include, include and continuous)


def conversation(fields: JsonFields) -> Conversation:
    """Take the messages and the variables of the chat template."""
    value = fields.take("messages")
    if not isinstance(value, list):
        raise InvalidArgument("messages", "must be a list of messages")
    turns = tuple(_turn(fields, item, f"messages[{number}]") for number, item in enumerate(value))
    variables = fields.object("chat_template_kwargs")
    effort = fields.text("reasoning_effort")
    if effort is not None:
        variables = {"reasoning_effort": effort, **variables}
    return Conversation(turns, variables, tool_options(fields), prompt_end(fields), parsed=True)


def prompt_end(fields: JsonFields) -> PromptEnd:
    """Take `add_generation_prompt` and `continue_final_message`; the first is false where only the second is given."""
    continued = fields.boolean("continue_final_message")
    if fields.boolean("add_generation_prompt", absent=not continued):
        if continued:
            raise fields.wrong("continue_final_message", "cannot be combined with add_generation_prompt; send one")
        return PromptEnd.NEXT_TURN
    return PromptEnd.WITHIN_LAST_TURN if continued else PromptEnd.LAST_TURN


def _turn(call: JsonFields, value: Any, path: str) -> ChatTurn:
    if not isinstance(value, dict):
        raise InvalidArgument(path, "must be an object with role and content")
    fields = call.within(value, f"{path}.")
    role = fields.text("role")
    if role is None:
        raise fields.wrong("role", "is missing")
    fields.refuse(MESSAGE_UNSERVED)
    extras = _extras(fields, path, role)
    content = _content(fields, path, role)
    fields.drop(MESSAGE_INERT)
    fields.end()
    return ChatTurn("system" if role == "developer" else role, content, extras)


def _extras(fields: JsonFields, path: str, role: str) -> dict[str, Any]:
    """Take the fields that only some roles have."""
    extras: dict[str, Any] = {}
    if role == "assistant":
        reasoning = fields.text("reasoning_content"), fields.text("reasoning")
        extras = {"tool_calls": tool_calls(fields, path), "reasoning_content": reasoning[0] or reasoning[1]}
    elif role == "tool":
        extras = {"tool_call_id": fields.text("tool_call_id"), "name": fields.text("name")}
        if not extras["tool_call_id"]:
            raise fields.wrong("tool_call_id", "is missing; name the call that this message answers")
    return {name: value for name, value in extras.items() if value}


def _content(fields: JsonFields, path: str, role: str) -> str:
    """Return the content, with text parts joined; only an assistant's message may have none."""
    value = fields.take("content")
    if isinstance(value, str):
        return value
    if value is None and role == "assistant":
        return ""
    if not isinstance(value, list):
        raise fields.wrong("content", "must be a string or a list of text parts")
    texts = []
    for number, part in enumerate(value):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise InvalidArgument(f"{path}.content[{number}]", "must be a text part; other kinds are not supported")
        texts.append(text)
    return "".join(texts)
