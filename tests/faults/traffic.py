"""Requests in flight while a step fails or a worker is suspended, and the first request that succeeds again."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from tandem.net.rpc import open_client_channel
from tandem.protocol.generated.tandem.v1 import inference_pb2, inference_pb2_grpc

from .moments import busy
from .streams import Client, Question, Stream

QUESTION = Question(tuple(3 + n % 4000 for n in range(240)), 300)
LATER = 7
IN_DECODE = 3
"""The number of tokens from which a request is certainly in decode: the prefill worker sends only one."""


async def in_flight_when(address: str, breaks: Callable[[], None]) -> tuple[list[Stream], float]:
    """Sends eight requests and makes a step fail when one decodes and seven are queued; returns them and the time."""
    async with Client(address) as client:
        streams = [client.ask(QUESTION)]
        await streams[0].reached(1)
        breaks()
        broken_at = time.monotonic()
        streams += [client.ask(QUESTION) for _ in range(LATER)]
        await asyncio.gather(*(stream.task for stream in streams))
        return streams, broken_at


async def in_flight_when_suspended(cluster: Any, questions: Sequence[Question]) -> tuple[list[Stream], Any]:
    """Returns streams, once they have ended, and the decode worker of some that was suspended while it decoded."""
    async with Client(cluster.grpc_address) as client:
        streams = [client.ask(question) for question in questions]
        await asyncio.gather(*(stream.reached(IN_DECODE) for stream in streams))
        decoding = await asyncio.to_thread(busy, cluster, "decode", lambda one: one.requests)
        victim = cluster.named(decoding[0])
        os.kill(victim.pid, signal.SIGSTOP)
        await asyncio.gather(*(stream.task for stream in streams))
        return streams, victim


async def serves_again(address: str, within_s: float, request: inference_pb2.GenerateRequest) -> int:
    """Returns the number of tokens of the first request that succeeds again."""
    channel = open_client_channel(address)
    stub = inference_pb2_grpc.InferenceStub(channel)
    deadline_s = time.monotonic() + within_s
    while True:
        try:
            got = [t async for m in stub.Generate(request, timeout=60) for t in m.chunk.token_ids]
            await channel.close()
            return len(got)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > deadline_s:
                raise
            await asyncio.sleep(0.5)
