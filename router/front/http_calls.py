"""One HTTP request from a front process, served by the router's ASGI application."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Scope

from router.front.headers import packed, unpacked
from router.front.window import Acknowledger, Window, parts
from tandem.protocol.errors import Internal
from tandem.protocol.generated.tandem.v1 import front_pb2

log = logging.getLogger(__name__)


class HttpCall:
    """One HTTP request from a front process."""

    def __init__(self, asked: front_pb2.HttpRequest, app: ASGIApp, send: Callable[..., None]) -> None:
        self._asked = asked
        self._app = app
        self._send = send
        self._window = Window()
        self._read = Acknowledger(lambda count: send(passed=count))
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._whole = False

    async def run(self) -> None:
        """Serve the request; cut the response off if the application fails in the middle of it."""
        try:
            await self._app(_scope(self._asked), self._receive, self._take)
        except Exception as error:
            log.error("unexpected failure in a handler", exc_info=error)
        if not self._whole:
            self._send(end=front_pb2.CallEnd(details=Internal("the answer could not be finished").message))

    def on_frame(self, frame: front_pb2.FrontFrame) -> None:
        """Process a frame: a part of the request's body, or the client's progress in reading the response."""
        if frame.HasField("passed"):
            self._window.passed(frame.passed)
            return
        self._messages.put_nowait({"type": "http.request", "body": frame.body.data, "more_body": frame.body.more})

    def leave(self) -> None:
        """Tell the application that the client has left, as an ASGI server would."""
        self._window.lift()
        self._messages.put_nowait({"type": "http.disconnect"})

    async def _receive(self) -> Message:
        message = await self._messages.get()
        if message["type"] == "http.request":
            self._read.add(len(message["body"]))
        return message

    async def _take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = packed(message.get("headers", ()))
            self._send(response=front_pb2.HttpResponse(status=message["status"], headers=headers))
            await self._window.sent(0)
        elif message["type"] == "http.response.body":
            *first, last = parts(message.get("body", b""))
            for part in first:
                self._send(body=front_pb2.HttpBody(data=part, more=True))
                await self._window.sent(len(part))
            more = message.get("more_body", False)
            self._whole = not more
            self._send(body=front_pb2.HttpBody(data=last, more=more))
            if more:
                await self._window.sent(len(last))


def _scope(asked: front_pb2.HttpRequest) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": asked.http_version,
        "method": asked.method,
        "scheme": asked.scheme,
        "path": asked.path,
        "raw_path": asked.raw_path,
        "query_string": asked.query_string,
        "root_path": "",
        "headers": unpacked(asked.headers),
        "client": (asked.client, 0),
        "server": None,
    }
