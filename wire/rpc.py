"""How Tandem's parts speak gRPC: one server interceptor that maps errors to status codes and checks the caller's
token, and one way to open a channel.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, cast

import grpc
import grpc.aio

from wire.credentials import shows_key
from wire.errors import Internal, InvalidArgument, TandemError, Unauthenticated, from_code, from_status

log = logging.getLogger(__name__)

_Unary = Callable[[Any, Any], Awaitable[Any]]
_Streaming = Callable[[Any, Any], AsyncIterator[Any]]

AUTHORIZATION = "authorization"
RETRY_AFTER = "retry-after-s"
"""Trailing metadata: seconds after which a retry makes sense."""
ERROR_CODE = "tandem-error-code"
"""Trailing metadata: the code of the typed error, finer than the gRPC status."""

MESSAGE_BYTES_MAX = 16 << 20
"""Largest message any part accepts; the front door's own limit is lower and answers in words."""

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
]


def open_channel(address: str, token: str = "") -> grpc.aio.Channel:
    """A channel to `address` (host:port) that sends `token` as a bearer token with every call."""
    interceptors = [_SendTokenUnary(token), _SendTokenStream(token)] if token else []
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS, interceptors=interceptors)


def open_server(
    *, tokens: frozenset[str] = frozenset(), open_methods: tuple[str, ...] = (), shared_port: bool = False
) -> grpc.aio.Server:
    """A server that maps `TandemError` to its status and, if `tokens` is not empty, lets only their bearers in.

    `open_methods` are prefixes of full method names ("/grpc.health.v1.Health/") that need no token. `shared_port`:
    other processes of this user may listen at its port, too.
    """
    options = [*SERVER_OPTIONS, ("grpc.so_reuseport", int(shared_port))]
    return grpc.aio.server(interceptors=[_Doorkeeper(tokens, open_methods)], options=options)


def error_of(error: grpc.aio.AioRpcError, peer: str) -> TandemError:
    """The typed error behind a failed call to `peer` ("decode worker decode-0"), which its sentence names."""
    trailing = dict(error.trailing_metadata() or ())
    message = error.details() or error.code().name
    code = str(trailing.get(ERROR_CODE, ""))
    if code == InvalidArgument.code:
        return from_code(code, message)
    retry_after_s = float(str(trailing.get(RETRY_AFTER, 0)))
    if code:
        return from_code(code, f"{peer}: {message}", retry_after_s)
    return from_status(error.code(), f"{peer}: {message}")


def _with_token(details: grpc.aio.ClientCallDetails, token: str) -> grpc.aio.ClientCallDetails:
    metadata = grpc.aio.Metadata(*(details.metadata or ()), (AUTHORIZATION, f"Bearer {token}"))
    return grpc.aio.ClientCallDetails(
        details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
    )


class _SendTokenUnary(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(_with_token(client_call_details, self._token), request)


class _SendTokenStream(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(_with_token(client_call_details, self._token), request)


class _Doorkeeper(grpc.aio.ServerInterceptor):
    """Checks the token before, and turns typed errors into status codes after, every handler."""

    def __init__(self, tokens: frozenset[str], open_methods: tuple[str, ...]) -> None:
        self._tokens = tokens
        self._open = open_methods

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        if not self._admits(handler_call_details):
            return grpc.unary_unary_rpc_method_handler(_refuse)
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                guarded_unary(cast(_Unary, handler.unary_unary)),
                handler.request_deserializer,
                handler.response_serializer,
            )
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                _guard_any_stream(handler.unary_stream),
                handler.request_deserializer,
                handler.response_serializer,
            )
        return handler

    def _admits(self, details: grpc.HandlerCallDetails) -> bool:
        if not self._tokens or details.method.startswith(self._open or ("\0",)):
            return True
        return shows_key(dict(details.invocation_metadata or ()).get(AUTHORIZATION, ""), self._tokens)


async def _refuse(_request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
    await abort(context, Unauthenticated("the call carries no valid token; send 'authorization: Bearer <token>'"))


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: TandemError) -> NoReturn:
    """End the call with the error's status, sentence, code and retry hint."""
    trailing = [(ERROR_CODE, error.code)]
    if error.retry_after_s:
        trailing.append((RETRY_AFTER, f"{error.retry_after_s:g}"))
    context.set_trailing_metadata(tuple(trailing))
    await context.abort(error.grpc_status, error.message)
    raise AssertionError("abort returns never")


def guarded_unary(handler: _Unary) -> _Unary:
    """`handler`, whose errors end the call in words."""

    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await handler(request, context)
        except Exception as error:
            await _end_call(context, error)

    return guarded


def _guard_any_stream(handler: Any) -> Any:
    """A streaming handler is a generator, or (as gRPC's own health service has it) a coroutine that writes."""
    if inspect.iscoroutinefunction(handler):
        return guarded_unary(cast(_Unary, handler))
    return guarded_stream(cast(_Streaming, handler))


def guarded_stream(handler: _Streaming) -> _Streaming:
    """The same of one that streams."""

    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            async for message in handler(request, context):
                yield message
        except Exception as error:
            await _end_call(context, error)

    return guarded


async def _end_call(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> NoReturn:
    """End a call whose handler raised; what it raised to end the call itself goes on as it is."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, TandemError):
        await abort(context, error)
    log.error("unexpected failure in a handler", exc_info=error)
    await abort(context, Internal(f"unexpected {type(error).__name__}; the server's log has the details"))
