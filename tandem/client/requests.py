"""The messages, tools and options of a request, and their conversion to protobuf."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

from tandem.protocol.errors import InvalidArgument
from tandem.protocol.generated.tandem.v1 import inference_pb2


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function, in an answer or in an assistant's message."""

    id: str
    name: str
    arguments: str
    """The arguments as the model wrote them: a JSON object."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: str
    """`system`, `user`, `assistant` or `tool`."""
    content: str = ""
    tool_calls: Sequence[ToolCall] = ()
    """The tool calls of an assistant's message."""
    tool_call_id: str = ""
    """In a tool's message, the id of the call whose result it carries."""
    name: str = ""
    """In a tool's message, the name of the function whose result it carries."""
    reasoning: str = ""
    """The reasoning of an assistant's message, for chat templates that render it."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    """The JSON schema of the function's arguments."""


class Options(TypedDict, total=False):
    """Keyword arguments of every request; for an absent argument the default of the router or the model applies.

    `GenerationOptions` in proto/tandem/v1/inference.proto describes `max_tokens` and all arguments after it. At most
    one of `json_schema`, `regex`, `grammar` and `choice` may be given; it determines the format of the answers.
    """

    model: str
    """The name of the model; absent = the served model."""
    request_id: str
    """The id of the request, with which `abort` can cancel the request; absent = the router generates an id.

    It must be unique among the client's running requests.
    """
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    priority: int
    slo_class: str
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logprobs: int
    cache_salt: str
    n: int
    min_tokens: int
    include_stop_str_in_output: bool
    speculate: bool
    prompt_logprobs: int
    logit_bias: Mapping[int, float]
    add_special_tokens: bool
    truncate_prompt_tokens: int
    return_token_ids: bool
    session_id: str
    cache_retention_s: float
    json_schema: Mapping[str, Any] | str
    regex: str
    grammar: str
    choice: Sequence[str]


class GenerateOptions(Options, total=False):
    """Additional keyword arguments of a request that continues a plain prompt."""

    echo: bool
    """True if the answer includes the prompt's text and, with `logprobs`, the prompt's log probabilities."""
    best_of: int
    """The number of answers to generate; the `n` most likely ones are returned."""


class ChatOptions(Options, total=False):
    """Additional keyword arguments of a request that answers a conversation."""

    tools: Sequence[Tool]
    """The functions that the model may call."""
    tool_choice: str | Tool
    """`auto`, `none`, `required`, or the tool that the model must call."""
    parallel_tool_calls: bool
    """True if the answer may contain several tool calls; False = at most one."""
    chat_template_kwargs: Mapping[str, Any]
    """Additional variables of the chat template."""
    add_generation_prompt: bool
    """True if the prompt ends with the start of an assistant's message; False = it ends after the last message."""
    continue_final_message: bool
    """True if the answer continues the content of the last message."""


_GENERATE_FIELDS = ("model", "request_id", "echo", "best_of")
"""The options that are fields of `GenerateRequest` under the same names."""
_CHAT_FIELDS = ("parallel_tool_calls", "add_generation_prompt", "continue_final_message")
"""The options that are fields of `ChatRequest` under the same names."""
FORMATS = ("json_schema", "regex", "grammar", "choice")
"""The options that are fields of `ResponseFormat`."""
Prompt = str | Sequence[int]
"""A prompt as a text or as token ids."""
Prompts = Prompt | Sequence[Prompt]
"""One prompt or several prompts."""
Conversation = str | Sequence[Message]
"""The messages so far, or the text of a single user message."""


Request = inference_pb2.GenerateRequest | inference_pb2.ChatRequest
"""A request that `generate_request` or `chat_request` has built."""


def generate_request(prompts: Prompts, **options: Unpack[GenerateOptions]) -> inference_pb2.GenerateRequest:
    """Build a request to continue prompts. Raises InvalidArgument, which names it, for a value that cannot be sent."""
    given: dict[str, Any] = {**options}
    fields = {name: given.pop(name) for name in _GENERATE_FIELDS if given.get(name) is not None}
    several = not isinstance(prompts, str) and any(hasattr(item, "__len__") for item in prompts)
    prompt = {"prompts": {"prompts": [_prompt(item) for item in prompts]}} if several else _prompt(prompts)
    request: inference_pb2.GenerateRequest = _message(inference_pb2.GenerateRequest, {**fields, **prompt})
    request.options.CopyFrom(_options(given))
    return request


