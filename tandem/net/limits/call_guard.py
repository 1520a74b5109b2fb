"""Limits the calls of a public gRPC server: a deadline for request messages, and a maximum of concurrent calls."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from tandem.net.limits.call_count import CallCount
from tandem.protocol.errors import DeadlineExceeded, InvalidArgument
from tandem.settings.listeners import ListenerLimits

_Context = grpc.aio.ServicerContext[Any, Any]
_Deserialize = Callable[[bytes], Any]

_PING_STRIKES_MAX = 100
"""Number of early pings between two messages from this server after which gRPC closes the connection.

gRPC's default of 2 breaks calls of slow clients. A client measures its bandwidth with a ping at most every 100 ms while
it reads; if it reads late what this server sent at once, several pings arrive without a message in between.
See https://grpc.github.io/grpc/core/md_doc_keepalive.html.
"""
_STREAMS_MAX = 1024
"""Maximum number of concurrent calls of one connection; gRPC clients queue further ones.

gRPC refuses streams above this number until it has freed those that the client has reset. Without the limit, a client
that opens and resets streams exhausts the memory: 100,000 resets took 300 MiB.
"""


class CallGuard:
    """Wraps gRPC handlers with a limit on concurrent calls and a deadline for the request message.

    Before it calls the handler of a unary call, gRPC waits for the message as long as the connection lives. Unary
    handlers are therefore registered as handlers of streams, and this class awaits the message with a deadline.
    """

    def __init__(self, limits: ListenerLimits) -> None:
        self._timeout_s = limits.body_timeout_s
        self._calls, self._open_calls = CallCount(limits.max_calls), CallCount(limits.max_calls)

    def wrap(self, handler: grpc.RpcMethodHandler[Any, Any], *, is_open: bool) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the handler with the limits applied; `is_open` = its method needs no API key.

        Calls without a key are counted separately, so that they take no capacity from authorized calls.
        """
        count = self._open_calls if is_open else self._calls
        serialize, deserialize = handler.response_serializer, handler.request_deserializer
        if handler.unary_unary is not None:
            answer = self._one(handler.unary_unary, deserialize, count)
            return grpc.stream_unary_rpc_method_handler(answer, None, serialize)
        if handler.unary_stream is not None:
            # A handler that is a coroutine writes its responses itself, as gRPC's own health service does.
            wrap = self._one if inspect.iscoroutinefunction(handler.unary_stream) else self._many
            answers = wrap(handler.unary_stream, deserialize, count)
            return grpc.stream_stream_rpc_method_handler(answers, None, serialize)
        if handler.stream_stream is not None and not inspect.iscoroutinefunction(handler.stream_stream):
            return grpc.stream_stream_rpc_method_handler(_counted(handler.stream_stream, count), deserialize, serialize)
        return handler

    def _one(self, handler: Any, deserialize: _Deserialize | None, count: CallCount) -> Any:
        async def guarded(_requests: Any, context: _Context) -> Any:
            _enter(count, context)
            return await handler(await self._message(context, deserialize), context)

        return guarded

    def _many(self, handler: Any, deserialize: _Deserialize | None, count: CallCount) -> Any:
        async def guarded(_requests: Any, context: _Context) -> AsyncIterator[Any]:
            _enter(count, context)
            async for answer in handler(await self._message(context, deserialize), context):
                yield answer

        return guarded

    async def _message(self, context: _Context, deserialize: _Deserialize | None) -> Any:
        reading = asyncio.ensure_future(context.read())
        # A read in gRPC's core cannot be cancelled; it ends with the call.
        await asyncio.wait((reading,), timeout=self._timeout_s)
        if not reading.done():
            reading.add_done_callback(_retrieve_exception)
            message = f"the call's message did not come within {self._timeout_s:g} s; send the call again"
            raise DeadlineExceeded(message)
        data = reading.result()
        if data is grpc.aio.EOF:
            raise InvalidArgument("request", "is missing; send one message")
        try:
            return data if deserialize is None else deserialize(data)
        except Exception:  # the library raises the bare class
            raise InvalidArgument("request", "is not what this method takes; encode it as the schema says") from None


def public_options(limits: ListenerLimits) -> list[tuple[str, int]]:
    """Return the gRPC server options that implement `limits` on a public port.

    See https://grpc.github.io/grpc/core/group__grpc__arg__keys.html.
    """
    return [
        ("grpc.max_receive_message_length", limits.max_request_bytes),
        ("grpc.max_allowed_incoming_connections", limits.connections),
        ("grpc.server_handshake_timeout_ms", _milliseconds(limits.header_timeout_s)),
        ("grpc.max_concurrent_streams", _STREAMS_MAX),
        # Above these numbers gRPC cancels new calls without a reason; `max_calls` refuses calls earlier, with a reason.
        ("grpc.server.max_pending_requests", 2 * limits.max_calls),
        ("grpc.server.max_pending_requests_hard_limit", 3 * limits.max_calls),
        ("grpc.max_connection_idle_ms", _milliseconds(limits.idle_timeout_s)),
        ("grpc.keepalive_time_ms", _milliseconds(limits.keepalive_s)),
        ("grpc.keepalive_timeout_ms", _milliseconds(limits.keepalive_s)),
        # Of the two timeouts this one closes a connection: https://github.com/grpc/grpc/pull/39239
        ("grpc.http2.ping_timeout_ms", _milliseconds(limits.keepalive_s)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", _PING_STRIKES_MAX),
    ]


def _milliseconds(seconds: float) -> int:
    return max(1, round(1e3 * seconds))


def _counted(handler: Any, count: CallCount) -> Any:
    async def guarded(requests: Any, context: _Context) -> AsyncIterator[Any]:
        _enter(count, context)
        async for answer in handler(requests, context):
            yield answer

    return guarded


def _retrieve_exception(reading: asyncio.Future[Any]) -> None:
    """Retrieve the exception, because asyncio logs exceptions that were never retrieved."""
    if not reading.cancelled():
        reading.exception()


def _enter(count: CallCount, context: _Context) -> None:
    """Count the call until its context ends, which may be later than the end of its handler.

    A cancelled handler may stay suspended until it is garbage-collected.
    """
    count.enter()
    context.add_done_callback(lambda _: count.leave())  # type: ignore[arg-type]  # the stubs name a class, not a protocol
