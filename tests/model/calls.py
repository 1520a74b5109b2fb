"""The model's replacement of gRPC: clients get a `Channel` where they would have opened one of gRPC's.

Servers are the real servicers. Requests and replies travel as single messages. As over TCP, the messages of one stream
stay in order, and a message is lost only together with all that follow it. A call ends with its reply, at its deadline,
or when its connection breaks.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from typing import Any

import grpc
import grpc.aio

from tandem.net.rpc import ERROR_CODE, RETRY_AFTER
from tandem.protocol.errors import Internal, TandemError
from tests.model.network import Network
from tests.model.processes import Process


def rpc_error(error: TandemError) -> grpc.aio.AioRpcError:
    """Return the gRPC error that a client gets for a typed error of the server."""
    trailing = [(ERROR_CODE, error.code)]
    if error.retry_after_s:
        trailing.append((RETRY_AFTER, f"{error.retry_after_s:g}"))
    return grpc.aio.AioRpcError(
        error.grpc_status, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details=error.message
    )


def transport_error(code: grpc.StatusCode, why: str) -> grpc.aio.AioRpcError:
    """Return the gRPC error that a client gets when no server has replied."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=why)


def connection_lost() -> grpc.aio.AioRpcError:
    return transport_error(grpc.StatusCode.UNAVAILABLE, "the connection was lost")


class Channel:
    """A client's connection to an address, with the part of gRPC's channel interface that the product uses."""

    def __init__(self, network: Network, client: Process, address: str) -> None:
        self.network = network
        self.client = client
        self.address = address

    def unary_unary(self, method: str, **_: object) -> Callable[..., "asyncio.Future[Any]"]:
        name = method.rpartition("/")[2]
        return lambda request, timeout: UnaryCall(self, name, request, timeout).reply

    def unary_stream(self, method: str, **_: object) -> Callable[..., "StreamCall"]:
        name = method.rpartition("/")[2]
        return lambda request, wait_for_ready=False: StreamCall(self, name, request)

    async def close(self) -> None:
        """End every call as if its caller had cancelled it, as gRPC does."""
        for call in [call for call in self.network.calls if call.is_on(self)]:
            call.cancel()


class Call(ABC):
    """A call that has not ended for its client."""

    def __init__(self, channel: Channel, method: str, request: object) -> None:
        self.channel = channel
        self.network = channel.network
        self.client = channel.client
        self.address = channel.address
        self.method = method
        self.request = request
        self.server: Process | None = None
        self.network.calls.append(self)
        key = (self.client.name, self.address, method, "call")
        self.network.send(key, self._arrive, fragile=isinstance(self, UnaryCall))

    def lose_connection(self) -> None:
        """End the call, because its connection is lost."""
        self._to_client("lost", connection_lost())

    def is_on(self, channel: object) -> bool:
        return self.channel is channel

    @abstractmethod
    def cancel(self) -> None:
        """Cancel the call on behalf of the client."""

    def _arrive(self) -> None:
        listener = self.network.listener(self.address)
        if listener is None:
            self._to_client("refused", connection_lost())
            return
        self.server, servicer = listener
        self.server.run(self.network.loop.create_task, self._serve(servicer))

    async def _serve(self, servicer: Any) -> None:
        try:
            await self._answer(getattr(servicer, self.method))
        except TandemError as error:
            self._to_client("error", rpc_error(error))
        except Exception as error:
            self.network.report(f"{self.method} at {self.address}: {error!r}")
            self._to_client("error", rpc_error(Internal("unexpected; see the log")))

    @abstractmethod
    async def _answer(self, handler: Callable[..., Any]) -> None: ...

    @abstractmethod
    def _to_client(self, what: str, outcome: object) -> None: ...

    def _over(self, *_: object) -> None:
        if self in self.network.calls:
            self.network.calls.remove(self)


class UnaryCall(Call):
    """A call with one request and one reply."""

    def __init__(self, channel: Channel, method: str, request: object, timeout: float) -> None:
        loop = channel.network.loop
        self.reply: asyncio.Future[Any] = loop.create_future()
        self.reply.add_done_callback(self._over, context=Context())
        late = transport_error(grpc.StatusCode.DEADLINE_EXCEEDED, "no reply came in time")
        deadline = loop.call_later(timeout, self._end, late)
        self.reply.add_done_callback(lambda _: deadline.cancel(), context=Context())
        super().__init__(channel, method, request)

    def cancel(self) -> None:
        self.reply.cancel()

    async def _answer(self, handler: Callable[..., Any]) -> None:
        self._to_client("reply", await handler(self.request, None))

    def _to_client(self, what: str, outcome: object) -> None:
        key = (self.address, self.client.name, self.method, what)
        self.network.send(key, lambda: self._end(outcome), fragile=what == "reply")

    def _end(self, outcome: object) -> None:
        if self.reply.done():
            return
        if isinstance(outcome, Exception):
            self.reply.set_exception(outcome)
            self.reply.exception()  # mark the error as retrieved, because the caller may be dead
        else:
            self.reply.set_result(outcome)


class StreamCall(Call):
    """A call with one request and many replies in order; it is also the servicer's context."""

    _END = object()

    def __init__(self, channel: Channel, method: str, request: object) -> None:
        super().__init__(channel, method, request)
        self.network.streams += 1
        self._line = (self.address, self.client.name, method, "stream", self.network.streams)
        self._received: deque[object] = deque()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._done: list[Callable[[Any], object]] = []
        self._broken = False

    async def initial_metadata(self) -> None:
        # Metadata come with an error, too.
        with suppress(grpc.aio.AioRpcError):
            await self._first()

    def done(self) -> bool:
        return self not in self.network.calls

    def __aiter__(self) -> "StreamCall":
        return self

    async def __anext__(self) -> Any:
        item = await self._first()
        if item is self._END:
            raise StopAsyncIteration
        return self._received.popleft()

    def cancel(self) -> None:
        self._reset("cancel")
        self._receive(connection_lost())

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        self._done.append(callback)

    def lose_connection(self) -> None:
        self._reset("lost")
        self._to_client("lost", connection_lost())

    async def _first(self) -> object:
        try:
            while not self._received:
                self._changed.clear()
                await self._changed.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if isinstance(self._received[0], Exception):
            raise self._received[0]
        return self._received[0]

    def _arrive(self) -> None:
        if not self._broken:
            super()._arrive()

    async def _answer(self, handler: Callable[..., Any]) -> None:
        self._task = asyncio.current_task()
        try:
            async for item in handler(self.request, self):
                self._to_client("item", item)
            self._to_client("end", self._END)
        finally:
            while self._done:
                self._done.pop()(self)

    def _to_client(self, what: str, outcome: object) -> None:
        if what == "item" and self._broken:
            return
        self.network.send_in_line(self._line, lambda: self._receive(outcome))

    def _receive(self, item: object) -> None:
        if item is self._END or isinstance(item, Exception):
            self._over()
        self._received.append(item)
        self._changed.set()

    def _reset(self, why: str) -> None:
        """Stop the stream.

        The client receives only messages that are already in flight, and the server is notified of the end.
        """
        if not self._broken:
            self._broken = True
            self.network.send((self.client.name, self.address, self.method, why), self._end_at_server)

    def _end_at_server(self) -> None:
        if self._task is not None and self.server is not None:
            self.server.run(self._task.cancel)
