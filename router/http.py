"""The HTTP door: OpenAI's chat completions, completions and models, metrics and probes. FastAPI routes, one answer a
call.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from http import HTTPStatus

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from router.admission import Admission, check_size
from router.answer import Ending
from router.choices import Choices
from router.config import RouterConfig
from router.dispatch import Dispatcher
from router.openai_replies import ReplyShape, Whole, error_body, error_event, error_headers, json_error, model_card
from router.openai_requests import OpenAICall, parse_chat, parse_completion
from router.tenants import tenant_of
from router.token_scores import TokenScore
from telemetry.door import METRICS_PATH, TRACES_PATH, Page, metrics_page
from telemetry.exposition import Exposition
from wire.address import is_loopback
from wire.convert import traces_to_json
from wire.credentials import reading_keys, shows_key
from wire.errors import Cancelled, InvalidArgument, NotFound, TandemError, Unauthenticated
from wire.request_trace import TRACEPARENT
from wire.timeline import Edge, EdgeStamp

_JSON = "application/json"
_DRAIN_BYTES = 64 << 20
"""A body over the limit is read this far, so that the client sees the answer instead of a broken pipe."""
_OPEN_PATHS = frozenset({"/health", "/ready"})
_OPERATORS_PATHS = frozenset({METRICS_PATH, TRACES_PATH})

Parser = Callable[[bytes, EdgeStamp], OpenAICall]


def make_app(config: RouterConfig, admission: Admission, dispatcher: Dispatcher) -> ASGIApp:
    """The whole door, keys included."""
    app = FastAPI(title="Tandem", docs_url=None, redoc_url=None, openapi_url=None)
    exposition = Exposition(dispatcher.metrics.board)
    door = _Door(config, admission, dispatcher, int(time.time()), metrics_page(exposition))
    app.add_api_route("/v1/chat/completions", door.chat, methods=["POST"])
    app.add_api_route("/v1/completions", door.completions, methods=["POST"])
    app.add_api_route("/v1/models", door.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", door.model, methods=["GET"])
    app.add_api_route("/health", door.health, methods=["GET"])
    app.add_api_route("/ready", door.ready, methods=["GET"])
    app.add_api_route(METRICS_PATH, door.metrics, methods=["GET"])
    app.add_api_route(TRACES_PATH, door.traces, methods=["GET"])
    app.add_exception_handler(TandemError, _on_tandem_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_defect)
    metrics_keys = reading_keys(config.metrics_key, config.api_keys, config.token, loopback=is_loopback(config.host))
    return _KeyCheck(app, frozenset(config.api_keys), metrics_keys)


@dataclass(frozen=True, slots=True)
class _Door:
    config: RouterConfig
    admission: Admission
    dispatcher: Dispatcher
    started: int
    metrics_page: Page

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, parse_chat, chat=True)

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, parse_completion, chat=False)

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, name: str) -> Response:
        if name != self.config.model_name:
            raise NotFound(f"model: {name!r} is not served here; this router serves {self.config.model_name!r}")
        return JSONResponse(self._card())

    async def health(self) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self) -> Response:
        ready = self.dispatcher.pool.ready
        return JSONResponse({"status": "ready" if ready else "not ready"}, status_code=200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        body, content_type = await self.metrics_page(request.headers.get("accept", ""))
        return Response(body, media_type=content_type)

    async def traces(self, request: Request) -> Response:
        """`?id=` of a request or a trace, `?slow`; else the newest."""
        book, asked = self.dispatcher.metrics.traces, request.query_params
        found = book.find(asked["id"]) if "id" in asked else book.slow() if "slow" in asked else book.newest()
        return Response(traces_to_json(found, book.kept), media_type=_JSON)

    def _card(self) -> dict[str, object]:
        served = self.dispatcher.pool.model
        return model_card(self.config.model_name, self.started, served.facts.max_context if served else None)

    async def _answer(self, request: Request, parse: Parser, *, chat: bool) -> Response:
        received = EdgeStamp.now(Edge.RECEIVED)
        try:
            call = parse(await _read_body(request, self.config.max_request_bytes), received)
        except InvalidArgument as error:
            self.dispatcher.metrics.refused("", error)
            raise
        tenant = tenant_of(request.headers.get("authorization", ""), self.config.api_keys)
        ask = replace(call.ask, tenant=tenant, traceparent=request.headers.get(TRACEPARENT, ""))
        choices = self.dispatcher.submit(await self.admission.admit(ask))
        shape = ReplyShape(
            chat=chat,
            request_id=choices.request_id,
            model=self.config.model_name,
            created=received.unix_nanos // 10**9,
            include_usage=call.include_usage,
            logprobs=call.ask.options.alternatives is not None,
        )
        watch = asyncio.create_task(_close_on_disconnect(request.receive, choices))
        stream: _AnswerStream | None = None
        try:
            if not call.stream:
                return Response(await _collect(choices, shape), media_type=_JSON)
            beginning = _AnswerStream(choices, shape, watch)
            await beginning.begin()
            stream = beginning
            return stream
        finally:
            if stream is None:  # a stream that began lets go itself, at its end
                _let_go(choices, watch)


async def _read_body(request: Request, limit: int) -> bytes:
    """The whole body; `InvalidArgument` if it is over `limit` bytes, `Cancelled` if the client leaves."""
    parts: list[bytes] = []
    size, more = 0, True
    while more and size <= _DRAIN_BYTES:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client left while it sent the request")
        part = message.get("body", b"")
        size += len(part)
        if size <= limit:
            parts.append(part)
        more = message.get("more_body", False)
    check_size(size, limit)
    return b"".join(parts)


async def _close_on_disconnect(receive: Receive, choices: Choices) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    choices.close()


def _let_go(choices: Choices, watch: asyncio.Task[None]) -> None:
    watch.cancel()
    choices.close()


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
    return shape.whole([Whole("".join(texts[index]), scores[index], endings[index]) for index in sorted(endings)])


class _AnswerStream(Response):
    """Server-sent events. Headers go out with the first event, so a request that fails before has its own status."""

    def __init__(self, choices: Choices, shape: ReplyShape, watch: asyncio.Task[None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._choices = choices
        self._shape = shape
        self._watch = watch
        self._first = b""
        self._endings: dict[int, Ending] = {}
        self._over = False

    async def begin(self) -> None:
        """Wait for the first event; raises the request's error."""
        self._first = self._shape.opening(len(self._choices)) + await self._next()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            while not self._over:
                data = await self._next_or_error()
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            _let_go(self._choices, self._watch)

    async def _next(self) -> bytes:
        index, event = await self._choices.next()
        if not isinstance(event, Ending):
            return self._shape.piece(index, event.text, event.scores)
        self._endings[index] = event
        last = self._shape.ending(index, event)
        self._over = self._choices.over
        return last + self._shape.closing(self._endings) if self._over else last

    async def _next_or_error(self) -> bytes:
        try:
            return await self._next()
        except TandemError as error:
            self._over = True
            return error_event(error)


