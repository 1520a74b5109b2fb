"""SIGKILL of a worker: clear errors at once, and a cluster that heals without a hand, on the same router."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from wire.generated.tandem.v1 import inference_pb2, inference_pb2_grpc
from wire.rpc import open_channel

DEADLINE_S = 5.0


def long_request(tokens: int) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        text="Once upon a time, in a small town by the sea, " * 20,
        options=inference_pb2.GenerationOptions(max_tokens=tokens, temperature=0, ignore_eos=True),
    )


async def in_flight_when_killed(address: str, kill: Callable[[], None]) -> list[tuple[grpc.StatusCode, str, float]]:
    """Status, words and seconds after the kill of eight requests: some decoding, some still in prefill."""
    channel = open_channel(address)
    stub = inference_pb2_grpc.InferenceStub(channel)
    killed_at = 0.0

    async def one(started: asyncio.Event) -> tuple[grpc.StatusCode, str, float]:
        try:
            async for _ in stub.Generate(long_request(300), timeout=120):
                started.set()
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or "", time.monotonic() - killed_at
        finally:
            started.set()
        return grpc.StatusCode.OK, "", time.monotonic() - killed_at

    events = [asyncio.Event() for _ in range(8)]
    calls = [asyncio.ensure_future(one(event)) for event in events]
    await events[0].wait()
    kill()
    killed_at = time.monotonic()
    results = await asyncio.gather(*calls)
    await channel.close()
    return results


async def serves_again(address: str, within_s: float) -> int:
    """Tokens of the first request that works again."""
    channel = open_channel(address)
    stub = inference_pb2_grpc.InferenceStub(channel)
    give_up = time.monotonic() + within_s
    while True:
        try:
            got = [t async for m in stub.Generate(long_request(16), timeout=60) for t in m.chunk.token_ids]
            await channel.close()
            return len(got)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > give_up:
                raise
            await asyncio.sleep(0.5)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_sigkill(role: str, fresh_cluster: Callable[..., Any]) -> None:
    cluster = fresh_cluster(dtype="float32", page_tokens=16, max_step_tokens=64)
    before = cluster.worker(role)

    results = asyncio.run(in_flight_when_killed(cluster.grpc_address, lambda: os.kill(before.pid, signal.SIGKILL)))
    if role == "decode":
        assert {code for code, _, _ in results} == {grpc.StatusCode.UNAVAILABLE}
    for code, words, seconds in results:
        if code is not grpc.StatusCode.OK:
            assert code is grpc.StatusCode.UNAVAILABLE
            assert role in words, words
            assert seconds < DEADLINE_S
    assert any(code is grpc.StatusCode.UNAVAILABLE for code, _, _ in results)

    assert asyncio.run(serves_again(cluster.grpc_address, 90)) == 16
    after = cluster.worker(role)
    assert after.incarnation != before.incarnation
    assert after.pid != before.pid
    cluster.assert_idle_and_sound()
