"""Error responses in the form that the clients of a path expect: Anthropic's for the Messages API, else OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from router.access.client_call import served_call
from router.api.anthropic.api_key import is_messages_path
from router.api.openai.errors import MESSAGE_CHARS, error_body, error_headers, json_error
from router.api.reply import dumped
from tandem.protocol.errors import ContextLengthExceeded, InvalidArgument, TandemError, Unauthenticated, clipped

_JSON = "application/json"
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
"""Error details by name of the rejected field; they make Anthropic's clients repeat the request without the field."""


def error_content(path: str, error: TandemError) -> bytes:
    """Return the body of an error response for the clients of `path`, in Anthropic's or OpenAI's form."""
    return (message_error(error) if is_messages_path(path) else error_body(error)).encode()


def message_error(error: TandemError) -> str:
    """Return Anthropic's error object; its message about a missing key also names the x-api-key header."""
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
    body = {"type": _TYPES.get(status, "api_error"), "message": clipped(message, MESSAGE_CHARS)}
    return dumped({"type": "error", "error": body if details is None else {**body, "details": details}})


def _too_long(error: ContextLengthExceeded) -> str:
    """Return the error message in the form that Anthropic's clients parse to shorten the answer or the conversation."""
    lengths = error.lengths
    if lengths is None:
        return f"prompt is too long: {error.message}"
    if lengths.prompt_fits:
        asked = f"{lengths.prompt} + {lengths.answer} > {lengths.limit}"
        return f"input length and `max_tokens` exceed context limit: {asked}"
    return f"prompt is too long: {lengths.prompt} tokens > {lengths.limit - 1} maximum"


def error_response(path: str, error: TandemError) -> Response:
    """Return the error response to a request for `path`, and record the error in the call's audit record."""
    served_call().failed(error.code)
    return Response(error_content(path, error), error.http_status, error_headers(error), _JSON)


def add_error_handlers(app: Starlette) -> None:
    """Make `app` reply to all errors, even routing errors and unexpected exceptions, in the form of the path's API."""
    app.add_exception_handler(TandemError, _on_tandem_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_defect)


def _status_response(
    path: str, status: int, message: str, *, code: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an error response for an HTTP status, and record its `code` in the call's audit record."""
    served_call().failed(code.upper())
    in_form = is_messages_path(path)
    body = status_error(status, message) if in_form else json_error(status, message, code=code)
    return Response(body, status, headers, _JSON)


async def _on_tandem_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TandemError)
    return error_response(request.url.path, error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    message = f"{clipped(request.method)} {clipped(path)}: {HTTPStatus(error.status_code).phrase.lower()}"
    code = HTTPStatus(error.status_code).name.lower()
    return _status_response(path, error.status_code, message, code=code, headers=error.headers)


async def _on_defect(request: Request, error: Exception) -> Response:
    message = f"unexpected {type(error).__name__}; the server's log has the details"
    return _status_response(request.url.path, 500, message, code="internal")
