"""The part that all HTTP APIs share: reads a call's body, submits its requests and returns the response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request, Response
from starlette.types import Receive

from router.access.client_call import served_call
from router.api.answer_stream import AnswerStream
from router.api.body import Body
from router.api.cache_hints import SESSION_HEADER
from router.api.call import ApiCall
from router.api.client_gone import unless_gone
from router.api.openapi import json_body
from router.api.prompt_replies import PromptReplies
from router.api.reply import Reply, ReplyFacts
from router.api.request_id import REQUEST_ID_HEADER
from router.api.route_groups import Group
from router.api.unserved_fields import IGNORED_HEADER, IgnoredLog
from router.config import RouterConfig
from router.requests.dispatch import Dispatcher
from router.requests.request import Admitted, ClientRequest
from router.requests.validation import RequestValidator
from router.text.request_reader import check_size
from tandem.protocol.errors import Cancelled, InvalidArgument, TandemError
from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent
from tandem.protocol.lifecycle.request_trace import TRACEPARENT, only

_DRAIN_BYTES = 64 << 20
"""Maximum size of a rejected body that is still read, in bytes; without reading, the client gets a broken pipe."""
_T = TypeVar("_T")
_R = TypeVar("_R")
_T_co = TypeVar("_T_co", covariant=True)
_C = TypeVar("_C", bound=ApiCall)


class Parse(Protocol[_T_co]):
    """A function that parses the body of one API."""

    def __call__(self, data: bytes, received: EventTime, /, *, strict: bool) -> _T_co:
        """Return the parsed call. Raises InvalidArgument for a wrong field, and with `strict` for an unknown one."""


@dataclass(frozen=True, slots=True)
class HttpCalls:
    """Reads the bodies of calls, submits their requests and returns the responses.

    The HTTP application owns it; all calls are on the event loop.
    """

    config: RouterConfig
    validator: RequestValidator
    dispatcher: Dispatcher
    ignored: IgnoredLog

    def add_api(
        self,
        app: FastAPI,
        path: str,
        body: type[Body],
        parse: Parse[_C],
        reply_to: Callable[[_C, Sequence[Admitted], ReplyFacts], Reply],
        *,
        summary: str,
        group: Group = Group.OPENAI,
    ) -> None:
        """Add the route of an API that generates answers.

        `body` is the pydantic model of the API's request body for the OpenAPI page, `parse` parses a body,
        `reply_to` makes the reply, and `summary` says what the route does.
        """

        async def answer(request: Request) -> Response:
            return await self._answer(request, parse, reply_to)

        app.add_api_route(
            path,
            answer,
            methods=["POST"],
            name=path.removeprefix("/v1/"),
            summary=summary,
            openapi_extra=json_body(body),
            tags=[group],
        )

    async def read(self, request: Request, parse: Parse[_T]) -> _T:
        """Read and parse the body of a request, and count a rejected body in the metrics."""
        received = EventTime.now(LifecycleEvent.RECEIVED)
        return await self._parsed(await self._data(request), parse, received)

    async def served(
        self, request: Request, parse: Parse[_T], use: Callable[[_T], Coroutine[Any, Any, _R]]
    ) -> tuple[_T, _R]:
        """Read and parse the body of a request, call `use` with the parsed body, and return both results.

        The work is cancelled if the client disconnects.
        """
        received = EventTime.now(LifecycleEvent.RECEIVED)
        data = await self._data(request)
        gone = asyncio.create_task(disconnected(request.receive))
        try:
            return await unless_gone(self._used(data, parse, received, use), gone)
        finally:
            gone.cancel()

    def requests_of(self, request: Request, call: ApiCall) -> list[ClientRequest]:
        """Return the requests of a call, with the tenant, the traceparent and the session of its HTTP request."""
        tenant, traceparent = served_call().caller.tenant, only(request.headers.getlist(TRACEPARENT))
        session = request.headers.get(SESSION_HEADER, "")
        return [
            replace(
                one,
                tenant=tenant,
                traceparent=traceparent,
                options=replace(one.options, session=session or one.options.session),
            )
            for one in call.requests
        ]

    def ignored_header(self, call: ApiCall) -> dict[str, str]:
        """Log the ignored fields of a call, and return the response header that names them."""
        self.ignored.note(call.ignored)
        return {IGNORED_HEADER: ", ".join(call.ignored)} if call.ignored else {}

    async def _answer(
        self,
        request: Request,
        parse: Parse[_C],
        reply_to: Callable[[_C, Sequence[Admitted], ReplyFacts], Reply],
    ) -> Response:
        received = EventTime.now(LifecycleEvent.RECEIVED)
        data = await self._data(request)
        gone = asyncio.create_task(disconnected(request.receive))
        try:
            reading = self._used(data, parse, received, partial(self._admitted, request))
            call, admitted = await unless_gone(reading, gone)
            choices = self.dispatcher.submit(*admitted)
        except BaseException:
            gone.cancel()
            raise
        gone.add_done_callback(lambda _: choices.close())
        model = admitted[0].model_name(self.config.served.name)
        reply = reply_to(call, admitted, ReplyFacts(choices.request_id, model, received.unix_nanos // 10**9))
        prompts = PromptReplies(call.prompts, self.validator, call.requests, admitted, choices)
        headers = {REQUEST_ID_HEADER: reply.answer_id, **self.ignored_header(call)}
        if call.stream:
            return AnswerStream(choices, reply, prompts, gone, headers=headers, comment_s=self.config.sse_comment_s)
        try:
            return Response(await reply.whole(choices, prompts), headers=headers, media_type="application/json")
        finally:
            gone.cancel()
            choices.close()

    async def _admitted(self, request: Request, call: ApiCall) -> list[Admitted]:
        try:
            return await self.validator.admit_all(self.requests_of(request, call))
        except InvalidArgument as error:
            raise call.names.error(error) from None

    async def _data(self, request: Request) -> bytes:
        try:
            return await read_data(request, self.config.listeners.max_request_bytes)
        except InvalidArgument as error:
            self.dispatcher.metrics.refused("", error)
            raise

    async def _parsed(self, data: bytes, parse: Parse[_T], received: EventTime) -> _T:
        """Parse a body (a large one in a tokenizer thread), and count a rejected body in the metrics."""
        tenant, strict = served_call().caller.tenant, self.config.strict_requests
        try:
            return await self.validator.reader.json(tenant, data, lambda data: parse(data, received, strict=strict))
        except TandemError as error:
            self.dispatcher.metrics.refused("", error)
            raise

    async def _used(
        self, data: bytes, parse: Parse[_T], received: EventTime, use: Callable[[_T], Coroutine[Any, Any, _R]]
    ) -> tuple[_T, _R]:
        call = await self._parsed(data, parse, received)
        return call, await use(call)


async def read_data(request: Request, limit: int) -> bytes:
    """Return the whole body of a request.

    Raises InvalidArgument if it exceeds `limit` bytes, and Cancelled if the client disconnects. A body over the limit
    is read but not stored, and a body whose content-length exceeds `_DRAIN_BYTES` is not read.
    """
    declared = int(request.headers.get("content-length", 0))
    if declared > _DRAIN_BYTES:
        check_size(declared, limit)
    parts: list[bytes] = []
    size, more = 0, True
    while more and size <= _DRAIN_BYTES:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client left while it sent the request")
        part = message.get("body", b"")
        size += len(part)
        if max(size, declared) <= limit:
            parts.append(part)
        else:
            parts.clear()
        more = message.get("more_body", False)
    check_size(size, limit)
    return b"".join(parts)


async def disconnected(receive: Receive) -> None:
    """Wait until the client disconnects; the request's body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
