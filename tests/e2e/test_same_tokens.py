"""The cluster generates the tokens of transformers, with any page size, chunk size, mode and number of workers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tandem.net.rpc import open_client_channel
from tandem.protocol.generated.tandem.v1 import inference_pb2, inference_pb2_grpc
from tests.e2e.conftest import PROMPT_LENGTHS
from tests.e2e.reference import Choices, Reference, compare
from tests.soak import SOAKING, soak

Prompt = tuple[int, ...]
NEW_TOKENS = 40 if SOAKING else 33
"""The answer length in tokens: every answer crosses two boundaries of pages of 16, some one of pages of 128."""
PAGE_TOKENS = 16
LENGTHS = set(PROMPT_LENGTHS) if SOAKING else {7, 15, 16, 17, 64, 127, 129, 300}
"""The prompt lengths in tokens: at the boundaries of pages and chunks, and between them."""
FIRST = {"page_tokens": PAGE_TOKENS, "max_step_tokens": 128}
"""The settings that other tests of this folder use too, so that they share its cluster."""
LARGE_PAGES = {
    "page_tokens": 128,
    "max_step_tokens": 64,
    "mode": "colocated",
    "workers": 4,
    "step_policy": "chunked",
    "step_budget": 48,
}


@dataclass(frozen=True)
class Shape:
    """A cluster's settings at its start, and the change of mode before the requests.

    `roles`: how many workers have each role then. `restore`: the change that makes a shared cluster what it was.
    `longest`: the longest prompt in tokens, which takes several steps; longer ones test nothing more.
    """

    start: dict[str, Any]
    roles: dict[str, int]
    change: dict[str, Any] = field(default_factory=dict)
    restore: dict[str, Any] = field(default_factory=dict)
    longest: int = 130


LONGEST = 600
"""The same of the shared cluster before any change of mode, with several chunks of 128 tokens."""
SHAPES = {
    "two colocated, who decode first": Shape(
        FIRST,
        {"both": 2},
        {"mode": "colocated", "step_policy": "decode-priority"},
        {"mode": "disaggregated", "prefill": 1, "decode": 1},
    ),
    "four colocated with pages of 128, steps of 48": Shape(LARGE_PAGES, {"both": 4}),
    "pages of 128, chunks of 64, two and two": Shape(
        LARGE_PAGES,
        {"prefill": 2, "decode": 2},
        {"mode": "disaggregated", "prefill": 2, "decode": 2, "step_policy": "decode-priority"},
        longest=300,
    ),
    "three ranks a worker": Shape({**FIRST, "tensor_parallel_size": 3}, {"prefill": 1, "decode": 1}),
}
"""One cluster starts disaggregated and one colocated, and each changes to the other mode."""


def up_to(longest: int, prompts: list[Prompt]) -> list[Prompt]:
    """Returns the prompts of `LENGTHS` that have at most `longest` tokens."""
    return [prompt for prompt in prompts if len(prompt) in LENGTHS and len(prompt) <= longest]


async def ask(
    stub: inference_pb2_grpc.InferenceStub, prompt: tuple[int, ...], tokens: int, salt: str = ""
) -> tuple[list[int], Any]:
    """Returns the token ids and the closing message of one greedy request."""
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
    """Sends all prompts at once."""
    channel = open_client_channel(address)
    try:
        stub = inference_pb2_grpc.InferenceStub(channel)
        return await asyncio.gather(*(ask(stub, p, tokens, salt) for p in prompts))
    finally:
        await channel.close()


@pytest.mark.timeout(600)
def test_answers_are_those_of_transformers_and_again_from_the_caches(
    running_cluster: Callable[..., Any], prompts: list[Prompt], reference: Reference, report_line: Callable[[str], None]
) -> None:
    """Sends each prompt twice, and then with most of its answer appended, as the next turn of a conversation does."""
    cluster = running_cluster(dtype="float32", **FIRST)
    prompts = up_to(LONGEST, prompts)
    salt, answers = "conversation", []
    for turn in range(3):
        known = NEW_TOKENS - 3 if turn == 2 else 0
        said = [got[:known] for got, _ in answers] or [[]] * len(prompts)
        asked = [(*prompt, *begun) for prompt, begun in zip(prompts, said, strict=True)]
        answers = asyncio.run(ask_all(cluster.grpc_address, asked, NEW_TOKENS - known, salt))
        for prompt, begun, whole, (got, complete) in zip(prompts, said, asked, answers, strict=True):
            check(prompt, [*begun, *got], reference, report_line)
            assert complete.prompt_tokens == len(whole)
            assert complete.completion_tokens == len(got)
            if turn:
                least = (len(prompt) - (0 if known else 1)) // PAGE_TOKENS * PAGE_TOKENS
                # The pages of the answer are on the decode worker, from which they may be pulled.
                assert least <= complete.cached_tokens <= (len(whole) - 1) // PAGE_TOKENS * PAGE_TOKENS
                # The decode worker has cached its generated tokens, too.
                pages = -(-len(whole) // PAGE_TOKENS) - (len(whole) - 1) // PAGE_TOKENS
                assert complete.timeline.transfer.pages == pages
    cluster.assert_idle_and_sound()


def test_every_page_of_a_prompt_is_transferred_by_ucx(
    running_cluster: Callable[..., Any], prompts: list[Prompt]
) -> None:
    cluster = running_cluster(dtype="float32", **FIRST)
    (_, complete), *_ = asyncio.run(ask_all(cluster.grpc_address, [prompts[12]], 4, salt="real"))
    transfer = complete.timeline.transfer
    pages = -(-len(prompts[12]) // PAGE_TOKENS)
    assert transfer.backend == "UCX"
    assert transfer.pages == pages
    assert transfer.bytes == pages * 30 * 2 * 3 * PAGE_TOKENS * 64 * 4
    assert complete.timeline.prefill_worker != complete.timeline.decode_worker


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [name if shape.start == FIRST else pytest.param(name, marks=soak) for name, shape in SHAPES.items()]
)
def test_answers_are_those_of_transformers_in_every_mode_and_size(
    name: str,
    running_cluster: Callable[..., Any],
    prompts: list[Prompt],
    reference: Reference,
    report_line: Callable[[str], None],
) -> None:
    shape = SHAPES[name]
    cluster = running_cluster(dtype="float32", **shape.start)
    if shape.change:
        asyncio.run(cluster.controller.set_mode(**shape.change))
    try:
        assert Counter(member.role for member in cluster.members()) == shape.roles
        asked = up_to(shape.longest, prompts)
        answers = asyncio.run(ask_all(cluster.grpc_address, asked, NEW_TOKENS, salt=name))
        for prompt, (tokens, complete) in zip(asked, answers, strict=True):
            assert complete.prompt_tokens == len(prompt)
            assert complete.completion_tokens == len(tokens)
            assert complete.cached_tokens == 0
            timeline = complete.timeline
            alone = timeline.decode_worker in {"", timeline.prefill_worker}
            assert alone == ("both" in shape.roles)
            check(prompt, tokens, reference, report_line)
        cluster.assert_idle_and_sound()
    finally:
        if shape.restore:
            asyncio.run(cluster.controller.set_mode(**shape.restore))


def check(prompt: Prompt, answer: list[int], reference: Reference, report_line: Callable[[str], None]) -> None:
    """Asserts that all tokens are there and equal the reference's; ties are reported."""
    assert len(answer) == NEW_TOKENS
    for tie in compare(prompt, answer, reference):
        report_line(tie)


