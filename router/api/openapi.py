"""The description of all HTTP routes: `/openapi.json`, and `/docs`, a Swagger UI page for browsers.

Neither needs a key: a browser that opens a page sends none, and both show only the server's routes. The browser loads
nothing from other hosts, because the wheel of fastapi-offline contains Swagger UI's files.
"""

from __future__ import annotations

import asyncio
import json
import re
from copy import copy
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import FileResponse, HTMLResponse, Response

from router.api.probes import PROBE_PATHS
from router.api.route_groups import DESCRIPTIONS
from tandem.protocol.errors import NotFound
from tandem.version import installed_version

REFERENCE = "#/components/schemas/{model}"
"""The template of a reference to a model within the OpenAPI page."""
_KEY = "API key"
_MADE_BY_FASTAPI = ("HTTPValidationError", "ValidationError")
"""The error models that FastAPI adds to the page; this server parses bodies itself and never replies with them."""
OPENAPI_PATH = "/openapi.json"
DOCS_PATH = "/docs"
_FILES = ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png")
_START_PATH = f"{DOCS_PATH}/start.js"
OPEN_PATHS = frozenset({OPENAPI_PATH, DOCS_PATH, _START_PATH, *(f"{DOCS_PATH}/{name}" for name in _FILES)})
"""The paths that need no key."""
_METHODS = ["GET", "HEAD"]
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Tandem</title>
<link rel="icon" href="docs/favicon.png">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="routes"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
_START = 'SwaggerUIBundle({url: "openapi.json", dom_id: "#routes", deepLinking: true});\n'
_HEADERS = {
    "cache-control": "max-age=3600",
    "content-security-policy": "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}


class Problem(BaseModel):
    """The error object of OpenAI's API; Anthropic's error object has only the first two fields."""

    message: str
    type: str
    param: str | None = None
    """The name of the invalid field."""
    code: str | None = None


class ErrorReply(BaseModel):
    """The reply to a request that failed or was rejected."""

    error: Problem


_FAILED = {
    "description": "The request failed or was rejected; `param` is the field that is wrong.",
    "content": {"application/json": {"schema": {"$ref": REFERENCE.format(model="ErrorReply")}}},
}


@cache
def json_body(*models: type[BaseModel]) -> dict[str, Any]:
    """Return the `openapi_extra` of a route whose body is one of `models`; the route parses the body itself."""
    schemas = [model.model_json_schema(ref_template=REFERENCE) for model in models]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def add_pages(app: FastAPI) -> None:
    """Add `/openapi.json` and `/docs` to `app`; they describe the routes that `app` has at the first request."""

    @cache
    def page() -> bytes:
        return json.dumps(openapi_page(app), separators=(",", ":")).encode()

    async def openapi() -> Response:
        return Response(await asyncio.to_thread(page), media_type="application/json")

    async def docs() -> Response:
        return HTMLResponse(_PAGE, headers=_HEADERS)

    async def start() -> Response:
        return Response(_START, media_type="text/javascript", headers=_HEADERS)

    async def file(name: str) -> Response:
        folder = _swagger_folder()
        if name not in _FILES or folder is None:
            raise NotFound(f"{DOCS_PATH}/{name}: is no file of this page; install fastapi-offline, which has its files")
        return FileResponse(folder / name, headers=_HEADERS)

    for path, route in ((OPENAPI_PATH, openapi), (DOCS_PATH, docs), (_START_PATH, start)):
        app.add_api_route(path, route, methods=_METHODS, include_in_schema=False)
    app.add_api_route(f"{DOCS_PATH}/{{name}}", file, methods=_METHODS, include_in_schema=False)


def openapi_page(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI page of `app`; routes that parse their own bodies describe them by `json_body`."""
    routes = [one for route in app.routes if isinstance(route, APIRoute) for one in _by_method(route)]
    tags = [{"name": group.value, "description": text} for group, text in DESCRIPTIONS.items()]
    page = get_openapi(title=app.title, version=installed_version(), routes=routes, tags=tags)
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
    """Return one route per HTTP method, without HEAD, because each operation of the page must have a unique id.

    A route without a summary gets the docstring of its function.
    """
    routes = []
    for method in sorted((route.methods or set()) - {"HEAD"}):
        one = copy(route)
        one.methods, one.operation_id = {method}, _operation_id(method, route)
        if not one.summary:
            one.summary, one.description = one.description, ""
        routes.append(one)
    return routes


def _operation_id(method: str, route: APIRoute) -> str:
    """Return a name that generated clients can use for a function, such as `post_v1_chat_completions`."""
    return re.sub(r"\W+", "_", f"{method.lower()}{route.path_format}").strip("_")


def _named(schema: dict[str, Any], named: dict[str, Any]) -> dict[str, Any]:
    """Move the models inside a schema to `named`, and return the schema with references to them."""
    named.update(schema.pop("$defs", {}))
    if "anyOf" in schema:
        return {**schema, "anyOf": [_named(one, named) for one in schema["anyOf"]]}
    if "properties" not in schema:
        return schema
    named[schema["title"]] = schema
    return {"$ref": REFERENCE.format(model=schema["title"])}


@cache
def _swagger_folder() -> Path | None:
    """Return the folder of Swagger UI's files; None if it is not installed."""
    spec = find_spec("fastapi_offline")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "static"
