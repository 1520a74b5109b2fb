"""The HTTP listener: OpenAI's and Anthropic's APIs, metrics, traces and probes."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from fastapi import FastAPI, Request, Response
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from router.api.answer_stream import AnswerStream
from router.api.bodies.api_call import ApiCall
from router.api.call_limit import CallLimit
from router.api.client_gone import unless_gone
from router.api.http_body import disconnected, read_body
from router.api.messages.api_key import MESSAGES_PATH, authorizations
from router.api.messages.error_responses import add_error_handlers, error_response
from router.api.messages.reply import MessageReply
from router.api.messages.request import parse_count, parse_message
from router.api.model_routes import add_models
from router.api.openai_fields import IGNORED_HEADER, IgnoredLog
from router.api.openai_replies import CompleteAnswer, ReplyShape
from router.api.openai_requests import OpenAICall, parse_chat, parse_completion
from router.api.probes import PROBE_PATHS, add_probes
from router.api.replies.reply import ReplyFacts, collected
from router.api.request_id import REQUEST_ID_HEADER, RequestIds
from router.api.responses.reply import ResponseReply
from router.api.responses.request import parse_response
from router.api.tokenizer_routes import add_tokenizer
from router.config import RouterConfig
from router.requests.answer import Ending
from router.requests.choices import Choices
from router.requests.dispatch import Dispatcher
from router.requests.request import Admitted
from router.requests.tenants import tenant_of
from router.requests.validation import RequestValidator
from router.text.token_scores import TokenScore
from telemetry.exposition import Exposition
from telemetry.metrics_server import METRICS_PATH, TRACES_PATH, Page, metrics_page
from wire.address import is_loopback
from wire.convert import traces_to_json
from wire.errors import InvalidArgument, TandemError, Unauthenticated
from wire.security.credentials import matching_key, reading_keys
from wire.tracing.request_trace import TRACEPARENT, only
from wire.tracing.timeline import Edge, EdgeStamp

_JSON = "application/json"
_OPERATORS_PATHS = frozenset({METRICS_PATH, TRACES_PATH})

_C = TypeVar("_C", OpenAICall, ApiCall)
_R = TypeVar("_R", ReplyShape, ResponseReply, MessageReply)


def make_app(config: RouterConfig, validator: RequestValidator, dispatcher: Dispatcher) -> ASGIApp:
    """Return the whole application, with the check of API keys."""
    app = FastAPI(title="Tandem", docs_url=None, redoc_url=None, openapi_url=None)
    exposition = Exposition(dispatcher.metrics.registry)
    listener = _HttpListener(config, validator, dispatcher, metrics_page(exposition), IgnoredLog())
    app.add_api_route("/v1/chat/completions", listener.chat, methods=["POST"])
    app.add_api_route("/v1/completions", listener.completions, methods=["POST"])
    app.add_api_route("/v1/responses", listener.responses, methods=["POST"])
    app.add_api_route(MESSAGES_PATH, listener.messages, methods=["POST"])
    app.add_api_route(f"{MESSAGES_PATH}/count_tokens", listener.count_tokens, methods=["POST"])
    add_models(app, config, dispatcher)
    add_tokenizer(app, config, validator)
    add_probes(app, dispatcher)
    app.add_api_route(METRICS_PATH, listener.metrics, methods=["GET", "HEAD"])
    app.add_api_route(TRACES_PATH, listener.traces, methods=["GET", "HEAD"])
    add_error_handlers(app)
    metrics_keys = reading_keys(config.metrics_key, config.api_keys, config.token, loopback=is_loopback(config.host))
    counted = CallLimit(app, config.listeners.max_calls, apart=PROBE_PATHS | _OPERATORS_PATHS)
    checked: ASGIApp = _KeyCheck(counted, frozenset(config.api_keys), metrics_keys)
    return _open_to_pages(RequestIds(checked), config.allowed_origins)


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
        expose_headers=[IGNORED_HEADER, REQUEST_ID_HEADER, "retry-after"],
    )


@dataclass(frozen=True, slots=True)
class _HttpListener:
    config: RouterConfig
    validator: RequestValidator
    dispatcher: Dispatcher
    metrics_page: Page
    ignored: IgnoredLog

    async def chat(self, request: Request) -> Response:
        """Serve POST /v1/chat/completions."""
        return await self._answer(request, parse_chat, partial(_openai_reply, chat=True), _collect)

    async def completions(self, request: Request) -> Response:
        """Serve POST /v1/completions."""
        return await self._answer(request, parse_completion, partial(_openai_reply, chat=False), _collect)

    async def responses(self, request: Request) -> Response:
        """Serve POST /v1/responses."""
        return await self._answer(request, parse_response, ResponseReply, collected)

    async def messages(self, request: Request) -> Response:
        """Serve POST /v1/messages."""
        return await self._answer(request, parse_message, MessageReply, collected)

    async def count_tokens(self, request: Request) -> Response:
        """Serve POST /v1/messages/count_tokens."""
        parse = partial(parse_count, received=EdgeStamp.now(Edge.RECEIVED), strict=self.config.strict_requests)
        body = await self._body(request)
        gone = asyncio.create_task(disconnected(request.receive))
        try:
            call, count = await unless_gone(self._counted(request, body, parse), gone)
        finally:
            gone.cancel()
        self.ignored.note(call.ignored)
        return JSONResponse({"input_tokens": count}, headers=_ignored_header(call.ignored))

    async def metrics(self, request: Request) -> Response:
        """Serve GET /metrics."""
        body, content_type = await self.metrics_page(request.headers.get("accept", ""))
        return Response(body, media_type=content_type)

    async def traces(self, request: Request) -> Response:
        """Serve GET /traces: `?id=` for one request or trace, `?slow` for the slowest; else the newest."""
        store, asked = self.dispatcher.metrics.traces, request.query_params
        found = store.find(asked["id"]) if "id" in asked else store.slow() if "slow" in asked else store.newest()
        return Response(traces_to_json(found, store.kept), media_type=_JSON)

    async def _answer(
        self,
        request: Request,
        parse: Callable[..., _C],
        reply_to: Callable[[_C, Admitted, ReplyFacts], _R],
        collect: Callable[[Choices, _R], Awaitable[bytes]],
    ) -> Response:
        received = EdgeStamp.now(Edge.RECEIVED)
        reading = partial(parse, received=received, strict=self.config.strict_requests)
        body = await self._body(request)
        gone = asyncio.create_task(disconnected(request.receive))
        try:
            call, admitted = await unless_gone(
                self._admitted(request, body, reading),
                gone,
            )
            choices = self.dispatcher.submit(admitted)
        except BaseException:
            gone.cancel()
            raise
        gone.add_done_callback(lambda _: choices.close())
        self.ignored.note(call.ignored)
        facts = ReplyFacts(choices.request_id, self.config.model_name, received.unix_nanos // 10**9)
        reply = reply_to(call, admitted, facts)
        headers = {REQUEST_ID_HEADER: reply.answer_id, **_ignored_header(call.ignored)}
        if call.stream:
            return AnswerStream(choices, reply, gone, headers=headers, comment_s=self.config.sse_comment_s)
        try:
            return Response(await collect(choices, reply), headers=headers, media_type=_JSON)
        finally:
            gone.cancel()
            choices.close()

    async def _body(self, request: Request) -> bytes:
        try:
            return await read_body(request, self.config.listeners.max_request_bytes)
        except InvalidArgument as error:
            self.dispatcher.metrics.refused("", error)
            raise

    async def _admitted(self, request: Request, body: bytes, parse: Callable[[bytes], _C]) -> tuple[_C, Admitted]:
        call = await self._parsed(request, body, parse)
        traceparent = only(request.headers.getlist(TRACEPARENT))
        with _clients_names(call):
            return call, await self.validator.admit(
                replace(call.request, tenant=self._tenant(request), traceparent=traceparent)
            )

    async def _counted(self, request: Request, body: bytes, parse: Callable[[bytes], ApiCall]) -> tuple[ApiCall, int]:
        call = await self._parsed(request, body, parse)
        asked = replace(call.request, tenant=self._tenant(request))
        with _clients_names(call):
            ids, _, _ = await self.validator.tokenize(asked, add_special_tokens=False, spell=False)
        return call, len(ids)

    async def _parsed(self, request: Request, body: bytes, parse: Callable[[bytes], _C]) -> _C:
        try:
            return await self.validator.reader.json(self._tenant(request), body, parse)
        except TandemError as error:
            self.dispatcher.metrics.refused("", error)
            raise

    def _tenant(self, request: Request) -> str:
        return tenant_of(matching_key(authorizations(request.scope), self.config.api_keys))


@contextmanager
def _clients_names(call: OpenAICall | ApiCall) -> Iterator[None]:
    """Raise errors about a field with the client's name of it."""
    try:
        yield
    except InvalidArgument as error:
        raise (call.names.error(error) if isinstance(call, ApiCall) else error) from None


