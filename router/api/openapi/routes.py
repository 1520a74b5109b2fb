"""The routes that describe the others: `/openapi.json`, and `/docs`, a page of Swagger UI for browsers.

They need no key, because a browser that opens a page sends none, and say nothing about the server but its routes. The
browser loads nothing from other hosts: the wheel of fastapi-offline has Swagger UI's files.
"""

from __future__ import annotations

import asyncio
import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import FileResponse, HTMLResponse, Response

from router.api.openapi.page import openapi_page
from tandem.protocol.errors import NotFound

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


def add_pages(app: FastAPI) -> None:
    """Add the routes to `app`; the page has all routes that `app` has when it is first asked for."""

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


@cache
def _swagger_folder() -> Path | None:
    """Return the folder of Swagger UI's files; None if it is not installed."""
    found = find_spec("fastapi_offline")
    return None if found is None or found.origin is None else Path(found.origin).parent / "static"
