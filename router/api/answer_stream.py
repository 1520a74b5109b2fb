"""A streamed HTTP response of server-sent events: headers, the events of a reply, and keep-alive comments."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.api.prompt_replies import PromptReplies
from router.api.reply import Reply
from router.requests.answer import AnswerEnd
from router.requests.choices import Choices
from tandem.protocol.errors import TandemError

COMMENT = b": waiting\n\n"
"""A comment, which clients skip; it shows proxies that the connection is alive."""


class AnswerStream(Response):
    """The streamed response to a request that has been validated and queued.

    A request that is rejected never gets this response, but a response with an HTTP error status. The headers are sent
    at once, before the first token, so a later error is an event that ends the stream without DONE. The first events
    are sent with the first token, because clients measure TTFT by them.

    It owns `choices` and `watch`: at its end it closes `choices` and cancels `watch`, in every case.
    """

    def __init__(
        self,
        choices: Choices,
        reply: Reply,
        prompts: PromptReplies,
        watch: asyncio.Task[None],
        *,
        headers: Mapping[str, str],
        comment_s: float,
    ) -> None:
        """`watch` is the task that waits for the client to disconnect.

        `comment_s` is the time without an event after which a comment is sent, in seconds.
        """
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache", **headers})
        del self.headers["content-length"]
        self._choices = choices
        self._reply = reply
        self._watch = watch
        self._prompts = prompts
        self._prompted: set[int] = set()
        """The numbers of the answers whose prompt has been sent or is not part of the reply."""
        self._comment_s = comment_s
        self._endings: dict[int, AnswerEnd] = {}
        self._opened = False
        self._over = False
        self._sent_s = 0.0
        """The event loop's time of the last send, in seconds."""
        self._sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the response as an ASGI application."""
        comments: asyncio.Task[None] | None = None
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            self._sent_s = asyncio.get_running_loop().time()
            comments = asyncio.create_task(self._comment(send))
            while not self._over:
                await self._send(send, await self._next_or_error())
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if comments is not None:
                comments.cancel()
            self._watch.cancel()
            self._choices.close()

    async def _send(self, send: Send, data: bytes) -> None:
        if not data:
            return
        self._sent_s = asyncio.get_running_loop().time()
        self._sending = True
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._sending = False

    async def _comment(self, send: Send) -> None:
        """Send a comment if nothing was sent for `comment_s` seconds, but never while an event is being sent."""
        clock = asyncio.get_running_loop().time
        # A failed send is not reported here, because the task that sends the events fails and reports it, too.
        with contextlib.suppress(Exception):
            while True:
                wait_s = self._comment_s if self._sending else self._sent_s + self._comment_s - clock()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                else:
                    self._sent_s = clock()
                    await send({"type": "http.response.body", "body": COMMENT, "more_body": True})

    async def _next(self) -> bytes:
        index, event = await self._choices.next()
        event = self._reply.event(event)
        opening = b"" if self._opened else self._reply.opening(len(self._choices))
        self._opened = True
        if index not in self._prompted:
            opening += await self._prompt(index)
        if not isinstance(event, AnswerEnd):
            return opening + self._reply.chunk(index, event)
        self._endings[index] = event
        self._over = self._choices.over
        closing = self._reply.closing(self._endings) if self._over else b""
        return opening + self._reply.ending(index, event) + closing

    async def _prompt(self, index: int) -> bytes:
        """Return the event with the prompt of answer number `index`.

        It is built in a thread, because the scores of a prompt may be megabytes of text.
        """
        self._prompted.add(index)
        prompt = await self._prompts.of(index)
        return b"" if prompt is None else await asyncio.to_thread(self._reply.prompt, index, prompt)

    async def _next_or_error(self) -> bytes:
        try:
            return await self._next()
        except TandemError as error:
            self._over = True
            return self._reply.failure(error)
