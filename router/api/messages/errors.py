"""Errors in the form of the Messages API."""

from __future__ import annotations

from router.api.messages.api_key import is_messages_path
from router.api.openai_replies import MESSAGE_CHARS, error_body
from router.api.replies.reply import dumped
from wire.errors import ContextLengthExceeded, TandemError, Unauthenticated, clipped

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_content(path: str, error: TandemError) -> bytes:
    """Return the body with an error for the clients of `path`, in Anthropic's or OpenAI's form."""
    return message_error(error).encode() if is_messages_path(path) else error_body(error)


def message_error(error: TandemError) -> str:
    """Return Anthropic's error object; a prompt over the context has the text that its clients match.

    A missing key may come in a header of this API's own, too.
    """
    too_long = "prompt is too long: " if isinstance(error, ContextLengthExceeded) else ""
    own_header = " or x-api-key" if isinstance(error, Unauthenticated) else ""
    return status_error(error.http_status, too_long + error.message + own_header)


def status_error(status: int, message: str) -> str:
    """Return Anthropic's error object for an HTTP status."""
    found = {"type": _TYPES.get(status, "api_error"), "message": clipped(message, MESSAGE_CHARS)}
    return dumped({"type": "error", "error": found})
