"""The HTTP routes of the Responses and the Messages API, whose answers consist of items or blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from starlette.responses import JSONResponse

from router.access.client_call import served_call
from router.api.answer_stream import AnswerStream
from router.api.bodies.api_call import ApiCall
from router.api.client_gone import unless_gone
from router.api.http_body import disconnected, read_body
from router.api.messages.api_key import MESSAGES_PATH
from router.api.messages.body import CountTokensRequest, MessagesRequest
from router.api.messages.reply import MessageReply
from router.api.messages.request import parse_count, parse_message
from router.api.openai_fields import IGNORED_HEADER, IgnoredLog
from router.api.openapi.json_body import json_body
from router.api.replies.reply import NamedEventsReply, ReplyFacts, collected
from router.api.request_id import REQUEST_ID_HEADER
from router.api.responses.body import ResponsesRequest
from router.api.responses.reply import ResponseReply
from router.api.responses.request import parse_response
from router.config import RouterConfig
from router.requests.dispatch import Dispatcher
from router.requests.request import Admitted, ClientRequest
from router.requests.validation import RequestValidator
from wire.errors import InvalidArgument, TandemError
from wire.tracing.request_trace import TRACEPARENT, only
from wire.tracing.timeline import Edge, EdgeStamp

_T = TypeVar("_T")


def add_item_apis(
    app: FastAPI, config: RouterConfig, validator: RequestValidator, dispatcher: Dispatcher, ignored: IgnoredLog
) -> None:
    """Add the three routes to `app`; their requests share everything with chat completions but the form."""
    routes = _ItemRoutes(config, validator, dispatcher, ignored)
    for path, answer, body in (
        ("/v1/responses", routes.responses, ResponsesRequest),
        (MESSAGES_PATH, routes.messages, MessagesRequest),
        (f"{MESSAGES_PATH}/count_tokens", routes.count_tokens, CountTokensRequest),
    ):
        app.add_api_route(path, answer, methods=["POST"], openapi_extra=json_body(body))


@dataclass(frozen=True, slots=True)
class _ItemRoutes:
    config: RouterConfig
    validator: RequestValidator
    dispatcher: Dispatcher
    ignored: IgnoredLog

    async def responses(self, request: Request) -> Response:
        """Serve POST /v1/responses."""
        return await self._answer(request, parse_response, ResponseReply)

    async def messages(self, request: Request) -> Response:
        """Serve POST /v1/messages."""
        return await self._answer(request, parse_message, MessageReply)

    async def count_tokens(self, request: Request) -> Response:
        """Serve POST /v1/messages/count_tokens."""
        received = EdgeStamp.now(Edge.RECEIVED)
        body = await self._body(request)
        gone = asyncio.create_task(disconnected(request.receive))
        try:
            call, count = await unless_gone(self._read(request, body, parse_count, received, self._count), gone)
        finally:
            gone.cancel()
        return JSONResponse({"input_tokens": count}, headers=self._ignored(call))

    async def _answer(
        self,
        request: Request,
        parse: Callable[..., ApiCall],
        reply_to: Callable[[ApiCall, Admitted, ReplyFacts], NamedEventsReply],
    ) -> Response:
        received = EdgeStamp.now(Edge.RECEIVED)
        body = await self._body(request)
        gone = asyncio.create_task(disconnected(request.receive))
        try:
            reading = self._read(request, body, parse, received, self.validator.admit)
            call, admitted = await unless_gone(reading, gone)
            choices = self.dispatcher.submit(admitted)
        except BaseException:
            gone.cancel()
            raise
        gone.add_done_callback(lambda _: choices.close())
        model = admitted.model_name(self.config.model_name)
        facts = ReplyFacts(choices.request_id, model, received.unix_nanos // 10**9)
        reply = reply_to(call, admitted, facts)
        headers = {REQUEST_ID_HEADER: reply.answer_id, **self._ignored(call)}
        if call.stream:
            return AnswerStream(choices, reply, gone, headers=headers, comment_s=self.config.sse_comment_s)
        try:
            return Response(await collected(choices, reply), headers=headers, media_type="application/json")
        finally:
            gone.cancel()
            choices.close()

    async def _body(self, request: Request) -> bytes:
        with self._counting_refusals():
            return await read_body(request, self.config.listeners.max_request_bytes)

    async def _read(
        self,
        request: Request,
        body: bytes,
        parse: Callable[..., ApiCall],
        received: EdgeStamp,
        use: Callable[[ClientRequest], Coroutine[Any, Any, _T]],
    ) -> tuple[ApiCall, _T]:
        """Parse a body and return what `use` returns for its request; errors name the client's fields."""
        tenant = served_call().caller.tenant
        parsing = partial(parse, received=received, strict=self.config.strict_requests)
        with self._counting_refusals():
            call = await self.validator.reader.json(tenant, body, parsing)
        traceparent = only(request.headers.getlist(TRACEPARENT))
        try:
            return call, await use(replace(call.request, tenant=tenant, traceparent=traceparent))
        except InvalidArgument as error:
            raise call.names.error(error) from error

    async def _count(self, request: ClientRequest) -> int:
        ids, _, _ = await self.validator.tokenize(request, spell=False)
        return len(ids)

    def _ignored(self, call: ApiCall) -> dict[str, str]:
        """Log the ignored fields, and return the header that names them."""
        self.ignored.note(call.ignored)
        return {IGNORED_HEADER: ", ".join(call.ignored)} if call.ignored else {}

    @contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except TandemError as error:
            self.dispatcher.metrics.refused("", error)
            raise
