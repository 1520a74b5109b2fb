"""The cluster gives transformers' tokens: any page size, any chunk size, any number of workers, all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.reference import Expected, Reference, compare
from wire.generated.tandem.v1 import inference_pb2, inference_pb2_grpc
from wire.rpc import open_channel

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
    "colocated, steps of 100": {"mode": "colocated", "step_policy": "chunked", "step_budget": 100},
    "two colocated, who decodes first": {"mode": "colocated", "workers": 2, "step_policy": "decode-priority"},
}


async def ask(
    stub: inference_pb2_grpc.InferenceStub, prompt: tuple[int, ...], tokens: int, salt: str = ""
) -> tuple[list[int], Any]:
    """Token ids and the closing message of one greedy request."""
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt),
        options=inference_pb2.GenerationOptions(max_tokens=tokens, temperature=0, ignore_eos=True, cache_salt=salt),
    )
    got: list[int] = []
    async for message in stub.Generate(request, timeout=240):
        if message.HasField("complete"):
            return got, message.complete
        got += message.chunk.token_ids
    raise AssertionError("the stream ended without a closing message")


async def ask_all(
    address: str, prompts: list[tuple[int, ...]], tokens: int, salt: str = ""
) -> list[tuple[list[int], Any]]:
    """All prompts at once."""
    channel = open_channel(address)
    try:
        stub = inference_pb2_grpc.InferenceStub(channel)
        return await asyncio.gather(*(ask(stub, p, tokens, salt) for p in prompts))
    finally:
        await channel.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("shape", SHAPES)
def test_same_tokens(
    shape: str,
    running_cluster: Callable[..., Any],
    expected: list[Expected],
    reference: Reference,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster = running_cluster(dtype="float32", **SHAPES[shape])
    answers = asyncio.run(ask_all(cluster.grpc_address, [e.prompt for e in expected], len(expected[0].tokens)))
    for wanted, (tokens, complete) in zip(expected, answers, strict=True):
        assert complete.prompt_tokens == len(wanted.prompt)
        assert complete.completion_tokens == len(tokens)
        for tie in compare(tokens, wanted, reference):
            with capsys.disabled():
                print(f"\n{shape}: {tie}")
    cluster.assert_idle_and_sound()


@pytest.mark.timeout(600)
def test_the_same_tokens_from_the_caches(
    running_cluster: Callable[..., Any], expected: list[Expected], reference: Reference
) -> None:
    """Each prompt once more, and then with most of its answer behind it, as the next turn of a conversation has it."""
    cluster = running_cluster(dtype="float32", **SHAPES["pages of 16, chunks of 512"])
    tokens, salt = len(expected[0].tokens), "conversation"
    answers: list[tuple[list[int], Any]] = []
    for turn in range(3):
        behind = tokens - 3 if turn == 2 else 0
        said = [got[:behind] for got, _ in answers] or [[]] * len(expected)
        asked = [(*wanted.prompt, *begun) for wanted, begun in zip(expected, said, strict=True)]
        answers = asyncio.run(ask_all(cluster.grpc_address, asked, tokens - behind, salt))
        for wanted, begun, prompt, (got, complete) in zip(expected, said, asked, answers, strict=True):
            compare([*begun, *got], wanted, reference)
            if turn:
                assert complete.cached_tokens == (len(wanted.prompt) - (0 if behind else 1)) // 16 * 16
                # The decode worker has what it has generated, too.
                assert complete.timeline.transfer.pages == -(-len(prompt) // 16) - (len(prompt) - 1) // 16
    cluster.assert_idle_and_sound()


def counting(prompt: tuple[int, ...], tokens: int) -> Expected:
    """A reference that counts on from the prompt's last token; 10 and its second best, 20, are a tie."""
    numbers = tuple(range(prompt[-1] + 1, prompt[-1] + 1 + tokens))
    gaps = tuple(1e-4 if number == 10 else 1.0 for number in numbers)
    return Expected(prompt, numbers, tuple(number + 10 for number in numbers), gaps)


def test_a_tie_is_told_and_the_rest_still_compared() -> None:
    expected = counting((7,), 5)
    assert compare([8, 9, 10, 11, 12], expected, counting) == []
    (tie,) = compare([8, 9, 20, 21, 22], expected, counting)
    assert "prompt of 1 tokens, token 2" in tie
    wrong = ([8, 9, 10, 11, 22], [8, 9, 20, 11, 12], [8, 9, 30, 31, 32], [8, 9, 20, 21, 32], [8, 9, 10])
    for tokens in wrong:
        with pytest.raises(AssertionError):
            compare(tokens, expected, counting)


def test_the_transfer_is_real(running_cluster: Callable[..., Any], prompts: list[tuple[int, ...]]) -> None:
    cluster = running_cluster(dtype="float32", page_tokens=16, max_step_tokens=512)
    (_, complete), *_ = asyncio.run(ask_all(cluster.grpc_address, [prompts[12]], 4, salt="real"))
    transfer = complete.timeline.transfer
    pages = -(-len(prompts[12]) // 16)
    assert transfer.backend == "UCX"
    assert transfer.pages == pages
    assert transfer.bytes == pages * 30 * 2 * 3 * 16 * 64 * 4
    assert complete.timeline.prefill_worker != complete.timeline.decode_worker
