"""The checks of HTTP requests before their handlers run (key, role and quota), and their records in the audit log."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.access.audit_log import AuditLog
from router.access.callers import Caller, Callers
from router.access.client_call import ClientCall, serve_call, served_call
from router.access.quota import Quota
from router.api.anthropic.api_key import key_headers
from router.api.anthropic.errors import error_response
from router.api.openai.errors import error_body
from router.api.openapi import OPEN_PATHS
from router.api.probes import PROBE_PATHS
from router.api.request_id import REQUEST_ID_HEADER
from router.api.web_page import CLUSTER_PATH, PAGE_PATHS
from router.requests.picker_metrics import PICKER_PATH
from tandem.metrics.metrics_server import METRICS_PATH, TRACES_PATH
from tandem.protocol.errors import NotFound, TandemError, clipped

READERS_PATHS = frozenset({METRICS_PATH, TRACES_PATH, CLUSTER_PATH, PICKER_PATH})
"""The paths that show the load of all tenants; operators and readers may use them, but tenants may not."""
LOAD_ADAPTER_PATH, UNLOAD_ADAPTER_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
OPERATORS_PATHS = frozenset({LOAD_ADAPTER_PATH, UNLOAD_ADAPTER_PATH})
"""The paths that change the cluster; only operators may use them."""


class AuditedHttp:
    """ASGI middleware that makes the `ClientCall` of each request and writes it to the audit log.

    It encloses all other middleware except CORS, so that rejected requests are logged, too. Probes are not logged.
    """

    def __init__(self, app: ASGIApp, audit: AuditLog | None) -> None:
        self._app = app
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["path"] in PROBE_PATHS:
            await self._app(scope, receive, send)
            return
        host, _port = scope["client"] or ("", 0)
        call = ClientCall(f"{clipped(scope['method'])} {clipped(scope['path'])}", host)
        serve_call(call)

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
                call.request_id = call.request_id or MutableHeaders(scope=message).get(REQUEST_ID_HEADER, "")
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            if self._audit is not None:
                self._audit.write(call)


class HttpAccess:
    """ASGI middleware that admits a request if its key has a role for the path and its tenant has quota left.

    Probes, the OpenAPI pages, the page for browsers and the paths in `also_open` need no key.
    """

    def __init__(self, app: ASGIApp, callers: Callers, also_open: frozenset[str] = frozenset()) -> None:
        self._app = app
        self._callers = callers
        self._open = PROBE_PATHS | OPEN_PATHS | PAGE_PATHS | also_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or reject it before its body is read."""
        if scope["type"] != "http" or scope["path"] in self._open:
            await self._app(scope, receive, send)
            return
        call = served_call()
        try:
            call.caller = self._caller(scope)
            if call.caller.quota is not None:
                send = _with_quota(send, call.caller.quota)
            if scope["method"] == "POST":
                self._callers.admit(call.caller)
        except TandemError as error:
            await error_response(scope["path"], error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller:
        keys = key_headers(scope)
        if scope["path"] in READERS_PATHS:
            return self._callers.reader(keys, metrics=True)
        if scope["path"] in OPERATORS_PATHS:
            return self._callers.operator(keys)
        return self._callers.tenant(keys)


def only_operations(app: ASGIApp) -> ASGIApp:
    """Return an application that serves only probes, metrics and traces of `app`; for plain HTTP beside HTTPS."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PROBE_PATHS | READERS_PATHS:
            error = NotFound("this port has probes, metrics and traces only; send requests to the HTTPS port")
            await Response(error_body(error), error.http_status, media_type="application/json")(scope, receive, send)
            return
        await app(scope, receive, send)

    return serve


def _with_quota(send: Send, quota: Quota) -> Send:
    """Return a `send` that adds the quota headers; they show the amounts that remain when the response starts."""

    async def send_more(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(quota.headers())
        await send(message)

    return send_more
