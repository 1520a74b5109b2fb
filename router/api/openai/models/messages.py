"""The messages, tools and formats in the bodies of chat completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from router.api.bodies.body import Body
from router.api.openai.models.fields import JsonSchema, Name


class TextPart(Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class FunctionCall(Body):
    """The function that an assistant called."""

    name: Name
    arguments: str | dict[str, Any] | None = Field(None, description="A JSON object, as a string or as it is.")


class ToolCall(Body):
    """A call in an assistant's message."""

    id: Name
    type: Literal["function"]
    function: FunctionCall


class TextMessage(Body):
    """A message of the client; `developer` is another name of `system`."""

    role: Literal["system", "developer", "user"]
    content: str | list[TextPart]


class AssistantMessage(Body):
    """An earlier answer."""

    role: Literal["assistant"]
    content: str | list[TextPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="The same as reasoning_content.")
    tool_calls: list[ToolCall] | None = None


class ToolMessage(Body):
    """The result of a call."""

    role: Literal["tool"]
    content: str | list[TextPart]
    tool_call_id: Name
    name: str | None = None


Message = Annotated[TextMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(Body):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="The JSON schema of the arguments.")
    strict: bool | None = None


class Tool(Body):
    """A tool."""

    type: Literal["function"]
    function: Function


class ChosenFunction(Body):
    """The name of one of the tools' functions."""

    name: Name


class NamedTool(Body):
    """The choice of one tool."""

    type: Literal["function"]
    function: ChosenFunction


class StreamOptions(Body):
    """The additional contents of a stream's events."""

    include_usage: bool | None = Field(None, description="An event after the answer has its usage.")
    continuous_usage_stats: bool | None = Field(None, description="Every event has the usage so far, too.")


class TextFormat(Body):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class NamedSchema(Body):
    """A JSON schema with a name."""

    schema_: JsonSchema = Field(alias="schema")


class SchemaFormat(Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | SchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Body):
    """The format of the answer, in one of its fields."""

    json_: JsonSchema | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
