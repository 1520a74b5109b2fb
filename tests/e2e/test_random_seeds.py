"""A seed gives the same answer whatever other requests are running."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tandem.net.rpc import open_client_channel
from tandem.protocol.generated.tandem.v1 import inference_pb2, inference_pb2_grpc


async def sample(stub: inference_pb2_grpc.InferenceStub, prompt: tuple[int, ...], seed: int | None) -> tuple[int, ...]:
    options = inference_pb2.GenerationOptions(max_tokens=8, temperature=1.0, top_p=0.95, seed=seed, ignore_eos=True)
    request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=prompt), options=options)
    got: list[int] = []
    async for message in stub.Generate(request, timeout=120):
        got += message.chunk.token_ids
    return tuple(got)


async def alone_and_in_company(address: str, prompts: list[tuple[int, ...]]) -> tuple[set[Any], set[Any]]:
    channel = open_client_channel(address)
    stub = inference_pb2_grpc.InferenceStub(channel)
    alone = await sample(stub, prompts[0], 7)
    company = await asyncio.gather(*(sample(stub, prompts[i % 8], 7 if i % 8 == 0 else i) for i in range(9)))
    unseeded = await asyncio.gather(*(sample(stub, prompts[0], None) for _ in range(2)))
    await channel.close()
    return {alone, *company[::8]}, set(unseeded)


def test_seed_is_reproducible_in_any_batch(running_cluster: Callable[..., Any], prompts: list[tuple[int, ...]]) -> None:
    cluster = running_cluster(dtype="float32", page_tokens=16, max_step_tokens=128)
    seeded, unseeded = asyncio.run(alone_and_in_company(cluster.grpc_address, prompts))
    assert len(seeded) == 1
    assert len(unseeded) > 1
