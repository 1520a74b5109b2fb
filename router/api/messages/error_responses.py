"""Error responses in the form that the clients of a path expect: Anthropic's or OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import Response

from router.api.messages.api_key import is_messages_path
from router.api.messages.errors import message_error, status_error
from router.api.openai_replies import error_body, error_headers, json_error
from wire.errors import TandemError

_JSON = "application/json"


def error_response(path: str, error: TandemError) -> Response:
    """Return the response with an error to a request for `path`."""
    body = message_error(error).encode() if is_messages_path(path) else error_body(error)
    return Response(body, error.http_status, error_headers(error), _JSON)


def status_response(
    path: str, status: int, message: str, *, code: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Return the response with an HTTP status that no `TandemError` stands for; `code` is OpenAI's."""
    in_form = is_messages_path(path)
    body = status_error(status, message).encode() if in_form else json_error(status, message, code=code)
    return Response(body, status, headers, _JSON)
