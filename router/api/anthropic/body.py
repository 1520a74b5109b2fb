"""The bodies of POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from router.api.body import ITEMS, LIST, TEXT_OR_ITEMS, Body, Text, by_type
from router.api.cache_hints import CacheControl
from router.api.fields import Count, Name, Sampling, TemplateVariables
from router.api.unserved_fields import CHAT_ONLY, Unserved


class _Cached(Body):
    """A part of the prompt that may end with a cache breakpoint."""

    cache_control: CacheControl | None = None


class TextBlock(_Cached):
    """Text of a message, of the system prompt, or of a tool's result."""

    inert = frozenset({"citations"})
    type: Literal["text"]
    text: str


_TEXT_BLOCKS = Annotated[list[TextBlock], LIST, Tag(ITEMS)]


class ThinkingBlock(Body):
    """The reasoning of an earlier answer; its signature is ignored."""

    inert = frozenset({"signature"})
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Body):
    """Encrypted reasoning that only the server that wrote it can read; it is ignored."""

    inert = frozenset({"data"})
    type: Literal["redacted_thinking"]


class ToolUseBlock(_Cached):
    """A tool call in an earlier answer."""

    inert = frozenset({"caller"})
    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]


class ToolReferenceBlock(_Cached):
    """A reference to a tool that a tool search has found; after it the model may call the tool."""

    type: Literal["tool_reference"]
    tool_name: Name


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[ToolReferenceBlock, Tag("<tool_reference>")],
    by_type({kind: f"<{kind}>" for kind in ("text", "tool_reference")}, "text or tool_reference"),
]


class ToolResultBlock(_Cached):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: Annotated[Text | Annotated[list[ResultBlock], LIST, Tag(ITEMS)], TEXT_OR_ITEMS] | None = None
    is_error: bool | None = None


_BLOCKS = {kind: f"<{kind}>" for kind in ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")}
Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    by_type(_BLOCKS, "text, thinking, tool_use or tool_result"),
]


class ConversationMessage(Body):
    """A message of the conversation."""

    refused: ClassVar[Mapping[str, Unserved]] = {
        "clear_at": Unserved(
            "messages are never hidden from the model; leave this one out when it is outdated", ("never",)
        ),
        "output_config": Unserved("the effort is that of the whole request"),
    }
    inert = frozenset({"id"})
    role: Literal["user", "assistant", "system"]
    content: Annotated[Text | Annotated[list[Block], LIST, Tag(ITEMS)], TEXT_OR_ITEMS]


class ClientTool(_Cached):
    """A tool that the client runs."""

    inert = frozenset({"eager_input_streaming"})
    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    input_examples: Annotated[list[dict[str, Any]], LIST] | None = None
    strict: bool | None = None
    allowed_callers: Annotated[list[str], LIST] | None = None
    """The callers that may use the tool; only "direct", the model itself, is supported."""
    defer_loading: bool | None = None
    """True if the tool is not offered to the model before a `ToolReferenceBlock` names it."""


class ClientToolChoice(Body):
    """The tool choice: the answer may call a tool, must call one, must call the tool `name`, or must not call any."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(Body):
    """The switch that turns reasoning on or off, for chat templates that support it; the token budget is ignored."""

    inert = frozenset({"budget_tokens", "display", "block_binding"})
    type: Literal["enabled", "adaptive", "disabled"]


class OutputFormat(Body):
    """The format of the answer's text."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] | bool = Field(alias="schema")


class OutputConfig(Body):
    """The options of the answer's text and of the reasoning; the task budget is ignored."""

    inert = frozenset({"task_budget"})
    effort: str | None = None
    format: OutputFormat | None = None


class ContextEdit(Body):
    """An edit of the conversation; only the removal of earlier reasoning is accepted: chat templates always do it."""

    inert = frozenset({"keep"})
    type: str


class ContextManagement(Body):
    """The edits of the conversation that the client requests from the server."""

    edits: Annotated[list[ContextEdit], LIST] | None = None


_SERVER_TOOLS = "the server runs no tools; offer them under tools and run them yourself"
_REFUSED: Mapping[str, Unserved] = {
    **CHAT_ONLY,
    "mcp_servers": Unserved(_SERVER_TOOLS),
    "container": Unserved(_SERVER_TOOLS),
    "thread": Unserved("conversations are not stored; send the whole one as messages", empty=False),
    "prefill": Unserved("the model's chat template always asks for the assistant's next message"),
    "stop": Unserved("it is called stop_sequences here"),
    "max_completion_tokens": Unserved("it is called max_tokens here", empty=False),
    "response_format": Unserved("it is called output_config.format here"),
    "reasoning_effort": Unserved("it is called output_config.effort here"),
}
_INERT = frozenset(
    {
        *("metadata", "service_tier", "inference_geo", "speed", "betas", "diagnostics", "anthropic_version"),
        *("billing_policy", "user_profile_id", "workspace_id"),
        # Other models for the case that the model refuses for policy reasons, which does not happen on this server.
        *("fallbacks", "fallback_credit_token"),
    }
)


class _Conversation(Sampling, _Cached):
    """The fields that the bodies of /v1/messages and /v1/messages/count_tokens have in common."""

    refused: ClassVar[Mapping[str, Unserved]] = _REFUSED
    inert = _INERT

    model: str | None = None
    chat_template_kwargs: TemplateVariables | None = None
    messages: Annotated[list[ConversationMessage], LIST]
    system: Annotated[Text | _TEXT_BLOCKS, TEXT_OR_ITEMS] | None = None
    tools: Annotated[list[ClientTool], LIST] | None = None
    tool_choice: ClientToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    output_format: OutputFormat | None = None
    """The older name of `output_config.format`."""


class MessagesRequest(_Conversation):
    """The body of POST /v1/messages."""

    refused: ClassVar[Mapping[str, Unserved]] = {
        **_REFUSED,
        "compaction": Unserved("conversations are never compacted; ask for a summary in a message"),
    }

    max_tokens: Count | None = None
    """Maximum number of answer tokens. Anthropic requires this field; here None means the rest of the context."""
    stop_sequences: Annotated[list[str], LIST] | None = None
    stream: bool | None = None


class CountTokensRequest(_Conversation):
    """The body of POST /v1/messages/count_tokens."""

    inert = _INERT | {"max_tokens", "stop_sequences", "stream", "compaction"}
