"""The bounds of fields on the OpenAPI page are those that the validator checks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from router.api.openai.bodies import ChatCompletionRequest, CompletionRequest
from router.api.openai.requests import parse_chat, parse_completion
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent
from tests.unit.router.conftest import Cluster

NOW = EventTime.now(LifecycleEvent.RECEIVED)
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "logprobs": True}
TEXT = {"prompt": "Hello", "max_tokens": 4, "echo": True}


def bounds(schema: dict[str, Any]) -> Iterator[tuple[float, float]]:
    """Yields the bounds in the schema of a field, and values beyond them."""
    for name, step in (("minimum", -1), ("maximum", 1)):
        if name in schema:
            yield schema[name], schema[name] + step
    for alternative in schema.get("anyOf", ()):
        yield from bounds(alternative)


@pytest.mark.parametrize(
    ("kind", "parse", "body"),
    [(ChatCompletionRequest, parse_chat, CHAT), (CompletionRequest, parse_completion, TEXT)],
    ids=["chat", "completion"],
)
async def test_the_bounds_on_the_page_are_those_that_are_checked(
    cluster: Cluster, kind: Any, parse: Callable[..., Any], body: dict[str, Any]
) -> None:
    async def out_of_range(field: str, value: float) -> bool:
        data = json.dumps({**body, field: value}).encode()
        try:
            await cluster.router._validator.admit(parse(data, NOW).request)
        except InvalidArgument as error:
            return error.field == field and "it must be" in error.message
        return False

    bounded = {name: [*bounds(schema)] for name, schema in kind.model_json_schema()["properties"].items()}
    assert len([name for name, pairs in bounded.items() if pairs]) >= 15
    for name, pairs in bounded.items():
        for inside, outside in pairs:
            assert not await out_of_range(name, inside), (name, inside)
            assert await out_of_range(name, outside), (name, outside)
