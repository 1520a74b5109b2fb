"""The fields that request structured output: OpenAI's `response_format`, and the fields of vLLM and SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator, Tag
from pydantic_core import PydanticCustomError

from router.api.body import Body, Strings, choice
from router.api.fields import INCOMPLETE, required
from router.api.unserved_fields import Unserved
from router.requests.answer_format import AnswerFormat
from tandem.protocol.errors import InvalidArgument
from tandem.tokenizers.grammar_process import GrammarKind

_JSON_OBJECT = {"type": "object"}


def _absent_if(*empty: Any) -> BeforeValidator:
    """Return a validator that turns each value in `empty` into None, so that the field counts as absent."""
    return BeforeValidator(lambda value: None if any(type(value) is type(e) and value == e for e in empty) else value)


_EMPTY = _absent_if("", [], False)


def _schema(value: Any) -> Any:
    if not isinstance(value, dict | bool | str):
        raise PydanticCustomError("json_schema", "must be a JSON schema, an object")
    return value


JsonSchema = Annotated[Any, PlainValidator(_schema, json_schema_input_type=dict[str, Any] | bool | str)]
_OptionalSchema = Annotated[JsonSchema | None, _EMPTY]
_OptionalText = Annotated[str | None, _EMPTY]
_OptionalChoice = Annotated[Strings | None, _EMPTY]


class TextFormat(Body):
    """The format "any text" or "any JSON object"; further fields are ignored."""

    lenient = True
    type: Literal["text", "json_object"]


class NamedSchema(Body):
    """A JSON schema; its name and further fields are ignored."""

    lenient = True
    schema_: JsonSchema = Field(alias="schema")


class SchemaFormat(Body):
    """The format "JSON that follows a schema"; further fields are ignored."""

    lenient = True
    model_config = ConfigDict(json_schema_extra=required("type", "json_schema"))
    type: Literal["json_schema"]
    json_schema: NamedSchema = INCOMPLETE


_FORMATS = {"text": "<text>", "json_object": "<text>", "json_schema": "<schema>"}


def _format_tag(value: Any) -> str | None:
    if not isinstance(value, dict):
        return "<text>"  # this alternative reports that the value is not an object
    kind = value.get("type")
    return _FORMATS.get(kind) if isinstance(kind, str) else None


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")] | Annotated[SchemaFormat, Tag("<schema>")],
    choice(_format_tag, "must be text, json_object or json_schema", field="type"),
]
_WHITESPACE = "JSON in answers has any white space"


class StructuredOutputs(Body):
    """The format of the answer, given by exactly one of the fields."""

    refused: ClassVar[Mapping[str, Unserved]] = {
        "whitespace_pattern": Unserved(_WHITESPACE),
        "disable_any_whitespace": Unserved(_WHITESPACE),
        "disable_additional_properties": Unserved("a schema says itself which properties it allows"),
    }
    inert = frozenset({"disable_fallback"})
    json_: _OptionalSchema = Field(None, alias="json")
    regex: _OptionalText = None
    choice: _OptionalChoice = None
    grammar: _OptionalText = None
    json_object: bool | None = None


class Formats(Body):
    """All fields that set the answer's format; a request may use only one of them."""

    response_format: Annotated[ResponseFormat | None, _absent_if({})] = None
    structured_outputs: Annotated[StructuredOutputs | None, _absent_if({})] = None
    guided_json: _OptionalSchema = None
    guided_regex: _OptionalText = None
    guided_choice: _OptionalChoice = None
    guided_grammar: _OptionalText = None
    json_schema: _OptionalSchema = None
    regex: _OptionalText = None
    ebnf: _OptionalText = None


_OLDER = {
    "guided_json": GrammarKind.JSON_SCHEMA,
    "guided_regex": GrammarKind.REGEX,
    "guided_choice": GrammarKind.CHOICE,
    "guided_grammar": GrammarKind.EBNF,
    "json_schema": GrammarKind.JSON_SCHEMA,
    "regex": GrammarKind.REGEX,
    "ebnf": GrammarKind.EBNF,
}
"""The grammar kind that a field requests, by name of the field: older vLLM fields (`guided_…`) and SGLang's fields."""


def answer_format(body: Formats) -> AnswerFormat | None:
    """Return the format that a body requests; None for any text.

    Raises InvalidArgument if it requests several formats.
    """
    formats = [_response_format(body.response_format), _structured(body.structured_outputs)]
    formats += [_single(name, kind, getattr(body, name)) for name, kind in _OLDER.items()]
    wanted = [one for one in formats if one is not None]
    if len(wanted) > 1:
        raise InvalidArgument(wanted[1].field, f"cannot be combined with {wanted[0].field}; send one format")
    return wanted[0] if wanted else None


def _response_format(wanted: TextFormat | SchemaFormat | None) -> AnswerFormat | None:
    if wanted is None or wanted.type == "text":
        return None
    if isinstance(wanted, TextFormat):
        return AnswerFormat("response_format", GrammarKind.JSON_SCHEMA, _JSON_OBJECT, text_only=True)
    field, schema = "response_format.json_schema.schema", wanted.json_schema.schema_
    return AnswerFormat(field, GrammarKind.JSON_SCHEMA, schema, text_only=True)


def _structured(outputs: StructuredOutputs | None) -> AnswerFormat | None:
    if outputs is None:
        return None
    formats = [
        _single("structured_outputs.json", GrammarKind.JSON_SCHEMA, outputs.json_),
        _single("structured_outputs.regex", GrammarKind.REGEX, outputs.regex),
        _single("structured_outputs.choice", GrammarKind.CHOICE, outputs.choice),
        _single("structured_outputs.grammar", GrammarKind.EBNF, outputs.grammar),
        _single(
            "structured_outputs.json_object", GrammarKind.JSON_SCHEMA, _JSON_OBJECT if outputs.json_object else None
        ),
    ]
    wanted = [one for one in formats if one is not None]
    if len(wanted) != 1:
        raise InvalidArgument(
            "structured_outputs", "must have exactly one of json, regex, choice, grammar, json_object"
        )
    return wanted[0]


def _single(field: str, kind: GrammarKind, value: Any) -> AnswerFormat | None:
    return None if value is None else AnswerFormat(field, kind, tuple(value) if isinstance(value, list) else value)
