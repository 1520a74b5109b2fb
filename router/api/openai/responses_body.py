"""The body of POST /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, Tag

from router.api.body import ITEMS, LIST, TEXT, TEXT_OR_ITEMS, Body, Text, by_type, choice
from router.api.cache_hints import PromptCaching
from router.api.fields import Count, Name, Sampling, TemplateVariables
from router.api.unserved_fields import CHAT_ONLY, Unserved


class ResponseTextPart(Body):
    """A part of a message, or of a function's output."""

    inert = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})
    type: Literal["input_text", "output_text", "text"]
    text: str


class ResponseRefusalPart(Body):
    """A refusal in an earlier answer; the model gets it as text."""

    type: Literal["refusal"]
    refusal: str


_PARTS = {"input_text": "<text part>", "output_text": "<text part>", "text": "<text part>", "refusal": "<refusal>"}
Part = Annotated[
    Annotated[ResponseTextPart, Tag("<text part>")] | Annotated[ResponseRefusalPart, Tag("<refusal>")],
    by_type(_PARTS, "input_text, output_text or refusal"),
]
Content = Annotated[Text | Annotated[list[Part], LIST, Tag(ITEMS)], TEXT_OR_ITEMS]


class ResponseMessage(Body):
    """A `message` item of the input: of the user, the system or the developer, or the text of an earlier answer."""

    inert = frozenset({"id", "status", "phase"})
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class ResponseFunctionCall(Body):
    """A function call in an earlier answer."""

    inert = frozenset({"id", "status", "caller"})
    type: Literal["function_call"]
    call_id: Name
    name: Name
    namespace: str | None = None
    arguments: str


class ResponseFunctionCallOutput(Body):
    """The result of a function call."""

    inert = frozenset({"id", "status", "name", "caller"})
    type: Literal["function_call_output"]
    call_id: Name
    output: Content


class ResponseReasoningText(Body):
    """A part of the reasoning in an earlier answer."""

    type: str
    text: str = ""


class ResponseReasoning(Body):
    """The reasoning of an earlier answer; summaries and encrypted contents are ignored."""

    inert = frozenset({"id", "status", "summary", "encrypted_content"})
    type: Literal["reasoning"]
    content: Annotated[list[ResponseReasoningText], LIST] | None = None


_ITEMS = {kind: f"<{kind}>" for kind in ("message", "function_call", "function_call_output", "reasoning")}
Item = Annotated[
    Annotated[ResponseMessage, Tag("<message>")]
    | Annotated[ResponseFunctionCall, Tag("<function_call>")]
    | Annotated[ResponseFunctionCallOutput, Tag("<function_call_output>")]
    | Annotated[ResponseReasoning, Tag("<reasoning>")],
    by_type(_ITEMS, "message, function_call, function_call_output or reasoning", absent="<message>"),
]


class _Repeated(Body):
    """An object that the response repeats in full, including fields that this class does not define."""

    model_config = ConfigDict(extra="allow")


class ResponseFunctionTool(_Repeated):
    """A function that the model may call."""

    inert = frozenset({"defer_loading", "output_schema"})
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseOtherTool(Body):
    """A tool of a type that this server cannot offer; an error if a tool call is required, otherwise ignored."""

    lenient = True
    type: str


_FUNCTIONS = {"function": "<function>"}
NamespaceMember = Annotated[
    Annotated[ResponseFunctionTool, Tag("<function>")] | Annotated[ResponseOtherTool, Tag("<other>")],
    by_type(_FUNCTIONS, "function", other="<other>"),
]


class ResponseNamespaceTool(_Repeated):
    """Functions with a common namespace, such as those of an MCP server."""

    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: Annotated[list[NamespaceMember], LIST]


ResponseTool = Annotated[
    Annotated[ResponseFunctionTool, Tag("<function>")]
    | Annotated[ResponseNamespaceTool, Tag("<namespace>")]
    | Annotated[ResponseOtherTool, Tag("<other>")],
    by_type({**_FUNCTIONS, "namespace": "<namespace>"}, "function or namespace", other="<other>"),
]


class ResponseNamedFunction(_Repeated):
    """The choice of one function; a function in a namespace is named NAMESPACE__NAME."""

    type: Literal["function"]
    name: str


class ResponseAllowedTools(_Repeated):
    """The choice of a subset of the tools: the model may call only these."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ResponseNamedFunction], LIST]


def _choice_tag(value: Any) -> str | None:
    if isinstance(value, dict):
        return {"function": "<function>", "allowed_tools": "<allowed_tools>"}.get(str(value.get("type")))
    return TEXT if value in ("none", "auto", "required") else None


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(TEXT)]
    | Annotated[ResponseNamedFunction, Tag("<function>")]
    | Annotated[ResponseAllowedTools, Tag("<allowed_tools>")],
    choice(_choice_tag, "must be none, auto, required or an object of type function or allowed_tools"),
]


class ResponseTextFormat(_Repeated):
    """The format of the answer's text."""

    inert = frozenset({"name", "description", "strict"})
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")


class ResponseTextOptions(Body):
    """The options of the answer's text."""

    inert = frozenset({"verbosity"})
    format: ResponseTextFormat | None = None


class ResponseReasoningOptions(Body):
    """The `reasoning` object of the request: the reasoning effort; requests for summaries are ignored."""

    inert = frozenset({"summary", "generate_summary"})
    effort: str | None = None


_STORED = "responses are not stored; send the whole conversation as input"
_ELSEWHERE = "it is a field of chat completions; the Responses API has {} instead"


class ResponsesRequest(Sampling, PromptCaching):
    """The body of POST /v1/responses."""

    refused: ClassVar[Mapping[str, Unserved]] = {
        **CHAT_ONLY,
        "previous_response_id": Unserved(_STORED),
        "conversation": Unserved(_STORED),
        "prompt": Unserved("prompt templates are not stored; send input and instructions"),
        "background": Unserved("responses are not stored, so they cannot be fetched later"),
        "truncation": Unserved("conversations are never cut; send a shorter one", ("disabled",)),
        "context_management": Unserved("conversations are never compacted; send a shorter one"),
        "moderation": Unserved("texts are not moderated"),
        "stop": Unserved("the Responses API has no stop strings"),
        "messages": Unserved(_ELSEWHERE.format("input")),
        "max_tokens": Unserved(_ELSEWHERE.format("max_output_tokens"), empty=False),
        "max_completion_tokens": Unserved(_ELSEWHERE.format("max_output_tokens"), empty=False),
        "response_format": Unserved(_ELSEWHERE.format("text.format")),
        "reasoning_effort": Unserved(_ELSEWHERE.format("reasoning.effort")),
    }
    inert = frozenset(
        {
            "user", "service_tier", "safety_identifier", "max_tool_calls", "stream_options", "client_metadata",
        }
    )  # fmt: skip

    model: str | None = None
    chat_template_kwargs: TemplateVariables | None = None
    input: Annotated[Text | Annotated[list[Item], LIST, Tag(ITEMS)], TEXT_OR_ITEMS]
    instructions: str | None = None
    tools: Annotated[list[ResponseTool], LIST] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    text: ResponseTextOptions | None = None
    reasoning: ResponseReasoningOptions | None = None
    max_output_tokens: Count | None = None
    stream: bool | None = None
    store: bool | None = None
    """A field that is accepted but has no effect: the server stores nothing."""
    metadata: dict[str, str] | None = None
    """Metadata of the client, which the response repeats."""
    include: Annotated[list[str], LIST] | None = None
