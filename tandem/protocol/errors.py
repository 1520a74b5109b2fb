"""All errors that cross a component's boundary, with their gRPC and HTTP status.

Each message is one sentence with the problem and its remedy.
"""

from dataclasses import dataclass
from typing import ClassVar

import grpc

ECHO_CHARS = 80
"""Maximum number of characters of a client's value that an error message repeats."""


def clipped(text: str, limit: int = ECHO_CHARS) -> str:
    """Return `text`, cut to `limit` characters of which the last is "…"."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def shown(value: object) -> str:
    """Return a client's value for an error message: quoted, without control characters, and clipped."""
    return clipped(repr(value if not isinstance(value, str) else clipped(value)), 2 * ECHO_CHARS)


class TandemError(Exception):
    """Base of all typed errors. `code` is stable and sent as `ErrorDetail.code`."""

    code: ClassVar[str] = "INTERNAL"
    grpc_status: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class InvalidArgument(TandemError):
    """A field of the request is wrong; the message names the field and the limit."""

    code = "INVALID_ARGUMENT"
    grpc_status = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 400

    def __init__(self, field: str, message: str) -> None:
        field = clipped(field, 2 * ECHO_CHARS)
        super().__init__(f"{field}: {message}")
        self.field = field

    @property
    def problem(self) -> str:
        """The message without the field."""
        return self.message.removeprefix(f"{self.field}: ")

    def __reduce__(self) -> tuple[type["InvalidArgument"], tuple[str, str]]:
        """Support pickling between an actor and its caller."""
        return InvalidArgument, (self.field, self.problem)


@dataclass(frozen=True, slots=True)
class ContextLengths:
    """The lengths in tokens of a request that exceeds the model's context."""

    prompt: int
    """The length of the prompt, or a lower bound of it."""
    answer: int
    """The client's limit for the answer; 1 without a limit."""
    limit: int
    """Maximum length of prompt and answer together."""

    @property
    def prompt_fits(self) -> bool:
        """True if the request would fit with a shorter answer."""
        return self.prompt < self.limit


class ContextLengthExceeded(InvalidArgument):
    """Prompt and answer exceed the context; the message contains the text that OpenAI clients match."""

    code = "CONTEXT_LENGTH_EXCEEDED"

    def __init__(self, field: str, message: str, lengths: ContextLengths | None = None) -> None:
        """Create the error; `message` is the whole sentence, without `field` as its prefix.

        `lengths` are the lengths that the message names; None in a gRPC client, which receives only the message.
        """
        super().__init__(field, message)
        self.message = message
        self.lengths = lengths
        self.args = (message,)

    def __reduce__(self) -> tuple[type["ContextLengthExceeded"], tuple[str, str, ContextLengths | None]]:  # type: ignore[override]
        """Support pickling between an actor and its caller."""
        return ContextLengthExceeded, (self.field, self.message, self.lengths)


class Unauthenticated(TandemError):
    """The caller's token is missing or wrong."""

    code = "UNAUTHENTICATED"
    grpc_status = grpc.StatusCode.UNAUTHENTICATED
    http_status = 401


class PermissionDenied(TandemError):
    """The caller's key is valid, but its role does not allow the call."""

    code = "PERMISSION_DENIED"
    grpc_status = grpc.StatusCode.PERMISSION_DENIED
    http_status = 403


class NotFound(TandemError):
    """The named model, request, worker or adapter does not exist here."""

    code = "NOT_FOUND"
    grpc_status = grpc.StatusCode.NOT_FOUND
    http_status = 404


class DeadlineExceeded(TandemError):
    """A wait ended at its deadline."""

    code = "DEADLINE_EXCEEDED"
    grpc_status = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = 504


class ResourceExhausted(TandemError):
    """There is no capacity now; `retry_after_s` is the time to wait before a retry."""

    code = "RESOURCE_EXHAUSTED"
    grpc_status = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 429


class RateLimited(ResourceExhausted):
    """The quota of the caller's API key is used up; `retry_after_s` is the time until it allows another request."""

    code = "RATE_LIMIT_EXCEEDED"


class Unavailable(TandemError):
    """A worker or the whole cluster is unavailable; the request was not finished."""

    code = "UNAVAILABLE"
    grpc_status = grpc.StatusCode.UNAVAILABLE
    http_status = 503


class RoleClosed(Unavailable):
    """A worker's scheduler accepts no new work, because the worker changes its role or drains; other workers do."""

    code = "ROLE_CLOSED"


class Cancelled(TandemError):
    """The client or its router cancelled the request."""

    code = "CANCELLED"
    grpc_status = grpc.StatusCode.CANCELLED
    http_status = 499


class FailedPrecondition(TandemError):
    """The current state does not allow the call, or two components differ in version, model, dtype or layout."""

    code = "FAILED_PRECONDITION"
    grpc_status = grpc.StatusCode.FAILED_PRECONDITION
    http_status = 412


class StaleEpoch(TandemError):
    """The message names a lease or an attempt that has ended, and was dropped."""

    code = "STALE_EPOCH"
    grpc_status = grpc.StatusCode.ABORTED
    http_status = 409


class TransferFailed(TandemError):
    """KV pages did not arrive completely."""

    code = "TRANSFER_FAILED"
    grpc_status = grpc.StatusCode.UNAVAILABLE
    http_status = 503


class ModelError(TandemError):
    """The model on disk cannot be served; the message names the problem and the file."""

    code = "MODEL_ERROR"
    grpc_status = grpc.StatusCode.FAILED_PRECONDITION
    http_status = 500


class NonFiniteLogits(TandemError):
    """The logits of a request have no finite maximum, so no token can be sampled; only this request fails."""

    code = "NON_FINITE_LOGITS"

    def __init__(
        self,
        message: str = "the model computed NaN or infinite logits for this request, or its bias, min_tokens and grammar"
        " leave no token; change the request, or its adapter if it names one",
        *,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)


class Internal(TandemError):
    """An unexpected error inside Tandem; only this request fails."""


_BY_CODE: dict[str, type[TandemError]] = {
    cls.code: cls
    for cls in (
        Unauthenticated, PermissionDenied, NotFound, DeadlineExceeded, ResourceExhausted, RateLimited, Unavailable,
        Cancelled, RoleClosed, FailedPrecondition, StaleEpoch, TransferFailed, ModelError, NonFiniteLogits, Internal,
    )
}  # fmt: skip


def from_code(code: str, message: str, retry_after_s: float = 0.0) -> TandemError:
    """Return the typed error for a received `code`; an unknown code becomes an `Internal` that names it."""
    if code == InvalidArgument.code:
        field, _, rest = message.partition(": ")
        return InvalidArgument(field, rest)
    if code == ContextLengthExceeded.code:
        return ContextLengthExceeded("", message)
    cls = _BY_CODE.get(code)
    if cls is None:
        return Internal(f"{code}: {message}")
    return cls(message, retry_after_s=retry_after_s)


def from_status(status: grpc.StatusCode, message: str) -> TandemError:
    """Return the typed error for the gRPC status of a peer that sends no error code of Tandem."""
    classes: tuple[type[TandemError], ...] = (InvalidArgument, *_BY_CODE.values())
    for cls in classes:
        if cls.grpc_status is status:
            return from_code(cls.code, message)
    return Internal(f"{status.name}: {message}")
