"""The requests over gRPC have every field that the bodies over HTTP have."""

from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor
from pydantic import BaseModel

from router.api.anthropic.body import MessagesRequest
from router.api.openai import formats
from router.api.openai import messages as chat
from router.api.openai.bodies import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from router.api.openai.responses_body import ResponsesRequest
from tandem.protocol.generated.tandem.v1 import inference_pb2 as pb

_OPTIONS = pb.GenerationOptions, pb.ResponseFormat
_CHAT = (pb.ChatRequest, *_OPTIONS)
COUNTERPARTS: dict[type[BaseModel], tuple[Any, ...]] = {
    ChatCompletionRequest: _CHAT,
    CompletionRequest: (pb.GenerateRequest, *_OPTIONS),
    ResponsesRequest: _CHAT,
    MessagesRequest: _CHAT,
    TokenizeTextRequest: (pb.TokenizeRequest, pb.GenerateRequest, *_OPTIONS),
    TokenizeChatRequest: (pb.TokenizeRequest, *_CHAT),
    DetokenizeRequest: (pb.DetokenizeRequest,),
    chat.TextMessage: (pb.ChatMessage,),
    chat.AssistantMessage: (pb.ChatMessage,),
    chat.ToolMessage: (pb.ChatMessage,),
    chat.ToolCall: (pb.ToolCall,),
    chat.FunctionCall: (pb.ToolCall,),
    chat.Tool: (pb.Tool,),
    chat.Function: (pb.Tool,),
    chat.NamedTool: (pb.ChatRequest,),
    chat.ChosenFunction: (pb.Tool,),
    formats.StructuredOutputs: (pb.ResponseFormat,),
}
"""The messages among whose fields are those of a body."""
RENAMED = {
    "prompt": "GenerateRequest.text",
    "tokens": "DetokenizeRequest.token_ids",
    "top_logprobs": "GenerationOptions.logprobs",
    "max_completion_tokens": "GenerationOptions.max_tokens",
    "max_output_tokens": "GenerationOptions.max_tokens",
    "stop_sequences": "GenerationOptions.stop",
    "reasoning_effort": "ChatRequest.chat_template_kwargs",
    "reasoning": "ChatRequest.chat_template_kwargs",
    "thinking": "ChatRequest.chat_template_kwargs",
    "input": "ChatRequest.messages",
    "instructions": "ChatRequest.messages",
    "system": "ChatRequest.messages",
    "AssistantMessage.reasoning": "ChatMessage.reasoning_content",
    "function": "Tool.name",
    "ToolCall.function": "ToolCall.name",
    "NamedTool.function": "ChatRequest.tool_function",
    "prompt_cache_key": "GenerationOptions.session_id",
    "prompt_cache_retention": "GenerationOptions.cache_retention_s",
    "prompt_cache_options": "GenerationOptions.cache_retention_s",
    "cache_control": "GenerationOptions.cache_retention_s",
    "structured_outputs": "GenerationOptions.response_format",
    "text": "GenerationOptions.response_format",
    "output_config": "GenerationOptions.response_format",
    "output_format": "GenerationOptions.response_format",
    "guided_json": "ResponseFormat.json_schema",
    "guided_regex": "ResponseFormat.regex",
    "guided_choice": "ResponseFormat.choice",
    "guided_grammar": "ResponseFormat.grammar",
    "ebnf": "ResponseFormat.grammar",
    "json_": "ResponseFormat.json_schema",
    "json_object": "ResponseFormat.json_schema",
}
"""The fields that have another name, by their own name or with that of their body before it."""
EXCEPTIONS = {
    "TokenizeChatRequest.prompt": "always null",
    "type": "a message has the type of its field",
    "stream": "every answer is streamed",
    "stream_options": "chunks have their token ids, and the last message of an answer the usage",
    "strict": "without effect over HTTP",
    "store": "without effect over HTTP",
    "metadata": "without effect over HTTP",
    "include": "without effect over HTTP",
    "context_management": "without effect over HTTP",
}


def _fields(*kinds: Any) -> dict[str, set[str]]:
    """Returns the names of the messages' fields."""
    fields_of: dict[str, set[str]] = {}
    for kind in kinds:
        descriptor: Descriptor = kind.DESCRIPTOR
        fields_of[descriptor.name] = {field.name for field in descriptor.fields}
    return fields_of


def missing(body: type[BaseModel], fields: dict[str, set[str]]) -> list[str]:
    """Returns the fields of a body without a counterpart among the `fields` of messages, by message."""
    names = []
    for name in body.model_fields:
        message, _, renamed = RENAMED.get(f"{body.__name__}.{name}", RENAMED.get(name, "")).partition(".")
        has = renamed in fields.get(message, ()) or any(name in field for field in fields.values())
        if not has and not {name, f"{body.__name__}.{name}"} & EXCEPTIONS.keys():
            names.append(name)
    return names


@pytest.mark.parametrize("body", COUNTERPARTS, ids=lambda body: body.__name__)
def test_every_field_has_a_counterpart(body: type[BaseModel]) -> None:
    assert missing(body, _fields(*COUNTERPARTS[body])) == []


def test_a_field_without_a_counterpart_is_found() -> None:
    fields = _fields(pb.GenerateRequest, *_OPTIONS)
    fields["GenerateRequest"] -= {"echo", "text"}
    assert missing(CompletionRequest, fields) == ["prompt", "echo"]


def test_no_name_and_no_exception_is_left_over() -> None:
    used = {name for body in COUNTERPARTS for name in (*body.model_fields, *_qualified(body))}
    assert RENAMED.keys() | EXCEPTIONS.keys() <= used
    every = _fields(*{kind for kinds in COUNTERPARTS.values() for kind in kinds})
    for renamed in RENAMED.values():
        message, _, field = renamed.partition(".")
        assert field in every[message], renamed
    assert not every["GenerationOptions"] & EXCEPTIONS.keys()


def _qualified(body: type[BaseModel]) -> list[str]:
    return [f"{body.__name__}.{name}" for name in body.model_fields]
