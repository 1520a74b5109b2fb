"""gRPC servers and channels of all components.

A server interceptor maps errors to status codes and checks API keys. Channels and ports between components are
encrypted if the cluster has a token.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, NoReturn, cast

import grpc
import grpc.aio

from tandem.net.limits.call_guard import CallGuard, public_options
from tandem.net.security.mutual_tls import PART_NAME, credentials_of
from tandem.protocol.errors import (
    ContextLengthExceeded,
    Internal,
    InvalidArgument,
    TandemError,
    clipped,
    from_code,
    from_status,
)
from tandem.settings.listeners import ListenerLimits

log = logging.getLogger(__name__)

_Unary = Callable[[Any, Any], Awaitable[Any]]
_Streaming = Callable[[Any, Any], AsyncIterator[Any]]
Check = Callable[[Iterable[tuple[str, str | bytes]]], None]
"""A function that checks the metadata of a call. Raises a TandemError if the call is not allowed."""
Rejected = Callable[[str, str, TandemError], Awaitable[None]]
"""A function that is called for each call that a `Check` does not allow.

Its arguments are the full method name, gRPC's name of the client, and the error.
"""

AUTHORIZATION = "authorization"
RETRY_AFTER = "retry-after-s"
"""Trailing metadata: the seconds to wait before a retry."""
ERROR_CODE = "tandem-error-code"
"""Trailing metadata: the error code, which is more specific than the gRPC status."""

MESSAGE_BYTES_MAX = 16 << 20
"""Maximum size in bytes of a message that any component accepts; the router has a lower limit with a clear error."""

_DETAILS_CHARS = 512
"""Maximum number of characters of an error message.

A percent-encoded character takes up to 12 bytes of a header, and gRPC rejects headers of more than 8 KiB in total.
"""

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


_HANDSHAKE_FAILED = "Tls handshake failed"
"""gRPC's error text if the peer has no TLS or no certificate of this cluster's authority."""


def open_channel(address: str, token: str = "") -> grpc.aio.Channel:
    """Open an encrypted channel from one component of the cluster to another, at `address` (host:port).

    Both ends prove that they know `token` before any call is sent, see `tandem.net.security.mutual_tls`. Without a
    token there is neither encryption nor authentication.
    """
    if not token:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", PART_NAME)]
    return grpc.aio.secure_channel(address, credentials_of(token).client, options=options)


def open_client_channel(
    address: str, credentials: grpc.ChannelCredentials | None = None, target_name: str = ""
) -> grpc.aio.Channel:
    """Open a channel to a router's client port.

    The channel is encrypted if `credentials` are given; the router's certificate must then be for `target_name`, by
    default for `address`.
    """
    if credentials is not None:
        name = [("grpc.ssl_target_name_override", target_name)] if target_name else []
        return grpc.aio.secure_channel(address, credentials, [*CHANNEL_OPTIONS, *name])
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def listen(server: grpc.aio.Server, address: str, token: str = "") -> int:
    """Make the server listen on `address` (host:port, port 0 = any free port) for components; return the port.

    Components must know `token`; without a token, every peer is accepted. Raises RuntimeError if the port is taken.
    """
    if not token:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, credentials_of(token).server)


def open_server(
    *,
    check: Check | None = None,
    rejected: Rejected | None = None,
    open_methods: tuple[str, ...] = (),
    limits: ListenerLimits | None = None,
) -> grpc.aio.Server:
    """Create a gRPC server that checks the metadata of each call with `check` and maps `TandemError` to its status.

    `rejected` is called for each call that `check` does not allow, before the call ends. `open_methods` are prefixes of
    full method names ("/grpc.health.v1.Health/") that are not checked. `limits` are those of a public server; None =
    only components of the cluster reach the server.
    """
    options = SERVER_OPTIONS if limits is None else public_options(limits)
    guard = None if limits is None else CallGuard(limits)
    return grpc.aio.server(
        interceptors=[_ConnectionGuard(check, rejected, open_methods, guard)],
        options=[*options, ("grpc.so_reuseport", 0)],  # gRPC's default is to share the port
    )


def error_of(error: grpc.aio.AioRpcError, peer: str) -> TandemError:
    """Return the typed error for a failed call; its message names the `peer`, e.g. "decode worker decode-0".

    A peer that fails the TLS handshake is Unavailable like a dead peer, because another process may have its port.
    """
    trailing = dict(error.trailing_metadata() or ())
    message = error.details() or error.code().name
    code = str(trailing.get(ERROR_CODE, ""))
    if code in (InvalidArgument.code, ContextLengthExceeded.code):
        return from_code(code, message)
    retry_after_s = float(str(trailing.get(RETRY_AFTER, 0)))
    if code:
        return from_code(code, f"{peer}: {message}", retry_after_s)
    if is_refused_peer(error):
        message = "the TLS handshake failed: another process has the port now, or it has another cluster token"
    return from_status(error.code(), f"{peer}: {message}")


def is_refused_peer(error: grpc.aio.AioRpcError) -> bool:
    """Return True if a call was not sent because the peer failed the TLS handshake: it is not part of this cluster."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and _HANDSHAKE_FAILED in (error.details() or "")


