"""The X-Request-Id header, by which a request can be found in the logs of the client, its gateway and the router."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.api.anthropic.api_key import is_messages_path

REQUEST_ID_HEADER = "x-request-id"
_ANTHROPICS_HEADER = "request-id"
"""The name of the request id header in the Messages API, whose responses have it in addition to X-Request-Id."""
_VALID = re.compile(rb"[ -~]{1,128}")


class RequestIds:
    """ASGI middleware that gives every response an X-Request-Id.

    It is the client's id if the request has exactly one X-Request-Id of 1 to 128 printable ASCII characters, else the
    answer's id if the response has set one, else a new id. The client's id is only echoed and never names the request
    inside the cluster, because a gateway sends the same id again with a retry.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = [value for name, value in scope["headers"] if name == REQUEST_ID_HEADER.encode()]
        own = sent[0].decode() if len(sent) == 1 and _VALID.fullmatch(sent[0]) else ""

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID_HEADER] = own or headers.get(REQUEST_ID_HEADER) or f"req-{uuid.uuid4().hex}"
                if is_messages_path(scope["path"]):
                    headers[_ANTHROPICS_HEADER] = headers[REQUEST_ID_HEADER]
            await send(message)

        await self._app(scope, receive, send_named)
