"""The OpenAPI page of an application: every route with its body, its reply and the error that it may return."""

from __future__ import annotations

import re
from copy import copy
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel

from router.api.model_routes import installed_version
from router.api.openapi.json_body import REFERENCE
from router.api.probes import PROBE_PATHS


class Problem(BaseModel):
    """OpenAI's description of an error; Anthropic's has the first two fields."""

    message: str
    type: str
    param: str | None = None
    """The field that is wrong."""
    code: str | None = None


class ErrorReply(BaseModel):
    """The reply to a request that failed or was rejected."""

    error: Problem


_FAILED = {
    "description": "The request failed or was rejected; `param` is the field that is wrong.",
    "content": {"application/json": {"schema": {"$ref": REFERENCE.format(model="ErrorReply")}}},
}
_KEY = "API key"
_MADE_BY_FASTAPI = ("HTTPValidationError", "ValidationError")
"""The models of replies that FastAPI would give if it parsed the requests."""


def openapi_page(app: FastAPI) -> dict[str, Any]:
    """Return the page; `json_body` has described those routes of `app` that parse their requests."""
    routes = [one for route in app.routes if isinstance(route, APIRoute) for one in _by_method(route)]
    page = get_openapi(title=app.title, version=installed_version(), routes=routes)
    named: dict[str, Any] = page.setdefault("components", {}).setdefault("schemas", {})
    for name in _MADE_BY_FASTAPI:
        named.pop(name, None)
    for path, operations in page["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if path not in PROBE_PATHS:
                operation["responses"]["default"] = _FAILED
            for part in (operation.get("requestBody", {}), *operation["responses"].values()):
                for content in part.get("content", {}).values():
                    content["schema"] = _named(content["schema"], named)
    _named(ErrorReply.model_json_schema(ref_template=REFERENCE), named)
    page["components"]["securitySchemes"] = {_KEY: {"type": "http", "scheme": "bearer"}}
    page["security"] = [{_KEY: []}, {}]
    return page


def _by_method(route: APIRoute) -> list[APIRoute]:
    """Return a route for each method but HEAD, because each operation needs an id of its own."""
    routes = []
    for method in sorted((route.methods or set()) - {"HEAD"}):
        one = copy(route)
        one.methods, one.operation_id = {method}, _operation_id(method, route)
        routes.append(one)
    return routes


def _operation_id(method: str, route: APIRoute) -> str:
    """Return a name that generated clients can give their function, as `post_v1_chat_completions`."""
    return re.sub(r"\W+", "_", f"{method.lower()}{route.path_format}").strip("_")


def _named(schema: dict[str, Any], named: dict[str, Any]) -> dict[str, Any]:
    """Move models out of a schema to `named`; return the schema with references to them."""
    named.update(schema.pop("$defs", {}))
    if "anyOf" in schema:
        return {**schema, "anyOf": [_named(each, named) for each in schema["anyOf"]]}
    if "properties" not in schema:
        return schema
    named[schema["title"]] = schema
    return {"$ref": REFERENCE.format(model=schema["title"])}
