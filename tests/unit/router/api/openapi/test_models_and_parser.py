"""The models of the OpenAPI page agree with the parser and the validator about every field, its type and its bounds.

Each object in some examples gets each field that models or parser know there, with values of every type and at every
bound: the server must accept the body if it fits the model, and name the field if it does not.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import jsonschema
import pytest
from pydantic import TypeAdapter

from router.api import tokenizer_routes
from router.api.json_fields import JsonFields
from router.api.openai.models.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from router.api.openai.requests import parse_chat, parse_completion
from tandem.protocol.errors import InvalidArgument, NotFound
from tandem.protocol.lifecycle.timeline import Edge, EdgeStamp
from tests.unit.router.conftest import Cluster

NOW = EdgeStamp.now(Edge.RECEIVED)
USER: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "Hello"}]}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TALK: dict[str, Any] = {
    "messages": [
        USER,
        {"role": "assistant", "content": "a", "tool_calls": [CALL]},
        {"role": "tool", "content": "b", "tool_call_id": "1", "name": "f"},
    ]
}
LIMITED = {"max_tokens": 4}
CHATS: list[dict[str, Any]] = [
    {**TALK, **LIMITED, "stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2},
    {**TALK, **LIMITED, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    {**TALK, **LIMITED, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}},
    {**TALK, **LIMITED, "structured_outputs": {"regex": "a+"}},
]
TEXTS: list[dict[str, Any]] = [
    {"prompt": "x", **LIMITED, "logprobs": 1},
    {"prompt": [5], **LIMITED, "stream": True, "stream_options": {}},
    {"prompt": ["x"], **LIMITED},
    {"prompt": [[5]], **LIMITED},
    {"prompt": ["x", [5]], **LIMITED, "echo": True, "logit_bias": {"5": 1.5}, "best_of": 2},
]
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, -2, 2, 1.5, -0.5, 10**30, "", "f", "auto", "text", "json_object", "system", "user"),
    *([], [1], [-1], [True], [0.5], ["a"], [""], ["a", "b"], [[5]], [[]], [None], [{}], {}, {"a": 1}),
]
ELSEWHERE = {
    r"max_(completion_)?tokens|prompt|messages": "maximum context length",
    r"model": "is not served here",
    r"n|best_of": r"is \d+, it must be \d+ to",
    r"prompt_logprobs|best_of": "cannot be combined with stream",
    r"max_tokens": r"is 0, it must be",
    r"prompt": "answers each are more than",
    r"min_tokens": r"is \d+, it must be 0 to|cannot be combined",
    r"ignore_eos|continue_final_message": "cannot be combined",
    r"slo_class": "is none of",
    r"stream_options|top_logprobs": "needs ",
    r"tool_choice.*": "needs tools|is the name of none|cannot force",
    r"tools": "are not served",
    r"prompt|tokens|stop_token_ids|logit_bias": "contains token id",
    r"stop": "the limit is",
    r"structured_outputs": "must have exactly one of",
    r"structured_outputs\..*": "is not supported",
    r".*": "cannot be combined with .*; send one format",
}
"""The fields and rejections that no model can express: they depend on other fields, settings or the served model."""
NEUTRAL = r"(guided_\w+|json_schema|regex|ebnf|structured_outputs\.(json|regex|choice|grammar)|response_format)"
"""The fields of which every empty value counts as absent."""

Serve = Callable[[Cluster, bytes], Awaitable[None]]


async def _admit_chat(cluster: Cluster, body: bytes) -> None:
    await cluster.router._validator.admit(parse_chat(body, NOW).request)


async def _admit_completion(cluster: Cluster, body: bytes) -> None:
    await cluster.router._validator.admit(parse_completion(body, NOW).request)


async def _tokenize(cluster: Cluster, body: bytes) -> None:
    call = tokenizer_routes._tokenize_call(body, strict=False)
    await cluster.router._validator.tokenize(call.request, spell=call.spell)


async def _detokenize(cluster: Cluster, body: bytes) -> None:
    model, ids = tokenizer_routes._detokenize_call(body, strict=False)
    await cluster.router._validator.detokenize("", model, ids)


ROUTES: list[tuple[str, Any, list[dict[str, Any]], Serve]] = [
    ("chat", ChatCompletionRequest, CHATS, _admit_chat),
    ("completion", CompletionRequest, TEXTS, _admit_completion),
    ("tokenize", TokenizeTextRequest | TokenizeChatRequest, [{"prompt": "x"}, {**TALK, "tools": [TOOL]}], _tokenize),
    ("detokenize", DetokenizeRequest, [{"tokens": [5]}], _detokenize),
]


def _objects(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yields the paths of all objects in a body but those whose fields are the client's own."""
    if isinstance(value, dict):
        yield path
        for name, each in value.items():
            if name not in ("parameters", "schema", "logit_bias"):
                yield from _objects(each, (*path, name))
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _objects(each, (*path, number))


