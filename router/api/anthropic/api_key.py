"""The API key of an HTTP request: in the Authorization header, or in x-api-key as Anthropic's clients send it."""

from __future__ import annotations

from starlette.types import Scope

MESSAGES_PATH = "/v1/messages"
MODELS_PATH = "/v1/models"


def is_messages_path(path: str) -> bool:
    """Return True if `path` belongs to the Messages API."""
    return _is_below(path, MESSAGES_PATH)


def key_headers(scope: Scope) -> list[tuple[str | bytes, str | bytes]]:
    """Return the Authorization headers of a request.

    On the paths of Anthropic's clients, each x-api-key header is added as an Authorization header with a bearer key.
    """
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    keys: list[tuple[str | bytes, str | bytes]] = [header for header in headers if header[0] == b"authorization"]
    if is_messages_path(scope["path"]) or _is_below(scope["path"], MODELS_PATH):
        keys += [(b"authorization", b"Bearer " + value) for name, value in headers if name == b"x-api-key"]
    return keys


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(f"{root}/")
