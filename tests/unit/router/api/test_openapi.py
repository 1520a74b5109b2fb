"""The description of the routes: `/openapi.json` and `/docs`."""

import importlib.util
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import jsonschema
import pytest

from router.api.unserved_fields import CHAT_UNSERVED, COMPLETION_UNSERVED, INERT
from tests.unit.router.conftest import Cluster

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"api_keys": ("sesame",)}


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    """A client without a key, as a browser that opens a page."""
    async with httpx.AsyncClient(base_url=f"http://{cluster.endpoints.http_address}", timeout=60) as client:
        yield client


@pytest.fixture
async def page(http: httpx.AsyncClient) -> dict[str, Any]:
    reply = await http.get("/openapi.json")
    assert reply.headers["content-type"] == "application/json"
    document: dict[str, Any] = reply.json()
    return document


def references(value: Any) -> set[str]:
    """Returns the targets of all references in a page."""
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


async def test_every_route_and_method_is_on_the_page_once(page: dict[str, Any]) -> None:
    operations = {
        (method, path): operation for path, methods in page["paths"].items() for method, operation in methods.items()
    }
    assert {("post", "/v1/chat/completions"), ("post", "/v1/completions"), ("get", "/v1/models/{name}")} <= set(
        operations
    )
    assert {("get", "/ping"), ("post", "/ping"), ("post", "/tokenize"), ("get", "/tokenizer_info")} <= set(operations)
    ids = {operation["operationId"] for operation in operations.values()}
    assert len(ids) == len(operations)
    assert all(operation_id.isidentifier() for operation_id in ids), "generators name functions by them"
    groups = [group["name"] for group in page["tags"]]
    assert {tuple(operation["tags"]) for operation in operations.values()} == {(name,) for name in groups}
    assert all(operation["summary"].endswith(".") for operation in operations.values()), "each says what it does"
    named = page["components"]["schemas"]
    assert references(page) == {f"#/components/schemas/{name}" for name in named}
    assert not any("422" in operation["responses"] for operation in operations.values())


async def test_the_schemas_accept_right_bodies_and_refuse_wrong_ones(page: dict[str, Any]) -> None:
    schema = {"$ref": "#/components/schemas/ChatCompletionRequest", "components": page["components"]}
    jsonschema.Draft202012Validator.check_schema(page["components"]["schemas"]["ChatCompletionRequest"])
    jsonschema.validate(CHAT, schema)
    for wrong in ({"messages": []}, {**CHAT, "temperature": -1}, {**CHAT, "stop": [""]}, {**CHAT, "n": 0}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


async def test_refused_fields_and_those_without_effect_are_named(page: dict[str, Any]) -> None:
    for name, refused in (("ChatCompletionRequest", CHAT_UNSERVED), ("CompletionRequest", COMPLETION_UNSERVED)):
        model = page["components"]["schemas"][name]
        assert model["x-refused"] == {field: rule.reason for field, rule in refused.items()}
        assert set(model["x-without-effect"]) == INERT


async def test_pages_need_no_key_but_what_they_describe_does(http: httpx.AsyncClient) -> None:
    for path in ("/openapi.json", "/docs", "/docs/start.js"):
        for reply in (await http.get(path), await http.head(path)):
            assert reply.status_code == 200, path
    for path in ("/docs/../v1/models", "/docs/other", "/docs/start.js/x", "/v1/models"):
        assert (await http.get(path)).status_code == 401, path
    key = {"authorization": "Bearer sesame"}
    assert (await http.get("/docs/other", headers=key)).status_code == 404
    assert (await http.get("/docs/..%2f__init__.py", headers=key)).status_code == 404


@pytest.mark.skipif(importlib.util.find_spec("fastapi_offline") is None, reason="Swagger UI is not installed")
async def test_the_page_loads_its_files_from_this_server_alone(http: httpx.AsyncClient) -> None:
    page = await http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"].startswith("default-src 'self'")
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(loaded) == 4
    for file in loaded:
        reply = await http.get(f"/{file}")
        assert reply.status_code == 200, file
        assert len(reply.content) > 50
