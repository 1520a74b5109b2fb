"""Errors in the form of the Messages API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.api.anthropic.api_key import is_messages_path
from router.api.openai.replies import MESSAGE_CHARS, error_body
from router.api.replies.reply import dumped
from tandem.protocol.errors import ContextLengthExceeded, InvalidArgument, TandemError, Unauthenticated, clipped

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
_DETAILS: Mapping[str, Mapping[str, Any]] = {
    "thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
}
"""The details of errors about a field, by which Anthropic's clients send the request again without it."""


def error_content(path: str, error: TandemError) -> bytes:
    """Return the body with an error for the clients of `path`, in Anthropic's or OpenAI's form."""
    return message_error(error).encode() if is_messages_path(path) else error_body(error)


def message_error(error: TandemError) -> str:
    """Return Anthropic's error object. A missing key may come in a header of this API's own, too."""
    message, details = error.message, None
    if isinstance(error, ContextLengthExceeded):
        message = _too_long(error)
    elif isinstance(error, InvalidArgument):
        details = _DETAILS.get(error.field)
    elif isinstance(error, Unauthenticated):
        message += " or x-api-key"
    return status_error(error.http_status, message, details)


def status_error(status: int, message: str, details: Mapping[str, Any] | None = None) -> str:
    """Return Anthropic's error object for an HTTP status."""
    found = {"type": _TYPES.get(status, "api_error"), "message": clipped(message, MESSAGE_CHARS)}
    return dumped({"type": "error", "error": found if details is None else {**found, "details": details}})


def _too_long(error: ContextLengthExceeded) -> str:
    """Return the text that Anthropic's clients parse to ask for a shorter answer, or to shorten the conversation."""
    lengths = error.lengths
    if lengths is None:
        return f"prompt is too long: {error.message}"
    if lengths.prompt_fits:
        asked = f"{lengths.prompt} + {lengths.answer} > {lengths.limit}"
        return f"input length and `max_tokens` exceed context limit: {asked}"
    return f"prompt is too long: {lengths.prompt} tokens > {lengths.limit - 1} maximum"
