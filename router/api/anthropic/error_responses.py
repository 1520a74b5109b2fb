"""Error responses in the form that the clients of a path expect: Anthropic's or OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from router.access.client_call import served_call
from router.api.anthropic.api_key import is_messages_path
from router.api.anthropic.errors import error_content, status_error
from router.api.openai.replies import error_headers, json_error
from tandem.protocol.errors import TandemError, clipped

_JSON = "application/json"


def error_response(path: str, error: TandemError) -> Response:
    """Return the response with an error to a request for `path`, and record the error for the audit log."""
    served_call().failed(error.code)
    return Response(error_content(path, error), error.http_status, error_headers(error), _JSON)


def add_error_handlers(app: FastAPI) -> None:
    """Let `app` answer its errors, routing's and defects included, in these forms."""
    app.add_exception_handler(TandemError, _on_tandem_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_defect)


def _status_response(
    path: str, status: int, message: str, *, code: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Return the response with an HTTP status that no `TandemError` stands for; records `code`, which is OpenAI's."""
    served_call().failed(code.upper())
    in_form = is_messages_path(path)
    body = status_error(status, message).encode() if in_form else json_error(status, message, code=code)
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