def _openai_reply(call: OpenAICall, admitted: Admitted, facts: ReplyFacts, *, chat: bool) -> ReplyShape:
    return ReplyShape(
        chat=chat,
        request_id=facts.request_id,
        model=facts.model,
        created=facts.created,
        stream_options=call.stream_options,
        prompt_tokens=len(admitted.prompt_token_ids),
        syntax=admitted.syntax,
        logprobs=call.request.options.alternatives is not None,
    )


def _ignored_header(names: Sequence[str]) -> dict[str, str]:
    return {IGNORED_HEADER: ", ".join(names)} if names else {}


async def _collect(choices: Choices, shape: ReplyShape) -> bytes:
    texts: dict[int, list[str]] = defaultdict(list)
    scores: dict[int, list[TokenScore]] = defaultdict(list)
    endings: dict[int, Ending] = {}
    while not choices.over:
        index, event = await choices.next()
        if isinstance(event, Ending):
            endings[index] = event
        else:
            texts[index].append(event.text)
            scores[index].extend(event.scores)
    return shape.whole(
        [CompleteAnswer("".join(texts[index]), scores[index], endings[index]) for index in sorted(endings)]
    )


class _KeyCheck:
    """ASGI middleware that requires a key on every route but the probes; metrics have keys of their own.

    An empty set of keys means that no key is required.
    """

    def __init__(self, app: ASGIApp, keys: frozenset[str], metrics_keys: frozenset[str]) -> None:
        self._app = app
        self._keys = keys
        self._metrics_keys = metrics_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PROBE_PATHS:
            refusal = self._refusal(scope)
            if refusal is not None:
                await error_response(scope["path"], refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> TandemError | None:
        operators = scope["path"] in _OPERATORS_PATHS
        keys = self._metrics_keys if operators else self._keys
        try:
            if not keys or matching_key(authorizations(scope), keys) is not None:
                return None
        except InvalidArgument as error:
            return error
        key = "metrics key" if operators else "API key"
        return Unauthenticated(f"the request carries no valid {key}; send 'Authorization: Bearer <key>'")