def prompt_count(request: Request) -> int:
    """Return the number of prompts in a request."""
    if isinstance(request, inference_pb2.GenerateRequest) and request.WhichOneof("prompt") == "prompts":
        return len(request.prompts.prompts)
    return 1


def tokenize_request(request: Request, *, token_strs: bool) -> inference_pb2.TokenizeRequest:
    """Build the request that tokenizes the prompt of `request`; `token_strs` also requests the text of each token."""
    if isinstance(request, inference_pb2.ChatRequest):
        return inference_pb2.TokenizeRequest(chat=request, return_token_strs=token_strs)
    return inference_pb2.TokenizeRequest(generate=request, return_token_strs=token_strs)


def detokenize_request(token_ids: Sequence[int], model: str) -> inference_pb2.DetokenizeRequest:
    """Build the request. Raises InvalidArgument, which names the value, for a value that cannot be sent."""
    request: inference_pb2.DetokenizeRequest = _message(
        inference_pb2.DetokenizeRequest, {"token_ids": list(token_ids), "model": model}
    )
    return request


def chat_request(conversation: Conversation, **options: Unpack[ChatOptions]) -> inference_pb2.ChatRequest:
    """Build a request to answer a conversation. Raises InvalidArgument as `generate_request` does."""
    messages = [Message("user", conversation)] if isinstance(conversation, str) else conversation
    given: dict[str, Any] = {**options}
    choice, variables = given.pop("tool_choice", ""), given.pop("chat_template_kwargs", None)
    fields = {
        "model": given.pop("model", ""),
        "request_id": given.pop("request_id", ""),
        "messages": [_turn(message) for message in messages],
        "tools": [_tool(tool) for tool in given.pop("tools", ())],
        "tool_choice": "" if isinstance(choice, Tool) else choice,
        "tool_function": choice.name if isinstance(choice, Tool) else "",
        **{name: given.pop(name) for name in _CHAT_FIELDS if name in given},
        "chat_template_kwargs": _json("chat_template_kwargs", variables) if variables else "",
    }
    request: inference_pb2.ChatRequest = _message(inference_pb2.ChatRequest, fields)
    request.options.CopyFrom(_options(given))
    return request


def _prompt(prompt: Any) -> dict[str, Any]:
    return {"text": prompt} if isinstance(prompt, str) else {"token_ids": {"ids": list(prompt)}}


def _turn(message: Message) -> dict[str, Any]:
    calls = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in message.tool_calls]
    return {
        "role": message.role,
        "content": message.content,
        "tool_calls": calls,
        "tool_call_id": message.tool_call_id,
        "name": message.name,
        "reasoning_content": message.reasoning,
    }


def _tool(tool: Tool) -> dict[str, str]:
    parameters = "" if tool.parameters is None else _json("tools", tool.parameters)
    return {"name": tool.name, "description": tool.description, "parameters": parameters}


def _options(options: Mapping[str, Any]) -> inference_pb2.GenerationOptions:
    given = {name: value for name, value in options.items() if value is not None}
    formats = {name: given.pop(name) for name in FORMATS if name in given}
    if len(formats) > 1:
        raise InvalidArgument(list(formats)[1], f"cannot be combined with {next(iter(formats))}; give one format")
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    message: inference_pb2.GenerationOptions = _message(inference_pb2.GenerationOptions, given)
    for name, value in formats.items():
        text = _json(name, value) if name == "json_schema" and not isinstance(value, str) else value
        wanted = {name: {"texts": list(value)} if name == "choice" else text}
        message.response_format.CopyFrom(_message(inference_pb2.ResponseFormat, wanted))
    return message


def _message(kind: type[Any], fields: Mapping[str, Any]) -> Any:
    """Build a protobuf message.

    Raises InvalidArgument, which names the field, for a wrong type or a value out of range.
    """
    message = kind()
    for name, value in fields.items():
        try:
            message.MergeFrom(kind(**{name: value}))
        except (TypeError, ValueError) as error:
            raise InvalidArgument(name, f"cannot be sent ({error})") from error
    return message


def _json(name: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(name, f"cannot be written as JSON ({error})") from error
