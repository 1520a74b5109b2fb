"""The messages, tools and tool calls in the bodies of chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, PlainValidator, Tag
from pydantic_core import PydanticCustomError

from router.api.body import LIST, TEXT, Body, Text, choice
from router.api.fields import INCOMPLETE, Name, required
from router.api.unserved_fields import MESSAGE_INERT, MESSAGE_UNSERVED, Unserved


class TextPart(Body):
    """A part of a message's content; further fields are ignored."""

    lenient = True
    type: Literal["text"]
    text: str


def _joined(value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content", "must be a string or a list of text parts")
    texts = []
    for number, part in enumerate(value):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise PydanticCustomError(f"text_part:[{number}]", "must be a text part; other kinds are not supported")
        texts.append(text)
    return "".join(texts)


Content = Annotated[str, PlainValidator(_joined, json_schema_input_type=str | list[TextPart])]
"""The text of a message; its parts are joined during validation, because a conversation may have thousands of parts."""


class FunctionCall(Body):
    """The function that an assistant called."""

    name: Name
    arguments: (
        Annotated[
            Text | Annotated[dict[str, Any], Tag("<object>")],
            choice(
                lambda value: TEXT if isinstance(value, str) else "<object>" if isinstance(value, dict) else None,
                "must be a JSON object as a string",
            ),
        ]
        | None
    ) = Field(None, description="A JSON object, as a string or as it is.")


class ToolCall(Body):
    """A tool call in an assistant's message."""

    model_config = ConfigDict(json_schema_extra=required("type", "function", "id"))
    inert = frozenset({"index"})
    type: Literal["function"]
    function: FunctionCall = INCOMPLETE
    id: Name


class _Message(Body):
    refused: ClassVar[Mapping[str, Unserved]] = MESSAGE_UNSERVED
    inert = MESSAGE_INERT


class TextMessage(_Message):
    """A message of the client; `developer` is another name of `system`."""

    role: Literal["system", "developer", "user"]
    content: Content


class AssistantMessage(_Message):
    """An earlier answer."""

    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="The same as reasoning_content.")
    tool_calls: Annotated[list[ToolCall], LIST] | None = None


class ToolMessage(_Message):
    """The result of a tool call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: Name
    name: str | None = None


_ROLES = {"system": TEXT, "developer": TEXT, "user": TEXT, "assistant": "<assistant>", "tool": "<tool>"}


def _role_tag(value: Any) -> str | None:
    if not isinstance(value, dict):
        return TEXT  # this alternative reports that the value is not an object
    role = value.get("role")
    return _ROLES.get(role) if isinstance(role, str) else None


Message = Annotated[
    Annotated[TextMessage, Tag(TEXT)]
    | Annotated[AssistantMessage, Tag("<assistant>")]
    | Annotated[ToolMessage, Tag("<tool>")],
    choice(_role_tag, f"must be one of {', '.join(_ROLES)}", field="role"),
]


class Function(Body):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="The JSON schema of the arguments.")
    strict: bool | None = None


class Tool(Body):
    """A tool that the model may call."""

    model_config = ConfigDict(json_schema_extra=required("type", "function"))
    type: Literal["function"]
    function: Function = INCOMPLETE


class ChosenFunction(Body):
    """The name of one of the tools' functions; further fields are ignored."""

    lenient = True
    name: Name


class NamedTool(Body):
    """The choice of one tool; further fields are ignored."""

    lenient = True
    model_config = ConfigDict(json_schema_extra=required("type", "function"))
    type: Literal["function"]
    function: ChosenFunction = INCOMPLETE


def _choice_tag(value: Any) -> str | None:
    if isinstance(value, dict):
        return "<named>" if value.get("type") == "function" else None
    return TEXT if value in ("none", "auto", "required") else None


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(TEXT)] | Annotated[NamedTool, Tag("<named>")],
    choice(_choice_tag, "must be none, auto, required or an object of type function with a name"),
]


class Tools(Body):
    """The fields about tools in a chat request."""

    tools: Annotated[list[Tool], LIST] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = Field(None, description="False: at most one call is returned.")
