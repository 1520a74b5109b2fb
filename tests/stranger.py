"""A server that listens at the former port of a cluster process, and records everything it receives."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio

_BUFFER = 1 << 16


class Stranger:
    """A server that accepts every plaintext gRPC call and every connection.

    `start` and `stop` must run in the same event loop.
    """

    def __init__(self) -> None:
        self.connections = 0
        self.received = bytearray()
        """All received bytes, over all connections."""
        self.headers: list[tuple[str, Any]] = []
        """The headers of all received calls."""

    async def start(self, port: int = 0) -> Stranger:
        self._grpc = grpc.aio.server(interceptors=[_Notes(self.headers)])
        grpc_port = self._grpc.add_insecure_port("127.0.0.1:0")
        await self._grpc.start()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.connections += 1
            there_reader, there = await asyncio.open_connection("127.0.0.1", grpc_port)
            try:
                await asyncio.gather(_pass_on(reader, there, self.received), _pass_on(there_reader, writer))
            finally:
                there.close()
                writer.close()

        self._server = await asyncio.start_server(accept, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        return self

    async def stop(self) -> None:
        self._server.close()
        await self._grpc.stop(None)

    def assert_learned_nothing(self, token: str) -> None:
        """Assert that the server was called, but received neither the token nor any part of a call."""
        assert self.connections > 0, "nobody came"
        assert (self.headers, token.encode() in self.received) == ([], False)
        assert b"authorization" not in bytes(self.received).lower()


class _Notes(grpc.aio.ServerInterceptor):
    def __init__(self, headers: list[tuple[str, Any]]) -> None:
        self._headers = headers

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        self._headers += [("method", handler_call_details.method), *handler_call_details.invocation_metadata]
        return await continuation(handler_call_details)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, copy: bytearray | None = None) -> None:
    """Forward bytes until one side closes, then close the other."""
    try:
        while part := await reader.read(_BUFFER):
            if copy is not None:
                copy += part
            writer.write(part)
    except ConnectionError:
        pass
    finally:
        writer.close()
