"""The HTTP routes of the Responses and the Messages API, whose answers consist of items or blocks."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from starlette.responses import JSONResponse

from router.access.client_call import served_call
from router.api.anthropic.api_key import MESSAGES_PATH
from router.api.anthropic.body import CountTokensRequest, MessagesRequest
from router.api.anthropic.reply import MessageReply
from router.api.anthropic.request import parse_count, parse_message
from router.api.bodies.api_call import ApiCall
from router.api.openai.responses.body import ResponsesRequest
from router.api.openai.responses.reply import ResponseReply
from router.api.openai.responses.request import parse_response
from router.api.openapi.json_body import json_body
from router.api.replies.reply import NamedEventsReply, ReplyFacts, collected
from router.api.routes.posted_calls import PostedCalls
from router.requests.request import Admitted, ClientRequest
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.lifecycle.request_trace import TRACEPARENT, only
from tandem.protocol.lifecycle.timeline import Edge, EdgeStamp

_T = TypeVar("_T")


def add_item_apis(app: FastAPI, calls: PostedCalls) -> None:
    """Add the three routes to `app`; their requests share everything with chat completions but the form."""
    routes = _ItemRoutes(calls)
    for path, answer, body in (
        ("/v1/responses", routes.responses, ResponsesRequest),
        (MESSAGES_PATH, routes.messages, MessagesRequest),
        (f"{MESSAGES_PATH}/count_tokens", routes.count_tokens, CountTokensRequest),
    ):
        app.add_api_route(path, answer, methods=["POST"], openapi_extra=json_body(body))


@dataclass(frozen=True, slots=True)
class _ItemRoutes:
    calls: PostedCalls

    async def responses(self, request: Request) -> Response:
        """Serve POST /v1/responses."""
        return await self._answer(request, parse_response, ResponseReply)

    async def messages(self, request: Request) -> Response:
        """Serve POST /v1/messages."""
        return await self._answer(request, parse_message, MessageReply)

    async def count_tokens(self, request: Request) -> Response:
        """Serve POST /v1/messages/count_tokens."""
        received = EdgeStamp.now(Edge.RECEIVED)
        body = await self.calls.body(request)
        reading = self._read(request, body, parse=parse_count, received=received, use=self._count)
        call, count = await self.calls.unless_gone(request, reading)
        return JSONResponse({"input_tokens": count}, headers=self.calls.ignored_header(call))

    async def _answer(
        self,
        request: Request,
        parse: Callable[..., ApiCall],
        reply_to: Callable[[ApiCall, Admitted, ReplyFacts], NamedEventsReply],
    ) -> Response:
        received = EdgeStamp.now(Edge.RECEIVED)
        admit = partial(self._read, request, parse=parse, received=received, use=self._admitted)
        call, (admitted,), submitted = await self.calls.submitted(request, admit)
        model = admitted.model_name(self.calls.config.model_name)
        facts = ReplyFacts(submitted.choices.request_id, model, received.unix_nanos // 10**9)
        reply = reply_to(call, admitted, facts)
        return await self.calls.respond(call, submitted, reply, partial(collected, submitted.choices, reply))

    async def _read(
        self,
        request: Request,
        body: bytes,
        *,
        parse: Callable[..., ApiCall],
        received: EdgeStamp,
        use: Callable[[ClientRequest], Coroutine[Any, Any, _T]],
    ) -> tuple[ApiCall, _T]:
        """Parse a body and return what `use` returns for its request; errors name the client's fields."""
        call = await self.calls.parsed(body, parse, received)
        tenant, traceparent = served_call().caller.tenant, only(request.headers.getlist(TRACEPARENT))
        try:
            return call, await use(replace(call.request, tenant=tenant, traceparent=traceparent))
        except InvalidArgument as error:
            raise call.names.error(error) from error

    async def _admitted(self, request: ClientRequest) -> list[Admitted]:
        return [await self.calls.validator.admit(request)]

    async def _count(self, request: ClientRequest) -> int:
        ids, _, _ = await self.calls.validator.tokenize(request, spell=False)
        return len(ids)
