"""The limit on concurrent HTTP requests."""

from __future__ import annotations

from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from router.api.anthropic.error_responses import error_response
from tandem.net.limits.call_count import CallCount
from tandem.protocol.errors import ResourceExhausted


class CallLimit:
    """An ASGI application that rejects requests while too many are in progress, before it reads their bodies."""

    def __init__(self, app: ASGIApp, limit: int, apart: Collection[str]) -> None:
        """`apart` lists the paths that are exempt, such as probes and metrics, which operators need under overload."""
        self._app = app
        self._count = CallCount(limit)
        self._apart = apart

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or reject it with `ResourceExhausted`."""
        if scope["type"] != "http" or scope["path"] in self._apart:
            await self._app(scope, receive, send)
            return
        try:
            self._count.enter()
        except ResourceExhausted as error:
            await error_response(scope["path"], error)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            self._count.leave()
