"""The HTTP listener: OpenAI's and Anthropic's APIs, metrics, traces and probes."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fastapi import FastAPI, Request, Response
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from router.access.audit_log import AuditLog
from router.access.callers import Callers
from router.access.client_call import served_call
from router.access.quota import QUOTA_HEADERS
from router.api.access.http_access import READERS_PATHS, AuditedHttp, HttpAccess
from router.api.answer_stream import AnswerStream
from router.api.call_limit import CallLimit
from router.api.client_gone import unless_gone
from router.api.completions.answers import CompleteAnswer, best_of
from router.api.completions.prompt_replies import PromptReplies
from router.api.http_body import disconnected, read_body
from router.api.messages.error_responses import add_error_handlers
from router.api.model_routes import add_models
from router.api.openai.requests import ChatCompletionRequest, CompletionRequest
from router.api.openai_fields import IGNORED_HEADER, IgnoredLog
from router.api.openai_replies import ReplyShape
from router.api.openai_requests import OpenAICall, parse_chat, parse_completion
from router.api.openapi.json_body import json_body
from router.api.openapi.routes import add_pages
from router.api.probes import PROBE_PATHS, add_probes
from router.api.request_id import REQUEST_ID_HEADER, RequestIds
from router.api.routes.item_routes import add_item_apis
from router.api.tokenizer_routes import add_tokenizer
from router.config import RouterConfig
from router.requests.answer import Ending
from router.requests.choices import Choices
from router.requests.dispatch import Dispatcher
from router.requests.request import Admitted
from router.requests.validation import RequestValidator
from router.text.token_scores import TokenScore
from telemetry.exposition import Exposition
from telemetry.metrics_server import METRICS_PATH, TRACES_PATH, Page, metrics_page
from wire.convert import traces_to_json
from wire.errors import InvalidArgument, TandemError
from wire.tracing.request_trace import TRACEPARENT, only
from wire.tracing.timeline import Edge, EdgeStamp

_JSON = "application/json"

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
    listener = _HttpListener(config, validator, dispatcher, metrics_page(exposition), IgnoredLog())
    for path, answer, body in (
        ("/v1/chat/completions", listener.chat, ChatCompletionRequest),
        ("/v1/completions", listener.completions, CompletionRequest),
    ):
        app.add_api_route(path, answer, methods=["POST"], openapi_extra=json_body(body))
    add_item_apis(app, config, validator, dispatcher, listener.ignored)
    add_models(app, config, dispatcher)
    add_tokenizer(app, config, validator)
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
    config: RouterConfig
    validator: RequestValidator
    dispatcher: Dispatcher
    metrics_page: Page
    ignored: IgnoredLog

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
        store, asked = self.dispatcher.metrics.traces, request.query_params
        found = store.find(asked["id"]) if "id" in asked else store.slow() if "slow" in asked else store.newest()
        return Response(traces_to_json(found, store.kept), media_type=_JSON)

    async def _answer(self, request: Request, parse: Parser, *, chat: bool) -> Response:
        received = EdgeStamp.now(Edge.RECEIVED)
        reading = partial(parse, received=received, strict=self.config.strict_requests)
        body = await self._body(request)
        gone = asyncio.create_task(disconnected(request.receive))
        try:
            call, admitted = await unless_gone(
                self._admitted(request, body, reading),
                gone,
            )
            choices = self.dispatcher.submit(*admitted)
        except BaseException:
            gone.cancel()
            raise
        gone.add_done_callback(lambda _: choices.close())
        self.ignored.note(call.ignored)
        shape = ReplyShape(
            chat=chat,
            request_id=choices.request_id,
            model=admitted[0].model_name(self.config.model_name),
            created=received.unix_nanos // 10**9,
            stream_options=call.stream_options,
            prompts=[each.prompt_token_ids for each in admitted],
            choices=call.request.options.n or 1,
            syntax=admitted[0].syntax,
            logprobs=call.request.options.alternatives is not None,
            return_token_ids=call.return_token_ids,
            prompts_only=call.prompts.only,
        )
        prompts = PromptReplies(call.prompts, self.validator, call.requests, admitted, choices)
        headers = {REQUEST_ID_HEADER: shape.answer_id}
        if call.ignored:
            headers[IGNORED_HEADER] = ", ".join(call.ignored)
        if call.stream:
            comment_s = self.config.sse_comment_s
            return AnswerStream(choices, shape, gone, headers=headers, comment_s=comment_s, prompts=prompts)
        try:
            answers = await _collect(choices, shape, prompts)
            ends = [each.ending for each in answers]
            answers = best_of(answers, call.request.options.n or 1, admitted[0].n)
            # The scores of a prompt may be megabytes of text, which would hold up the event loop.
            whole = partial(shape.whole, answers, ends)
            body = await asyncio.to_thread(whole) if call.prompts.needed else whole()
            return Response(body, headers=headers, media_type=_JSON)
        finally:
            gone.cancel()
            choices.close()

    async def _body(self, request: Request) -> bytes:
        try:
            return await read_body(request, self.config.listeners.max_request_bytes)
        except InvalidArgument as error:
            self.dispatcher.metrics.refused("", error)
            raise

    async def _admitted(
        self, request: Request, body: bytes, parse: Callable[[bytes], OpenAICall]
    ) -> tuple[OpenAICall, list[Admitted]]:
        tenant = served_call().caller.tenant
        try:
            call = await self.validator.reader.json(tenant, body, parse)
        except TandemError as error:
            self.dispatcher.metrics.refused("", error)
            raise
        traceparent, request_id = only(request.headers.getlist(TRACEPARENT)), call.request.request_id
        admitted: list[Admitted] = []
        for each in call.requests:
            prompt = replace(each, request_id=request_id, tenant=tenant, traceparent=traceparent)
            admitted.append(await self.validator.admit(prompt, like=admitted[0] if admitted else None))
            request_id = admitted[0].request_id
        return call, admitted


async def _collect(choices: Choices, shape: ReplyShape, prompts: PromptReplies) -> list[CompleteAnswer]:
    texts: dict[int, list[str]] = defaultdict(list)
    ids: dict[int, list[int]] = defaultdict(list)
    scores: dict[int, list[TokenScore]] = defaultdict(list)
    endings: dict[int, Ending] = {}
    while not choices.over:
        index, event = await choices.next()
        event = shape.event(event)
        if isinstance(event, Ending):
            endings[index] = event
        else:
            texts[index].append(event.text)
            ids[index].extend(event.token_ids)
            scores[index].extend(event.scores)
    return [
        CompleteAnswer("".join(texts[index]), ids[index], scores[index], endings[index], await prompts.of(index))
        for index in sorted(endings)
    ]
