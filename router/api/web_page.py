"""The page at `/` for browsers, a chat and the state of the cluster, and the figures that it shows at `/cluster`.

The page needs no key, because a browser that opens it sends none; the script in it asks for a key if calls need one. It
consists of the static files in `router/api/page` and loads nothing from other hosts.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import JSONResponse, Response

from router.api.route_groups import Group
from router.observability.cluster_figures import ClusterFigures
from router.requests.dispatch import Dispatcher
from tandem.protocol.errors import NotFound

CLUSTER_PATH = "/cluster"
"""The path of the cluster's figures."""
_FOLDER = Path(__file__).parent / "page"
_TYPES = {
    ".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"
}  # fmt: skip
_INDEX = "index.html"
_FILES = frozenset(path.name for path in _FOLDER.iterdir() if path.suffix in _TYPES)
PAGE_PATHS = frozenset({"/", *(f"/page/{name}" for name in _FILES)})
"""The paths that need no key."""
_METHODS = ["GET", "HEAD"]
_HEADERS = {
    # A page and a script of different versions do not fit together.
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def add_web_page(app: FastAPI, dispatcher: Dispatcher) -> None:
    """Add the page, its files and `/cluster` to `app`."""
    figures = ClusterFigures(dispatcher.pool.controller)

    async def page() -> Response:
        return _file(_INDEX)

    async def file(name: str) -> Response:
        if name not in _FILES:
            raise NotFound(f"/page/{name}: is no file of the page at /")
        return _file(name)

    async def cluster() -> JSONResponse:
        """Return the workers, queues, goodput, latencies and bottlenecks that `tandem top` and `tandem why` print."""
        view = asdict(await figures.view())
        body = {"mode": dispatcher.pool.mode, "degraded": dispatcher.degraded, **view}
        return JSONResponse(body, headers={"cache-control": "no-store"})

    app.add_api_route("/", page, methods=_METHODS, include_in_schema=False)
    app.add_api_route("/page/{name}", file, methods=_METHODS, include_in_schema=False)
    app.add_api_route(CLUSTER_PATH, cluster, methods=_METHODS, tags=[Group.STATE])


def _file(name: str) -> Response:
    return Response(_content(name), headers=_HEADERS, media_type=_TYPES[Path(name).suffix])


@cache
def _content(name: str) -> bytes:
    return (_FOLDER / name).read_bytes()
