"""The clients: one process that reads many answers over gRPC or HTTP, and clients that leave their answers unread."""

import asyncio
import json
import socket
import time
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import grpc.aio

from benchmarks.router.token_source import age_of
from tandem.net.heap import freeze_gc
from tandem.protocol.generated.tandem.v1 import inference_pb2, inference_pb2_grpc

PROMPT = tuple(range(1000, 1020))
_CHUNK = b'"text"'
_READ_BYTES = 1 << 16
_SMALL_BUFFER = 4096


@dataclass(frozen=True, slots=True)
class Answers:
    """The messages that a client process has read; ages are seconds from a token's sending to its reading."""

    answers: int
    """The number of complete answers."""
    tokens: int
    messages: int
    ages_s: tuple[float, ...]
    """The age of the newest token of each message; empty over HTTP, which carries no token ids."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The number of concurrent answers, the tokens of each, and whether to record ages."""

    answers: int
    tokens: int
    keep_ages: bool = False


_CALLS_A_CONNECTION = 500
"""Calls per connection: half of what a router accepts concurrently over one connection."""


def run_readers(pipe: Connection, kind: str, address: str, asked: Asked) -> None:
    """Run the client process, and send the `Answers` through `pipe` once all have been read."""
    freeze_gc()
    read = {"grpc": _read_grpc, "http": _read_http}[kind]
    pipe.send(asyncio.run(read(address, asked)))


async def _read_grpc(address: str, asked: Asked) -> Answers:
    ages: list[float] = []

    async def one(stub: Any) -> tuple[int, int]:
        brought = messages = 0
        async for message in stub.Generate(_request(asked.tokens)):
            if message.HasField("chunk"):
                brought, messages = brought + len(message.chunk.token_ids), messages + 1
                if asked.keep_ages:
                    ages.append(age_of(message.chunk.token_ids[-1], time.monotonic()))
        return brought, messages

    async with AsyncExitStack() as stack:
        stubs = []
        for _ in range(0, asked.answers, _CALLS_A_CONNECTION):
            # Channels with separate subchannel pools do not share a connection.
            own = grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
            stubs.append(inference_pb2_grpc.InferenceStub(await stack.enter_async_context(own)))
        reading = [one(stubs[number // _CALLS_A_CONNECTION]) for number in range(asked.answers)]
        return await _all(reading, asked.tokens, ages)


async def _read_http(address: str, asked: Asked) -> Answers:
    async def one() -> tuple[int, int]:
        reader, writer = await asyncio.open_connection(*_host_port(address))
        writer.write(_http_request(asked.tokens))
        messages, left = 0, b""
        while piece := await reader.read(_READ_BYTES):
            left += piece
            messages += left.count(_CHUNK)
            left = left[-len(_CHUNK) + 1 :] if _CHUNK not in left[-len(_CHUNK) :] else b""
        writer.close()
        return asked.tokens if messages else 0, messages

    return await _all([one() for _ in range(asked.answers)], asked.tokens, [])


async def _all(reading: list[Coroutine[Any, Any, tuple[int, int]]], tokens: int, ages: list[float]) -> Answers:
    counts = await asyncio.gather(*reading)
    brought, messages = (sum(column) for column in zip(*counts, strict=True))
    return Answers(sum(count == tokens for count, _ in counts), brought, messages, tuple(ages))


def _request(tokens: int) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=PROMPT),
        options=inference_pb2.GenerationOptions(max_tokens=tokens, ignore_eos=True),
    )


def _http_request(tokens: int) -> bytes:
    body = {"model": "tokens", "prompt": list(PROMPT), "max_tokens": tokens, "ignore_eos": True, "stream": True}
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}"
    return f"{head}\r\nContent-Type: application/json\r\n\r\n".encode() + content


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


@contextmanager
def not_reading(grpc_address: str, http_address: str, tokens: int) -> Iterator[None]:
    """Keep one answer over gRPC and one over HTTP open within the context, without reading them."""
    with grpc.insecure_channel(grpc_address) as channel, socket.socket() as connection:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(_request(tokens))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)
        connection.connect(_host_port(http_address))
        connection.sendall(_http_request(tokens))
        yield
        call.cancel()
