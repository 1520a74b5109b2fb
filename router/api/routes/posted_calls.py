"""The part of a request's way that all routes with a posted body share: reading, submission, clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response

from router.access.client_call import served_call
from router.api.answer_stream import AnswerStream
from router.api.client_gone import unless_gone
from router.api.completions.prompt_replies import PromptReplies
from router.api.http_body import disconnected, read_body
from router.api.replies.reply import StreamedReply
from router.api.request_id import REQUEST_ID_HEADER
from router.api.unserved_fields import IGNORED_HEADER, IgnoredLog
from router.config import RouterConfig
from router.requests.choices import Choices
from router.requests.dispatch import Dispatcher
from router.requests.request import Admitted
from router.requests.validation import RequestValidator
from tandem.protocol.errors import InvalidArgument, TandemError
from tandem.protocol.lifecycle.timeline import EdgeStamp


class ParsedCall(Protocol):
    """A parsed body."""

    @property
    def stream(self) -> bool:
        """True if the answer is streamed."""

    @property
    def ignored(self) -> tuple[str, ...]:
        """The names of the ignored fields, fit for a header."""


_T = TypeVar("_T")
_C = TypeVar("_C", bound=ParsedCall)


@dataclass(frozen=True, slots=True)
class Submitted:
    """The answers to a call, and the task that ends when its client has left."""

    choices: Choices
    gone: asyncio.Task[None]


@dataclass(frozen=True, slots=True)
class PostedCalls:
    """Reads and submits calls. Belongs to the event loop."""

    config: RouterConfig
    validator: RequestValidator
    dispatcher: Dispatcher
    ignored: IgnoredLog

    async def submitted(
        self, request: Request, admit: Callable[[bytes], Coroutine[Any, Any, tuple[_C, Sequence[Admitted]]]]
    ) -> tuple[_C, Sequence[Admitted], Submitted]:
        """Read a body and submit what `admit` makes of it; a client that leaves ends all of it."""
        body = await self.body(request)
        gone = asyncio.create_task(disconnected(request.receive))
        try:
            call, admitted = await unless_gone(admit(body), gone)
            choices = self.dispatcher.submit(*admitted)
        except BaseException:
            gone.cancel()
            raise
        gone.add_done_callback(lambda _: choices.close())
        return call, admitted, Submitted(choices, gone)

    async def body(self, request: Request) -> bytes:
        """Return the body of a request; one that is too large is counted as rejected."""
        try:
            return await read_body(request, self.config.listeners.max_request_bytes)
        except InvalidArgument as error:
            self.dispatcher.metrics.refused("", error)
            raise

    async def parsed(self, body: bytes, parse: Callable[..., _T], received: EdgeStamp) -> _T:
        """Parse a body in a thread; rejected ones are counted."""
        reading = partial(parse, received=received, strict=self.config.strict_requests)
        try:
            return await self.validator.reader.json(served_call().caller.tenant, body, reading)
        except TandemError as error:
            self.dispatcher.metrics.refused("", error)
            raise

    async def unless_gone(self, request: Request, work: Coroutine[Any, Any, _T]) -> _T:
        """Return what `work` returns; cancelled if the client of a request, whose body has been read, leaves."""
        gone = asyncio.create_task(disconnected(request.receive))
        try:
            return await unless_gone(work, gone)
        finally:
            gone.cancel()

    async def respond(
        self,
        call: ParsedCall,
        submitted: Submitted,
        reply: StreamedReply,
        whole: Callable[[], Awaitable[bytes]],
        *,
        prompts: PromptReplies | None = None,
    ) -> Response:
        """Return the response: a stream of the reply's events, or what `whole` returns once the answers are there."""
        choices, gone = submitted.choices, submitted.gone
        headers = {REQUEST_ID_HEADER: reply.answer_id, **self.ignored_header(call)}
        if call.stream:
            comment_s = self.config.sse_comment_s
            return AnswerStream(choices, reply, gone, headers=headers, comment_s=comment_s, prompts=prompts)
        try:
            return Response(await whole(), headers=headers, media_type="application/json")
        finally:
            gone.cancel()
            choices.close()

    def ignored_header(self, call: ParsedCall) -> dict[str, str]:
        """Log the ignored fields, and return the header that names them."""
        self.ignored.note(call.ignored)
        return {IGNORED_HEADER: ", ".join(call.ignored)} if call.ignored else {}
