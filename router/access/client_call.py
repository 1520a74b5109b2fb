"""One call of a client: its caller, and the tokens it has used so far, for quotas and the audit log."""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field

from router.access.callers import ANYONE, Caller


@dataclass(slots=True)
class ClientCall:
    """A call of a client over HTTP or gRPC, from its arrival to its end. The task that serves it owns it."""

    endpoint: str = ""
    """The HTTP method and path without the query, or the gRPC method."""
    client: str = ""
    """The client's address."""
    caller: Caller = ANYONE
    request_id: str = ""
    """The request's id in the router, as in traces; for a call without a request, the id of the response."""
    model: str = ""
    status: int | str = ""
    """The HTTP status, or the name of the gRPC status; "" until it is known."""
    error: str = ""
    """The code of the error with which the call ended, `CANCELLED` if the client disconnected; "" without an error."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    received_unix_s: float = field(default_factory=time.time)
    received_s: float = field(default_factory=time.monotonic)

    def queued(self, request_id: str, model: str, prompt_tokens: int) -> None:
        """Record that the call has queued a request, and charge the prompt's tokens to the tenant's quota."""
        self.request_id, self.model = request_id, model
        self.prompt_tokens += prompt_tokens
        self._spend(prompt_tokens)

    def count_output_tokens(self, tokens: int) -> None:
        """Record `tokens` tokens that are sent to the client, and charge them to the tenant's quota."""
        self.completion_tokens += tokens
        self._spend(tokens)

    def failed(self, code: str) -> None:
        """Record the code of the error with which the call ends."""
        self.error = code

    def _spend(self, tokens: int) -> None:
        if self.caller.quota is not None:
            self.caller.quota.spend(tokens)


_SERVED: ContextVar[ClientCall] = ContextVar("served")


def served_call() -> ClientCall:
    """Return the call that the running task serves; outside of any call, return a new call of `ANYONE`."""
    return _SERVED.get(None) or ClientCall()


def serve_call(call: ClientCall) -> None:
    """Set the call that the running task serves; tasks that it starts from now on serve the same call."""
    _SERVED.set(call)
