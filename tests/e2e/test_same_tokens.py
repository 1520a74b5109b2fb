"""The cluster gives transformers' tokens: any page size, any chunk size, any number of workers, all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from wire.generated.tandem.v1 import inference_pb2, inference_pb2_grpc
from wire.rpc import open_channel

TIE = 1e-3
"""Two best logits of the reference closer than this may be taken in either order."""

SHAPES = {
    "pages of 16, chunks of 512": {"page_tokens": 16, "max_step_tokens": 512},
    "pages of 128, chunks of 64": {"page_tokens": 128, "max_step_tokens": 64},
    "pages of 16, chunks of 64": {"page_tokens": 16, "max_step_tokens": 64},
    "pages of 128, chunks of 512, two and two": {
        "page_tokens": 128,
        "max_step_tokens": 512,
        "prefill": 2,
        "decode": 2,
    },
}


async def ask(stub: inference_pb2_grpc.InferenceStub, prompt: tuple[int, ...], tokens: int) -> tuple[list[int], Any]:
    """Token ids and the closing message of one greedy request."""
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt),
        options=inference_pb2.GenerationOptions(max_tokens=tokens, temperature=0, ignore_eos=True),
    )
    got: list[int] = []
    async for message in stub.Generate(request, timeout=240):
        if message.HasField("complete"):
            return got, message.complete
        got += message.chunk.token_ids
    raise AssertionError("the stream ended without a closing message")


async def ask_all(address: str, prompts: list[tuple[int, ...]], tokens: int) -> list[tuple[list[int], Any]]:
    """All prompts at once."""
    channel = open_channel(address)
    try:
        stub = inference_pb2_grpc.InferenceStub(channel)
        return await asyncio.gather(*(ask(stub, p, tokens) for p in prompts))
    finally:
        await channel.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("shape", SHAPES)
def test_same_tokens(shape: str, running_cluster: Callable[..., Any], expected: list[Any]) -> None:
    cluster = running_cluster(dtype="float32", **SHAPES[shape])
    answers = asyncio.run(ask_all(cluster.grpc_address, [e.prompt for e in expected], len(expected[0].tokens)))
    for reference, (tokens, complete) in zip(expected, answers, strict=True):
        length = len(reference.prompt)
        assert len(tokens) == len(reference.tokens), f"prompt of {length} tokens"
        assert complete.prompt_tokens == length
        assert complete.completion_tokens == len(tokens)
        for i, (got, want) in enumerate(zip(tokens, reference.tokens, strict=True)):
            if got != want:
                assert reference.gaps[i] < TIE, f"prompt of {length} tokens differs at token {i}: {got}, not {want}"
                print(
                    f"tie: prompt of {length} tokens, token {i}: the two best logits lie {reference.gaps[i]:.1e} apart"
                )
                break
    cluster.assert_idle_and_sound()


def test_the_transfer_is_real(running_cluster: Callable[..., Any], prompts: list[tuple[int, ...]]) -> None:
    cluster = running_cluster(dtype="float32", page_tokens=16, max_step_tokens=512)
    (_, complete), *_ = asyncio.run(ask_all(cluster.grpc_address, [prompts[12]], 4))
    transfer = complete.timeline.transfer
    pages = -(-len(prompts[12]) // 16)
    assert transfer.backend == "UCX"
    assert transfer.pages == pages
    assert transfer.bytes == pages * 30 * 2 * 3 * 16 * 64 * 4
    assert complete.timeline.prefill_worker != complete.timeline.decode_worker
