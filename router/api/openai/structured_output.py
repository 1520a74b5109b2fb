"""Parses the fields that ask for structured output: OpenAI's `response_format`, and vLLM's and SGLang's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from router.api.json_fields import JsonFields
from router.requests.answer_format import AnswerFormat
from tandem.protocol.errors import InvalidArgument
from tandem.tokenizers.grammar_process import GrammarKind

_JSON_OBJECT = {"type": "object"}


def answer_format(fields: JsonFields) -> AnswerFormat | None:
    """Take all fields about the answer's format; InvalidArgument for a malformed one, or for more than one format."""
    found = [
        wanted
        for wanted in (
            _response_format(fields),
            _structured_outputs(fields),
            *(_single(fields, name, name, read) for name, read in _SINGLE.items()),
        )
        if wanted is not None
    ]
    if len(found) > 1:
        raise InvalidArgument(found[1].field, f"cannot be combined with {found[0].field}; send one format")
    return found[0] if found else None


def _response_format(fields: JsonFields) -> AnswerFormat | None:
    value = fields.object("response_format")
    if not value:
        return None
    inner = fields.within(value, "response_format.")
    kind = inner.text("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return AnswerFormat("response_format", GrammarKind.JSON_SCHEMA, _JSON_OBJECT, text_only=True)
    if kind != "json_schema":
        raise inner.wrong("type", "must be text, json_object or json_schema")
    named = inner.within(inner.object("json_schema"), "response_format.json_schema.")
    schema = named.take("schema")
    if schema is None:
        raise named.wrong("schema", "is missing; send a JSON schema")
    found = _read(GrammarKind.JSON_SCHEMA)("response_format.json_schema.schema", schema)
    return replace(found, text_only=True)


def _structured_outputs(fields: JsonFields) -> AnswerFormat | None:
    value = fields.object("structured_outputs")
    inner = fields.within(value, "structured_outputs.")
    found = [_single(inner, name, f"structured_outputs.{name}", read) for name, read in _STRUCTURED.items()]
    given = [each for each in found if each is not None]
    if inner.boolean("json_object"):
        given.append(AnswerFormat("structured_outputs.json_object", GrammarKind.JSON_SCHEMA, _JSON_OBJECT))
    inner.drop(frozenset({"disable_fallback"}))
    for name in ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties"):
        if inner.take(name):
            raise inner.wrong(name, "is not supported; leave it out")
    inner.end()
    if value and len(given) != 1:
        names = ", ".join([*_STRUCTURED, "json_object"])
        raise InvalidArgument("structured_outputs", f"must have exactly one of {names}")
    return given[0] if given else None


def _single(fields: JsonFields, name: str, field: str, read: Callable[[str, Any], AnswerFormat]) -> AnswerFormat | None:
    value = fields.take(name)
    return None if value is None or value is False or value in ("", []) else read(field, value)


def _read(kind: GrammarKind) -> Callable[[str, Any], AnswerFormat]:
    def read(field: str, value: Any) -> AnswerFormat:
        if not _TYPES[kind](value):
            raise InvalidArgument(field, _WANTED[kind])
        return AnswerFormat(field, kind, tuple(value) if isinstance(value, list) else value)

    return read


_TYPES: dict[GrammarKind, Callable[[Any], bool]] = {
    GrammarKind.JSON_SCHEMA: lambda value: isinstance(value, dict | bool | str),
    GrammarKind.REGEX: lambda value: isinstance(value, str),
    GrammarKind.CHOICE: lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
    GrammarKind.EBNF: lambda value: isinstance(value, str),
}
_WANTED = {
    GrammarKind.JSON_SCHEMA: "must be a JSON schema, an object",
    GrammarKind.REGEX: "must be a string",
    GrammarKind.CHOICE: "must be a list of strings",
    GrammarKind.EBNF: "must be a string",
}
_STRUCTURED: dict[str, Callable[[str, Any], AnswerFormat]] = {
    "json": _read(GrammarKind.JSON_SCHEMA),
    "regex": _read(GrammarKind.REGEX),
    "choice": _read(GrammarKind.CHOICE),
    "grammar": _read(GrammarKind.EBNF),
}
_SINGLE: dict[str, Callable[[str, Any], AnswerFormat]] = {
    **{f"guided_{name}": read for name, read in _STRUCTURED.items()},
    "json_schema": _read(GrammarKind.JSON_SCHEMA),
    "regex": _read(GrammarKind.REGEX),
    "ebnf": _read(GrammarKind.EBNF),
}
"""Fields of older versions of vLLM (`guided_…`) and of SGLang."""
