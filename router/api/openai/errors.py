"""Errors in the form of OpenAI's API: the error object and the Retry-After header."""

from __future__ import annotations

import math

from router.api.reply import dumped
from tandem.protocol.errors import InvalidArgument, NotFound, TandemError, clipped

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    429: "rate_limit_error",
}

MESSAGE_CHARS = 2048
"""Maximum length of an error message in characters; a longer message is cut."""


def error_body(error: TandemError) -> str:
    """Return OpenAI's error object; its `param` is the wrong field, if there is one."""
    return json_error(
        error.http_status,
        error.message,
        code="model_not_found" if isinstance(error, NotFound) else error.code.lower(),
        param=_param(error),
    )


def json_error(status: int, message: str, *, code: str, param: str | None = None) -> str:
    """Return OpenAI's error object for an HTTP status."""
    kind = _ERROR_TYPES.get(status, "server_error")
    message = clipped(message, MESSAGE_CHARS)
    return dumped({"error": {"message": message, "type": kind, "param": param, "code": code}})


def error_headers(error: TandemError) -> dict[str, str]:
    """Return the Retry-After header in whole seconds if the error has a retry hint."""
    return {"retry-after": str(math.ceil(error.retry_after_s))} if error.retry_after_s else {}


def _param(error: TandemError) -> str | None:
    if isinstance(error, InvalidArgument):
        return error.field
    return "model" if isinstance(error, NotFound) else None
