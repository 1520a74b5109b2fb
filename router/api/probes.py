"""The probes of the HTTP listener, which need no key.

`/health`, `/ready` and `/ping` succeed if a request would be served, and `/live` succeeds while this process responds.
The status of the first three is "degraded" while requests wait for a worker that is being started.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import JSONResponse

from router.api.openai.errors import error_headers
from router.api.route_groups import Group
from router.requests.dispatch import Dispatcher

LIVE_PATH = "/live"
READY_PATHS = ("/health", "/ready")
PING_PATH = "/ping"
"""The path of SageMaker's probe, which uses GET or POST."""
PROBE_PATHS = frozenset({LIVE_PATH, PING_PATH, *READY_PATHS})
_METHODS = ["GET", "HEAD"]
_NOT_STORED = {"cache-control": "no-store"}


def add_probes(app: FastAPI, dispatcher: Dispatcher) -> None:
    """Add the routes of the probes to `app`.

    Readiness is 503 with the reason and Retry-After while `dispatcher.refusal` is not None; liveness is always 200.
    """

    async def live() -> JSONResponse:
        """Succeed while the process responds."""
        return JSONResponse({"status": "alive"}, headers=_NOT_STORED)

    async def ready() -> JSONResponse:
        """Succeed if a request would be served now, else return the reason with status 503."""
        refusal = dispatcher.refusal
        if refusal is None and (reason := dispatcher.degraded):
            return JSONResponse({"status": "degraded", "reason": reason}, headers=_NOT_STORED)
        if refusal is None:
            return JSONResponse({"status": "ready"}, headers=_NOT_STORED)
        body = {"status": "not ready", "reason": refusal.message}
        return JSONResponse(body, status_code=refusal.http_status, headers=_NOT_STORED | error_headers(refusal))

    app.add_api_route(LIVE_PATH, live, methods=_METHODS, tags=[Group.PROBES])
    for path in READY_PATHS:
        app.add_api_route(path, ready, methods=_METHODS, tags=[Group.PROBES])
    app.add_api_route(PING_PATH, ready, methods=[*_METHODS, "POST"], tags=[Group.PROBES])