class _ConnectionGuard(grpc.aio.ServerInterceptor):
    """Server interceptor that checks the metadata before every handler and maps errors to status codes."""

    def __init__(
        self,
        check: Check | None,
        rejected: Rejected | None,
        open_methods: tuple[str, ...],
        guard: CallGuard | None,
    ) -> None:
        self._check = check
        self._rejected = rejected
        self._open = open_methods or ("\0",)
        self._guard = guard

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        refusal = self._refusal(handler_call_details)
        if refusal is not None:
            method = handler_call_details.method
            return grpc.stream_unary_rpc_method_handler(_refusing(method, refusal, self._rejected))
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        if self._guard is not None:
            handler = self._guard.wrap(handler, is_open=handler_call_details.method.startswith(self._open))
        return _with_status(handler)

    def _refusal(self, details: grpc.HandlerCallDetails) -> TandemError | None:
        if self._check is None or details.method.startswith(self._open):
            return None
        try:
            self._check(details.invocation_metadata or ())
        except TandemError as error:
            return error
        return None


def values_of(metadata: Iterable[tuple[str, str | bytes]] | None, name: str) -> list[str | bytes]:
    """Return all values of the metadata key `name`; a caller may send several."""
    return [value for key, value in metadata or () if key == name]


def _refusing(method: str, error: TandemError, rejected: Rejected | None) -> _Unary:
    async def refuse(_request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
        if rejected is not None:
            await rejected(method, context.peer(), error)
        await abort(context, error)

    return refuse


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: TandemError) -> NoReturn:
    """End the call with the error's status, message, code and retry hint.

    The message is cut to fit into a header; otherwise the client would receive RESOURCE_EXHAUSTED instead.
    """
    trailing = [(ERROR_CODE, error.code)]
    if error.retry_after_s:
        trailing.append((RETRY_AFTER, f"{error.retry_after_s:g}"))
    context.set_trailing_metadata(tuple(trailing))
    await context.abort(error.grpc_status, clipped(error.message, _DETAILS_CHARS))
    raise AssertionError("abort returns never")


def _guarded_unary(handler: _Unary) -> _Unary:
    """Wrap a unary handler so that its errors end the call with their status and message."""

    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await handler(request, context)
        except Exception as error:
            await _end_call(context, error)

    return guarded


def _guard_any_stream(handler: Any) -> Any:
    """Wrap a streaming handler: a generator or, like gRPC's health service, a coroutine that writes its responses."""
    if inspect.iscoroutinefunction(handler):
        return _guarded_unary(cast(_Unary, handler))
    return guarded_stream(cast(_Streaming, handler))


def guarded_stream(handler: _Streaming) -> _Streaming:
    """Wrap a streaming handler so that its errors end the call with their status and message."""

    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            async for message in handler(request, context):
                yield message
        except Exception as error:
            await _end_call(context, error)

    return guarded


def _with_status(handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
    """Wrap a handler of any kind so that its errors end the call with their status and message."""
    makers = {
        "unary_unary": (grpc.unary_unary_rpc_method_handler, _guarded_unary),
        "unary_stream": (grpc.unary_stream_rpc_method_handler, _guard_any_stream),
        "stream_unary": (grpc.stream_unary_rpc_method_handler, _guarded_unary),
        "stream_stream": (grpc.stream_stream_rpc_method_handler, _guard_any_stream),
    }
    for kind, (make, guard) in makers.items():
        behavior = getattr(handler, kind)
        if behavior is not None:
            made: Any = make(guard(behavior), handler.request_deserializer, handler.response_serializer)
            return cast("grpc.RpcMethodHandler[Any, Any]", made)
    return handler


async def _end_call(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> NoReturn:
    """End a call whose handler raised an error; an AbortError of the handler itself is raised again."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, TandemError):
        await abort(context, error)
    log.error("unexpected failure in a handler", exc_info=error)
    await abort(context, Internal(f"unexpected {type(error).__name__}; the server's log has the details"))
