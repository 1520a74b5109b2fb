"""The HTTP listener: OpenAI's and Anthropic's APIs, metrics, traces and probes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fastapi import FastAPI, Request, Response
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from router.access.audit_log import AuditLog
from router.access.callers import Callers
from router.access.client_call import served_call
from router.access.quota import QUOTA_HEADERS
from router.api.access.http_access import READERS_PATHS, AuditedHttp, HttpAccess
from router.api.anthropic.error_responses import add_error_handlers, error_response
from router.api.completions.answers import best_of, collected
from router.api.completions.prompt_replies import PromptReplies
from router.api.model_routes import add_models
from router.api.openai.models.requests import ChatCompletionRequest, CompletionRequest
from router.api.openai.replies import ReplyShape
from router.api.openai.requests import OpenAICall, parse_chat, parse_completion
from router.api.openapi.json_body import json_body
from router.api.openapi.routes import add_pages
from router.api.probes import PROBE_PATHS, add_probes
from router.api.request_id import REQUEST_ID_HEADER, RequestIds
from router.api.routes.adapter_routes import add_adapters
from router.api.routes.item_routes import add_item_apis
from router.api.routes.posted_calls import PostedCalls
from router.api.tokenizer_routes import add_tokenizer
from router.api.unserved_fields import IGNORED_HEADER, IgnoredLog
from router.config import RouterConfig
from router.requests.dispatch import Dispatcher
from router.requests.request import Admitted
from router.requests.validation import RequestValidator
from router.workers.adapter_calls import AdapterCalls
from tandem.metrics.exposition import Exposition
from tandem.metrics.metrics_server import METRICS_PATH, TRACES_PATH, Page, metrics_page
from tandem.net.limits.call_count import CallCount
from tandem.protocol.conversion import traces_to_json
from tandem.protocol.errors import ResourceExhausted
from tandem.protocol.lifecycle.request_trace import TRACEPARENT, only
from tandem.protocol.lifecycle.timeline import Edge, EdgeStamp


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


Parser = Callable[..., OpenAICall]


def make_app(
    config: RouterConfig,
    validator: RequestValidator,
    dispatcher: Dispatcher,
    callers: Callers,
    audit: AuditLog | None = None,
) -> ASGIApp:
    """Return the whole application, with the checks of `callers` and an audit log."""
    app = FastAPI(title="Tandem", docs_url=None, redoc_url=None, openapi_url=None)
    exposition = Exposition(dispatcher.metrics.registry)
    calls = PostedCalls(config, validator, dispatcher, IgnoredLog())
    listener = _HttpListener(calls, metrics_page(exposition))
    for path, answer, body in (
        ("/v1/chat/completions", listener.chat, ChatCompletionRequest),
        ("/v1/completions", listener.completions, CompletionRequest),
    ):
        app.add_api_route(path, answer, methods=["POST"], openapi_extra=json_body(body))
    add_item_apis(app, calls)
    add_models(app, config, dispatcher)
    add_tokenizer(app, config, validator)
    add_adapters(app, config, validator, AdapterCalls(dispatcher.pool))
    add_probes(app, dispatcher)
    add_pages(app)
    app.add_api_route(METRICS_PATH, listener.metrics, methods=["GET", "HEAD"])
    app.add_api_route(TRACES_PATH, listener.traces, methods=["GET", "HEAD"])
    add_error_handlers(app)
    counted = CallLimit(app, config.listeners.max_calls, apart=PROBE_PATHS | READERS_PATHS)
    audited = AuditedHttp(RequestIds(HttpAccess(counted, callers)), audit)
    return _open_to_pages(audited, config.allowed_origins)


def _open_to_pages(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Add CORS for web pages of these `origins`.

    Browsers send the preflight request without a key, so CORS comes before the key check; its rejections then have
    the headers that let pages read them.
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


@dataclass(frozen=True, slots=True)
class _HttpListener:
    calls: PostedCalls
    metrics_page: Page

    async def chat(self, request: Request) -> Response:
        """Serve POST /v1/chat/completions."""
        return await self._answer(request, parse_chat, chat=True)

    async def completions(self, request: Request) -> Response:
        """Serve POST /v1/completions."""
        return await self._answer(request, parse_completion, chat=False)

    async def metrics(self, request: Request) -> Response:
        """Serve GET /metrics."""
        body, content_type = await self.metrics_page(request.headers.get("accept", ""))
        return Response(body, media_type=content_type)

    async def traces(self, request: Request) -> Response:
        """Serve GET /traces: `?id=` for one request or trace, `?slow` for the slowest; else the newest."""
        store, asked = self.calls.dispatcher.metrics.traces, request.query_params
        found = store.find(asked["id"]) if "id" in asked else store.slow() if "slow" in asked else store.newest()
        return Response(traces_to_json(found, store.kept), media_type="application/json")

    async def _answer(self, request: Request, parse: Parser, *, chat: bool) -> Response:
        received = EdgeStamp.now(Edge.RECEIVED)
        admit = partial(self._admitted, request, parse=parse, received=received)
        call, admitted, submitted = await self.calls.submitted(request, admit)
        choices, first = submitted.choices, admitted[0]
        shape = ReplyShape(
            chat=chat,
            request_id=choices.request_id,
            model=first.model_name(self.calls.config.model_name),
            created=received.unix_nanos // 10**9,
            stream_options=call.stream_options,
            prompts=[each.prompt_token_ids for each in admitted],
            choices=call.request.options.n or 1,
            syntax=first.syntax,
            logprobs=call.request.options.alternatives is not None,
            return_token_ids=call.return_token_ids,
            form=call.prompts,
        )
        prompts = PromptReplies(call.prompts, self.calls.validator, call.requests, admitted, choices)

        async def whole() -> bytes:
            answers = [
                replace(each, prompt=await prompts.of(index))
                for index, each in enumerate(await collected(choices, call.prompts))
            ]
            ends = [each.ending for each in answers]
            made = partial(shape.whole, best_of(answers, call.request.options.n or 1, first.n), ends)
            # The scores of a prompt may be megabytes of text, which would hold up the event loop.
            return await asyncio.to_thread(made) if call.prompts.needed else made()

        return await self.calls.respond(call, submitted, shape, whole, prompts=prompts)

    async def _admitted(
        self, request: Request, body: bytes, *, parse: Parser, received: EdgeStamp
    ) -> tuple[OpenAICall, list[Admitted]]:
        call = await self.calls.parsed(body, parse, received)
        tenant, traceparent = served_call().caller.tenant, only(request.headers.getlist(TRACEPARENT))
        requests = [replace(each, tenant=tenant, traceparent=traceparent) for each in call.requests]
        return call, await self.calls.validator.admit_all(requests)
