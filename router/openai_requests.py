"""What OpenAI clients send: from a JSON body to an `Ask`. Field meanings follow OpenAI's API reference.

Extras beyond OpenAI: top_k, min_p, repetition_penalty, ignore_eos, stop_token_ids, priority, slo_class,
cache_salt.
"""

import json
from dataclasses import dataclass
from typing import Any

from router.chat_template import ChatTurn
from router.json_fields import JsonFields, is_integers
from router.request import Ask, Conversation, Options, Prompt
from wire.errors import InvalidArgument
from wire.timeline import EdgeStamp

_WITHOUT_EFFECT = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logit_bias": ({},),
}
_NEUTRAL_CHAT: dict[str, tuple[Any, ...]] = {
    **_NEUTRAL,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
_NEUTRAL_COMPLETION: dict[str, tuple[Any, ...]] = {
    **_NEUTRAL,
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}


_COMPLETION_LOGPROBS_MAX = 5
"""OpenAI's own limit of that API."""


@dataclass(frozen=True, slots=True)
class OpenAICall:
    """A parsed body: the request, and how the client wants its answer."""

    ask: Ask
    stream: bool
    include_usage: bool


def parse_chat(body: bytes, received: EdgeStamp) -> OpenAICall:
    """Body of /v1/chat/completions; `InvalidArgument` names what is wrong."""
    fields = _fields(body)
    fields.only_neutral(_NEUTRAL_CHAT)
    limit = fields.integer("max_completion_tokens")
    top_logprobs = _top_logprobs(fields)
    prompt = _conversation(fields)
    return _call(fields, prompt, received, max_completion_tokens=limit, top_logprobs=top_logprobs)


def parse_completion(body: bytes, received: EdgeStamp) -> OpenAICall:
    """Body of /v1/completions; `InvalidArgument` names what is wrong."""
    fields = _fields(body)
    fields.only_neutral(_NEUTRAL_COMPLETION)
    logprobs = fields.integer("logprobs")
    if logprobs is not None and logprobs > _COMPLETION_LOGPROBS_MAX:
        raise fields.wrong("logprobs", f"is {str(logprobs)[:40]}, the limit is {_COMPLETION_LOGPROBS_MAX}")
    return _call(fields, _plain_prompt(fields), received, logprobs=logprobs)


def _fields(body: bytes) -> JsonFields:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("body", f"is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise InvalidArgument("body", "must be a JSON object")
    return JsonFields(value)


def _top_logprobs(fields: JsonFields) -> int | None:
    """How many, None without log probabilities."""
    wanted, top = fields.boolean("logprobs"), fields.integer("top_logprobs") or 0
    if top and not wanted:
        raise fields.wrong("top_logprobs", "needs logprobs to be true")
    return top if wanted else None


def _call(
    fields: JsonFields,
    prompt: Prompt,
    received: EdgeStamp,
    *,
    max_completion_tokens: int | None = None,
    logprobs: int | None = None,
    top_logprobs: int | None = None,
) -> OpenAICall:
    fields.drop(_WITHOUT_EFFECT)
    model = fields.text("model") or ""
    options = Options(
        max_tokens=fields.integer("max_tokens"),
        max_completion_tokens=max_completion_tokens,
        temperature=fields.number("temperature"),
        top_k=fields.integer("top_k"),
        top_p=fields.number("top_p"),
        min_p=fields.number("min_p"),
        frequency_penalty=fields.number("frequency_penalty"),
        presence_penalty=fields.number("presence_penalty"),
        repetition_penalty=fields.number("repetition_penalty"),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        seed=fields.integer("seed"),
        n=fields.integer("n"),
        stop=_stop(fields),
        stop_token_ids=fields.integers("stop_token_ids"),
        ignore_eos=fields.boolean("ignore_eos"),
        priority=fields.integer("priority") or 0,
        slo_class=fields.text("slo_class") or "",
        cache_salt=fields.text("cache_salt") or "",
    )
    stream = fields.boolean("stream")
    include_usage = _include_usage(fields, stream)
    fields.end()
    return OpenAICall(Ask("", model, prompt, options, received), stream, include_usage)


def _stop(fields: JsonFields) -> tuple[str, ...]:
    value = fields.take("stop")
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InvalidArgument("stop", "must be a string or a list of strings")
    return tuple(value)


def _include_usage(fields: JsonFields, stream: bool) -> bool:
    value = fields.take("stream_options")
    if value is None:
        return False
    if not stream:
        raise InvalidArgument("stream_options", "needs stream to be true")
    if not isinstance(value, dict):
        raise InvalidArgument("stream_options", "must be an object")
    options = JsonFields(value, "stream_options.")
    options.drop(frozenset({"include_obfuscation"}))
    include_usage = options.boolean("include_usage")
    options.end()
    return include_usage


def _plain_prompt(fields: JsonFields) -> Prompt:
    value = fields.take("prompt")
    if isinstance(value, list) and len(value) == 1 and (isinstance(value[0], str) or is_integers(value[0])):
        value = value[0]
    if isinstance(value, str):
        return value
    if is_integers(value):
        return tuple(value)
    if isinstance(value, list) and value:
        raise InvalidArgument("prompt", "must be one prompt, a string or a list of token ids; send others separately")
    raise InvalidArgument("prompt", "is missing; send a string or a list of token ids")


def _conversation(fields: JsonFields) -> Conversation:
    value = fields.take("messages")
    if not isinstance(value, list):
        raise InvalidArgument("messages", "must be a list of messages")
    return Conversation(tuple(_turn(item, f"messages[{number}]") for number, item in enumerate(value)))


def _turn(value: Any, path: str) -> ChatTurn:
    if not isinstance(value, dict):
        raise InvalidArgument(path, "must be an object with role and content")
    fields = JsonFields(value, f"{path}.")
    role = fields.text("role")
    if role is None:
        raise fields.wrong("role", "is missing")
    content = _content(fields, path)
    fields.drop(frozenset({"name", "refusal", "annotations", "audio"}))
    fields.only_neutral({"tool_calls": ([],)})
    fields.end()
    return ChatTurn("system" if role == "developer" else role, content)


def _content(fields: JsonFields, path: str) -> str:
    """A string, or text parts joined."""
    value = fields.take("content")
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise fields.wrong("content", "must be a string or a list of text parts")
    texts = []
    for number, part in enumerate(value):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise InvalidArgument(f"{path}.content[{number}]", "must be a text part; other kinds are not supported")
        texts.append(text)
    return "".join(texts)
