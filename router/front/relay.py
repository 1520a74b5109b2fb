"""Relays calls from a front process to the router, and the responses back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.api.anthropic.errors import error_content
from router.api.openai.errors import error_headers
from router.front.headers import packed, unpacked
from router.front.link import Call, RouterLink
from router.front.window import PART_BYTES_MAX
from tandem.protocol.errors import Cancelled, TandemError, Unavailable
from tandem.protocol.generated.tandem.v1 import front_pb2

_STATUS = {code.value[0]: code for code in grpc.StatusCode}


class GrpcRelay(grpc.GenericRpcHandler):
    """Relays every method of one service as bytes; a unary response is a stream of one message."""

    def __init__(self, link: RouterLink, service: str) -> None:
        self._link = link
        self._prefix = f"/{service}/"

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the handler of a method of the service, None for other methods."""
        path = handler_call_details.method
        if not path.startswith(self._prefix):
            return None
        method = path.removeprefix(self._prefix)

        def relay(message: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
            return self._relay(method, message, context)

        return grpc.unary_stream_rpc_method_handler(relay)

    async def _relay(
        self, method: str, message: bytes, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[bytes]:
        call = self._link.call()
        # A cancelled call may leave this generator suspended until it is collected; the callback runs at once.
        context.add_done_callback(lambda _: call.close())  # type: ignore[arg-type]  # the stubs name a class, not a protocol
        metadata = packed(context.invocation_metadata() or ())
        try:
            with self._link.holding(len(message)):
                await _send(call, method, metadata, message, context.peer())
            while not (frame := await call.next()).HasField("end"):
                yield frame.message
            if frame.end.status:
                trailing = tuple(
                    (name.decode(), value.decode()) for name, value in unpacked(frame.end.trailing_metadata)
                )
                context.set_trailing_metadata(trailing)
                await context.abort(_STATUS[frame.end.status], frame.end.details)
        finally:
            call.close()


class HttpRelay:
    """An ASGI application that relays requests to the router."""

    def __init__(self, link: RouterLink) -> None:
        self._link = link

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Relay one request."""
        begun = False
        call: Call | None = None
        feeding: asyncio.Task[None] | None = None
        try:
            call = self._link.call()
            await call.begin(http=_request(scope))
            feeding = asyncio.create_task(_feed(call, receive))
            while True:
                frame = await call.next()
                if frame.HasField("response"):
                    begun = True
                    headers = unpacked(frame.response.headers)
                    await send({"type": "http.response.start", "status": frame.response.status, "headers": headers})
                elif frame.HasField("body"):
                    await send({"type": "http.response.body", "body": frame.body.data, "more_body": frame.body.more})
                    if not frame.body.more:
                        return
                else:
                    raise Unavailable(frame.end.details)
        except Cancelled:
            return
        except TandemError as error:
            if begun:
                return  # the server cuts the connection, so that the client sees an incomplete response
            await _refusal(scope["path"], error)(scope, receive, send)
        finally:
            if feeding is not None:
                feeding.cancel()
            if call is not None:
                call.close()


async def _send(call: Call, method: str, metadata: list[front_pb2.Header], message: bytes, peer: str) -> None:
    """Send a gRPC call, its message in parts."""
    first = message[:PART_BYTES_MAX]
    more = len(message) > len(first)
    await call.begin(grpc=front_pb2.GrpcCall(method=method, metadata=metadata, message=first, more=more, peer=peer))
    if more:
        await call.send_body(message[len(first) :], more=False)


async def _feed(call: Call, receive: Receive) -> None:
    """Send the request's body at the speed at which the handler reads it; close the call when the client leaves."""
    while (message := await receive())["type"] == "http.request":
        await call.send_body(message.get("body", b""), more=message.get("more_body", False))
    call.close()


def _request(scope: Scope) -> front_pb2.HttpRequest:
    return front_pb2.HttpRequest(
        method=scope["method"],
        path=scope["path"],
        raw_path=scope["raw_path"],
        query_string=scope["query_string"],
        http_version=scope["http_version"],
        scheme=scope["scheme"],
        headers=packed(scope["headers"]),
        client=(scope["client"] or ("",))[0],
    )


def _refusal(path: str, error: TandemError) -> Response:
    return Response(error_content(path, error), error.http_status, error_headers(error), "application/json")