@pytest.mark.parametrize("number", [3, pytest.param(12, marks=soak)])
def test_the_reference_reads_what_generate_writes(number: int, prompts: list[Prompt], reference: Reference) -> None:
    answer = reference.generate(prompts[number], 16)
    assert compare(prompts[number], answer, reference) == []
    with pytest.raises(AssertionError, match="token 7: 17, not"):
        compare(prompts[number], [*answer[:7], 17, *answer[8:]], reference)


def counting(prompt: Prompt, answer: Prompt) -> Choices:
    """A reference that counts upwards from the previous token; 10 and its second best, 20, are a tie."""
    best = tuple(token + 1 for token in (*prompt, *answer)[len(prompt) - 1 : -1])
    gaps = tuple(1e-4 if number == 10 else 1.0 for number in best)
    return Choices(best, tuple(number + 10 for number in best), gaps)


def test_a_tie_is_reported_and_the_rest_still_compared() -> None:
    assert compare((7,), [8, 9, 10, 11, 12], counting) == []
    (tie,) = compare((7,), [8, 9, 20, 21, 22], counting)
    assert "prompt of 1 tokens, token 2" in tie
    for wrong in ([8, 9, 10, 11, 22], [8, 9, 20, 11, 12], [8, 9, 30, 31, 32], [8, 9, 20, 21, 32]):
        with pytest.raises(AssertionError):
            compare((7,), wrong, counting)