def _bounds(schema: Any) -> Iterator[Any]:
    """Yields the values at and beyond each bound in the schema of a field."""
    for name in ("minimum", "maximum", "exclusiveMinimum"):
        if name in schema:
            yield from (schema[name] - 1, schema[name], schema[name] + 1)
    if "maxLength" in schema:
        yield from ("x" * schema["maxLength"], "x" * (schema["maxLength"] + 1))
    for each in schema.get("anyOf", ()):
        yield from _bounds(each)


def _with(body: dict[str, Any], path: tuple[str | int, ...], name: str, value: Any) -> dict[str, Any]:
    """Returns a copy of a body in which the object at `path` has another value of field `name`."""
    changed = copy.deepcopy(body)
    found: Any = changed
    for each in path:
        found = found[each]
    found[name] = value
    return changed


def _field(path: tuple[str | int, ...], name: str) -> str:
    parts = (f"[{each}]" if isinstance(each, int) else f".{each}" for each in (*path, name))
    return "".join(parts).removeprefix(".")


class _Taken:
    """The names of the fields that the parser takes from the body itself, and from the objects in it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.own: set[str] = set()
        self.inner: set[str] = set()
        take, taken = JsonFields.take, self

        def noted(self: JsonFields, name: str) -> Any:
            (taken.inner if self._path else taken.own).add(name)
            return take(self, name)

        monkeypatch.setattr(JsonFields, "take", noted)


def _schemas(schema: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the schemas of the fields of the body itself, and of the objects in it."""
    named = schema.get("$defs", {})
    bodies = [named[each["$ref"].rpartition("/")[2]] for each in schema["anyOf"]] if "anyOf" in schema else [schema]
    inner = {name: each for one in named.values() if one not in bodies for name, each in one["properties"].items()}
    return {name: each for body in bodies for name, each in body["properties"].items()}, inner


async def _rejection(serve: Serve, cluster: Cluster, body: dict[str, Any]) -> tuple[str, str]:
    """Returns the field and the message of the server's error about a body, "" and "" if it is served."""
    try:
        await serve(cluster, json.dumps(body).encode())
    except (InvalidArgument, NotFound) as error:
        return error.field if isinstance(error, InvalidArgument) else "model", error.message
    return "", ""


def _agree(fits: bool, field: str, value: Any, wrong: str, message: str) -> bool:
    if fits:
        elsewhere = any(re.fullmatch(name, wrong) and re.search(why, message) for name, why in ELSEWHERE.items())
        return not wrong or elsewhere
    if not wrong:
        return value in ("", [], {}, False) and re.fullmatch(NEUTRAL, field) is not None
    parent = field.rpartition(".")[0] or field
    return value is None or wrong.startswith(parent) or field.startswith(wrong)


@pytest.mark.parametrize(
    ("kind", "examples", "serve"), [route[1:] for route in ROUTES], ids=[each[0] for each in ROUTES]
)
async def test_a_body_that_fits_its_model_is_served_and_another_is_not(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, kind: Any, examples: list[dict[str, Any]], serve: Serve
) -> None:
    async def no_grammar(*_: Any) -> str:
        return ""

    monkeypatch.setattr(cluster.router._validator._formats, "grammar", no_grammar)  # it says what is in a schema
    schema = TypeAdapter(kind).json_schema()
    fits = jsonschema.Draft202012Validator(schema).is_valid
    with monkeypatch.context() as patched:
        taken = _Taken(patched)
        for body in examples:
            assert fits(body), body
            assert await _rejection(serve, cluster, body) == ("", "")
    own, inner = _schemas(schema)
    tried: set[tuple[str, bool]] = set()
    for body in examples:
        for path in _objects(body):
            schemas, names = (inner, taken.inner) if path else (own, taken.own)
            for name in sorted(names | schemas.keys()):
                field = _field(path, name)
                if (field, name in body) in tried:
                    continue
                tried.add((field, name in body))
                for value in [*VALUES, *_bounds(schemas.get(name, {}))]:
                    changed = _with(body, path, name, value)
                    expected = fits({key: each for key, each in changed.items() if each is not None})
                    found = await _rejection(serve, cluster, changed)
                    assert _agree(expected, field, value, *found), (field, value, expected, found)
