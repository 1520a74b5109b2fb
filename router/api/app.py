"""The application of the HTTP listener: OpenAI's and Anthropic's APIs, a page for browsers, metrics and probes.

It is a FastAPI application inside ASGI middleware; from the outside in: CORS, audit log, request ids, keys, call limit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from fastapi import FastAPI, Request, Response
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from router.access.audit_log import AuditLog
from router.access.callers import Callers
from router.access.quota import QUOTA_HEADERS
from router.api.adapter_routes import add_adapters
from router.api.anthropic.api_key import MESSAGES_PATH
from router.api.anthropic.body import MessagesRequest
from router.api.anthropic.errors import add_error_handlers, error_response
from router.api.anthropic.reply import MessageReply
from router.api.anthropic.request import parse_message
from router.api.http import HttpCalls
from router.api.http_access import READERS_PATHS, AuditedHttp, HttpAccess
from router.api.model_routes import add_models
from router.api.openai.bodies import ChatCompletionRequest, CompletionRequest
from router.api.openai.replies import OpenAIReply
from router.api.openai.requests import parse_chat, parse_completion
from router.api.openai.responses_body import ResponsesRequest
from router.api.openai.responses_reply import ResponseReply
from router.api.openai.responses_request import parse_response
from router.api.openapi import add_pages
from router.api.probes import PROBE_PATHS, add_probes
from router.api.request_id import REQUEST_ID_HEADER, RequestIds
from router.api.route_groups import Group
from router.api.tokenizer_routes import add_tokenizer
from router.api.unserved_fields import IGNORED_HEADER, IgnoredLog
from router.api.web_page import add_web_page
from router.config import RouterConfig
from router.requests.dispatch import Dispatcher
from router.requests.picker_metrics import PICKER_PATH, picker_registry
from router.requests.validation import RequestValidator
from router.workers.adapter_calls import AdapterCalls
from tandem.metrics.exposition import Exposition
from tandem.metrics.metrics_server import METRICS_PATH, TRACES_PATH, metrics_page
from tandem.metrics.registry import Registry
from tandem.net.limits.call_count import CallCount
from tandem.protocol.conversion import traces_to_json
from tandem.protocol.errors import ResourceExhausted


class CallLimit:
    """ASGI middleware that limits the requests in progress; it rejects further ones without reading their bodies."""

    def __init__(self, app: ASGIApp, limit: int, apart: Collection[str]) -> None:
        """`apart` contains the paths without a limit: probes and metrics, which operators need under overload."""
        self._app = app
        self._count = CallCount(limit)
        self._apart = apart

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or reject it with ResourceExhausted."""
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


def make_app(
    config: RouterConfig,
    validator: RequestValidator,
    dispatcher: Dispatcher,
    callers: Callers,
    audit: AuditLog | None = None,
) -> ASGIApp:
    """Return the application of the HTTP listener; `callers` checks the keys, `audit` is None without an audit log."""
    app = FastAPI(title="Tandem", docs_url=None, redoc_url=None, openapi_url=None)
    calls = HttpCalls(config, validator, dispatcher, IgnoredLog())
    chat, text = partial(OpenAIReply, chat=True), partial(OpenAIReply, chat=False)
    calls.add_api(
        app, "/v1/chat/completions", ChatCompletionRequest, parse_chat, chat, summary="Answer a conversation."
    )
    calls.add_api(
        app, "/v1/completions", CompletionRequest, parse_completion, text, summary="Continue texts or token ids."
    )
    summary = "Answer in the form of the Responses API."
    calls.add_api(app, "/v1/responses", ResponsesRequest, parse_response, ResponseReply, summary=summary)
    summary = "Answer a conversation in the form of the Messages API."
    calls.add_api(
        app, MESSAGES_PATH, MessagesRequest, parse_message, MessageReply, summary=summary, group=Group.ANTHROPIC
    )
    add_tokenizer(app, calls)
    add_adapters(app, calls, AdapterCalls(dispatcher.pool))
    add_models(app, config, dispatcher)
    add_probes(app, dispatcher)
    _add_metrics(app, config, dispatcher)
    add_pages(app)
    add_web_page(app, dispatcher)
    add_error_handlers(app)
    counted = CallLimit(app, config.listeners.max_calls, apart=PROBE_PATHS | READERS_PATHS)
    also_open = frozenset({PICKER_PATH} if config.open_picker_metrics else ())
    audited = AuditedHttp(RequestIds(HttpAccess(counted, callers, also_open)), audit)
    return _open_to_pages(audited, config.allowed_origins)


def _open_to_pages(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Add CORS middleware that allows web pages of the given `origins`.

    Browsers send the preflight request without a key, so CORS must come before the key check. Rejections by the key
    check therefore have the CORS headers, too; a web page cannot read a response without these headers.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "HEAD", "POST"],
        allow_headers=["*"],
        expose_headers=[IGNORED_HEADER, REQUEST_ID_HEADER, "retry-after", *QUOTA_HEADERS],
    )


def _add_metrics(app: FastAPI, config: RouterConfig, dispatcher: Dispatcher) -> None:
    store = dispatcher.metrics.traces

    def add_page(path: str, registry: Registry) -> None:
        page = metrics_page(Exposition(registry))

        async def metrics(request: Request) -> Response:
            """Return the router's metrics in Prometheus' or OpenMetrics' format."""
            body, content_type = await page(request.headers.get("accept", ""))
            return Response(body, media_type=content_type)

        app.add_api_route(path, metrics, methods=["GET", "HEAD"], tags=[Group.STATE])

    async def recent_traces(request: Request) -> Response:
        """Return the trace of one request (`?id=`), the slowest traces (`?slow`), or the newest traces."""
        query = request.query_params
        traces = store.find(query["id"]) if "id" in query else store.slow() if "slow" in query else store.newest()
        return Response(traces_to_json(traces, store.kept), media_type="application/json")

    add_page(METRICS_PATH, dispatcher.metrics.registry)
    add_page(PICKER_PATH, picker_registry(config.served.name, dispatcher))
    app.add_api_route(TRACES_PATH, recent_traces, methods=["GET", "HEAD"], tags=[Group.STATE])
