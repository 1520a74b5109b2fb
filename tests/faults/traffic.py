"""Requests in flight while something breaks, and the first one that works again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import grpc

from wire.generated.tandem.v1 import inference_pb2, inference_pb2_grpc
from wire.rpc import open_channel

REQUESTS = 8


def long_request(tokens: int) -> inference_pb2.GenerateRequest:
    """Computed and sent whole, however often it was asked before."""
    salt = str(time.time_ns())
    return inference_pb2.GenerateRequest(
        text="Once upon a time, in a small town by the sea, " * 20,
        options=inference_pb2.GenerationOptions(max_tokens=tokens, temperature=0, ignore_eos=True, cache_salt=salt),
    )


async def in_flight_when(address: str, breaks: Callable[[], None]) -> list[tuple[grpc.StatusCode, str, float]]:
    """Status, words and seconds after the break of eight requests: some decoding, some still in prefill."""
    channel = open_channel(address)
    stub = inference_pb2_grpc.InferenceStub(channel)
    broken_at = 0.0

    started = asyncio.Event()

    async def one() -> tuple[grpc.StatusCode, str, float]:
        try:
            async for _ in stub.Generate(long_request(300), timeout=120):
                started.set()
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or "", time.monotonic() - broken_at
        finally:
            started.set()
        return grpc.StatusCode.OK, "", time.monotonic() - broken_at

    calls = [asyncio.ensure_future(one()) for _ in range(REQUESTS)]
    await started.wait()
    breaks()
    broken_at = time.monotonic()
    results = await asyncio.gather(*calls)
    await channel.close()
    return results


async def serves_again(address: str, within_s: float, request: inference_pb2.GenerateRequest | None = None) -> int:
    """Tokens of the first request that works again."""
    request = request or long_request(16)
    channel = open_channel(address)
    stub = inference_pb2_grpc.InferenceStub(channel)
    give_up = time.monotonic() + within_s
    while True:
        try:
            got = [t async for m in stub.Generate(request, timeout=60) for t in m.chunk.token_ids]
            await channel.close()
            return len(got)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > give_up:
                raise
            await asyncio.sleep(0.5)
