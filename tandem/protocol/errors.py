"""All errors that components send to each other or to clients, with their gRPC and HTTP status.

Each message is one sentence that says what is wrong and what to do.
"""

from dataclasses import dataclass
from typing import ClassVar

import grpc

ECHO_CHARS = 80
"""Maximum number of characters of a client's value that are repeated in an error message."""


def clipped(text: str, limit: int = ECHO_CHARS) -> str:
    """Return `text` shortened to at most `limit` characters; a shortened text ends with "…"."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def shown(value: object) -> str:
    """Return a client's value for use in an error message: quoted, without control characters, and shortened."""
    return clipped(repr(value if not isinstance(value, str) else clipped(value)), 2 * ECHO_CHARS)


class TandemError(Exception):
    """Base class of all typed errors; `code` is stable and is sent as `ErrorDetail.code`."""

    code: ClassVar[str] = "INTERNAL"
    grpc_status: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class InvalidArgument(TandemError):
    """A field of the request is invalid; the message names the field and the limit."""

    code = "INVALID_ARGUMENT"
    grpc_status = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 400

    def __init__(self, field: str, message: str) -> None:
        field = clipped(field, 2 * ECHO_CHARS)
        super().__init__(f"{field}: {message}")
        self.field = field

    @property
    def problem(self) -> str:
        """The message without the name of the field."""
        return self.message.removeprefix(f"{self.field}: ")

    def __reduce__(self) -> tuple[type["InvalidArgument"], tuple[str, str]]:
        """Support pickling between an actor and its caller."""
        return InvalidArgument, (self.field, self.problem)


@dataclass(frozen=True, slots=True)
class ContextLengths:
    """The lengths in tokens of a request that is too long for the model's context."""

    prompt: int
    """Length of the prompt, or a lower bound of it."""
    answer: int
    """The client's limit on the length of the answer; 1 without a limit."""
    limit: int
    """Maximum length of prompt and answer together."""

    @property
    def prompt_fits(self) -> bool:
        """True if the request would fit with a shorter answer."""
        return self.prompt < self.limit


class ContextLengthExceeded(InvalidArgument):
    """Prompt and answer are too long for the context; the message has the text that OpenAI clients look for."""

    code = "CONTEXT_LENGTH_EXCEEDED"

    def __init__(self, field: str, message: str, lengths: ContextLengths | None = None) -> None:
        """Create the error; `message` is the complete sentence, to which `field` is not prefixed.

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
    """The caller's key is valid, but the key's role does not allow the call."""

    code = "PERMISSION_DENIED"
    grpc_status = grpc.StatusCode.PERMISSION_DENIED
    http_status = 403


class NotFound(TandemError):
    """The named model, request, worker or adapter does not exist here."""

    code = "NOT_FOUND"
    grpc_status = grpc.StatusCode.NOT_FOUND
    http_status = 404


class DeadlineExceeded(TandemError):
    """A call or a wait reached its deadline."""

    code = "DEADLINE_EXCEEDED"
    grpc_status = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = 504


class ResourceExhausted(TandemError):
    """There is no capacity at present; `retry_after_s` is the time to wait before a retry."""

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
    """The worker accepts no new work for this phase, because it changes its role or drains; try another worker."""

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
    """The message belongs to a lease or an attempt that has ended, so it is ignored."""

    code = "STALE_EPOCH"
    grpc_status = grpc.StatusCode.ABORTED
    http_status = 409


class TransferFailed(TandemError):
    """KV pages were not transferred completely."""

    code = "TRANSFER_FAILED"
    grpc_status = grpc.StatusCode.UNAVAILABLE
    http_status = 503


class ModelError(TandemError):
    """The model on disk cannot be loaded; the message names the problem and the file."""

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
    """Return the typed error for the gRPC status of a peer that sends no Tandem error code."""
    classes: tuple[type[TandemError], ...] = (InvalidArgument, *_BY_CODE.values())
    for cls in classes:
        if cls.grpc_status is status:
            return from_code(cls.code, message)
    return Internal(f"{status.name}: {message}")
