"""The checks of gRPC calls before their handlers run (key, role and quota), and the calls' records in the audit log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from router.access.audit_log import AuditLog
from router.access.callers import Caller, Callers, Headers
from router.access.client_call import ClientCall, serve_call
from tandem.protocol.errors import Internal, TandemError, clipped
from tandem.protocol.generated.tandem.v1 import inference_pb2

_Context = grpc.aio.ServicerContext[Any, Any]
_READERS_METHODS = frozenset({"GetServerInfo", "GetLoads"})
"""The methods that show the load of all tenants; operators and readers may call them, but tenants may not."""
_OPERATORS_METHODS = frozenset({"LoadAdapter", "UnloadAdapter"})
"""The methods that change the cluster; only operators may call them."""
_ALL_ROLES_METHODS = frozenset({"GetModelInfo"})
_COUNTED_METHODS = frozenset({"Generate", "Chat", "Tokenize", "Detokenize"})
"""The methods that count against a tenant's request quota, as POST requests do over HTTP."""


class GrpcAccess:
    """Wraps a servicer of `tandem.v1.Inference`: checks the caller of each call, and writes the audit record.

    The gRPC server calls it on the event loop. `audit` is None if there is no audit log.
    """

    def __init__(self, servicer: Any, callers: Callers, audit: AuditLog | None) -> None:
        self._callers = callers
        self._audit = audit
        for method in inference_pb2.DESCRIPTOR.services_by_name["Inference"].methods:
            setattr(self, method.name, self._wrapped(method.name, getattr(servicer, method.name)))

    async def rejected(self, method: str, peer: str, error: TandemError) -> None:
        """Record a call that was rejected before its handler.

        `method` is the method's full name, `peer` the client's address in gRPC's form.
        """
        call = ClientCall(clipped(method.removeprefix(_PREFIX)), _host(peer))
        _note_failure(call, error)
        if self._audit is not None:
            self._audit.write(call)

    def _wrapped(self, name: str, handler: Any) -> Callable[[Any, _Context], Any]:
        async def answer(request: Any, context: _Context) -> Any:
            call = self._begin(name, context)
            try:
                self._check(name, call, context)
                response = await handler(request, context)
            except Exception as error:
                _note_failure(call, error)
                raise
            call.status = _OK
            return response

        return answer

    def _begin(self, name: str, context: _Context) -> ClientCall:
        call = ClientCall(name, _host(context.peer()))
        serve_call(call)
        context.add_done_callback(lambda _: self._end(call))  # type: ignore[arg-type]  # the stubs name a class, not a protocol
        return call

    def _end(self, call: ClientCall) -> None:
        if not call.status:
            call.status = call.error = grpc.StatusCode.CANCELLED.name
        if self._audit is not None:
            self._audit.write(call)

    def _check(self, name: str, call: ClientCall, context: _Context) -> None:
        call.caller = self._caller(name, context.invocation_metadata() or ())
        if name in _COUNTED_METHODS:
            self._callers.admit(call.caller)

    def _caller(self, name: str, metadata: Headers) -> Caller:
        if name in _ALL_ROLES_METHODS:
            return self._callers.any_role(metadata)
        if name in _OPERATORS_METHODS:
            return self._callers.operator(metadata)
        return self._callers.reader(metadata) if name in _READERS_METHODS else self._callers.tenant(metadata)


_PREFIX = f"/{inference_pb2.DESCRIPTOR.services_by_name['Inference'].full_name}/"
_OK = grpc.StatusCode.OK.name


def _note_failure(call: ClientCall, error: Exception) -> None:
    failure = error if isinstance(error, TandemError) else Internal(type(error).__name__)
    call.failed(failure.code)
    call.status = failure.grpc_status.name


def _host(peer: str) -> str:
    """Return the host in gRPC's name of a peer, such as `ipv4:127.0.0.1:50000` or `ipv6:%5B::1%5D:50000`."""
    kind, _, address = peer.partition(":")
    host = address.rpartition(":")[0] if kind in {"ipv4", "ipv6"} else ""
    return host.removeprefix("%5B").removesuffix("%5D").removeprefix("[").removesuffix("]")