class _KeyCheck:
    """Lets only callers with a key through, to every route but the probes; metrics have keys of their own. Where there
    are no keys, nobody is asked.
    """

    def __init__(self, app: ASGIApp, keys: frozenset[str], metrics_keys: frozenset[str]) -> None:
        self._app = app
        self._keys = keys
        self._metrics_keys = metrics_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS and not self._may_pass(scope):
            key = "metrics key" if scope["path"] in _OPERATORS_PATHS else "API key"
            refusal = Unauthenticated(f"the request carries no valid {key}; send 'Authorization: Bearer <key>'")
            await _respond(refusal)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        keys = self._metrics_keys if scope["path"] in _OPERATORS_PATHS else self._keys
        return not keys or shows_key(dict(scope["headers"]).get(b"authorization", b""), keys)


def _respond(error: TandemError) -> Response:
    return Response(error_body(error), error.http_status, error_headers(error), _JSON)


async def _on_tandem_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, TandemError)
    return _respond(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {HTTPStatus(error.status_code).phrase.lower()}"
    code = HTTPStatus(error.status_code).name.lower()
    return Response(json_error(error.status_code, message, code=code), error.status_code, error.headers, _JSON)


async def _on_defect(_request: Request, error: Exception) -> Response:
    message = f"unexpected {type(error).__name__}; the server's log has the details"
    return Response(json_error(500, message, code="internal"), 500, media_type=_JSON)
