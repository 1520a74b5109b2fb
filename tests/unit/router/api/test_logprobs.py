"""Log probabilities and penalties through gRPC and HTTP, over fake workers."""

import itertools
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from router.api.logprobs import chat_logprobs, completion_logprobs
from router.text.token_scores import ScoredToken, TokenScore
from router.text.tokenizer import Tokenizer
from tandem.protocol.generated.tandem.v1 import inference_pb2 as pb
from tandem.protocol.generated.tandem.v1 import inference_pb2_grpc
from tandem.protocol.messages import TokenLogprobs
from tests.unit.router.conftest import Cluster
from tests.unit.router.fake_cluster import answer_logprobs, answer_token, channel_to

PROMPT = [5, 6, 7, 8]
MESSAGES: list[Any] = [{"role": "user", "content": "Hello there"}]
TEXT = "Ωmega 你好 😀 the quick brown fox 🏳️‍🌈!"
MANY = 60
"""The length of an answer with some tokens that are parts of characters."""


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"http://{cluster.endpoints.http_address}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


async def run(cluster: Cluster, **options: Any) -> tuple[str, list[int], list[pb.TokenScore]]:
    """Returns text, token ids and log probabilities of one answer at the gRPC listener."""
    text, ids, scores = "", [], []
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), options=pb.GenerationOptions(**options))
    async with channel_to(cluster.endpoints.grpc_address) as channel:
        async for message in inference_pb2_grpc.InferenceStub(channel).Generate(request):
            assert len(message.chunk.logprobs) in (0, len(message.chunk.token_ids))
            text += message.chunk.text
            ids += message.chunk.token_ids
            scores += message.chunk.logprobs
    return text, ids, scores


def said(ids: list[int], top: int) -> list[TokenLogprobs]:
    """Returns the log probabilities that the fake workers report for these tokens."""
    return [answer_logprobs(token_id, top)[0] for token_id in ids]


def token_logprobs(scores: list[pb.TokenScore]) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(
            score.chosen.logprob,
            tuple(alternative.token_id for alternative in score.top),
            tuple(alternative.logprob for alternative in score.top),
        )
        for score in scores
    ]


@pytest.mark.parametrize("trouble", ["", "race", "retry"])
async def test_grpc_chunks_carry_one_for_each_token(cluster: Cluster, tokenizer: Tokenizer, trouble: str) -> None:
    cluster.prefill.switches.decode_first = trouble == "race"
    cluster.prefill.switches.fail_transfers = 2 if trouble == "retry" else 0
    _, ids, scores = await run(cluster, max_tokens=MANY, logprobs=3)
    assert ids == [answer_token(PROMPT, index) for index in range(MANY)]
    assert token_logprobs(scores) == said(ids, 3)
    assert [score.chosen.token_id for score in scores] == ids
    for token in itertools.chain.from_iterable((score.chosen, *score.top) for score in scores):
        assert token.utf8 == tokenizer.token_bytes(token.token_id)


async def test_only_the_chosen_token_or_nothing_at_all(cluster: Cluster) -> None:
    _, ids, scores = await run(cluster, max_tokens=5, logprobs=0)
    assert token_logprobs(scores) == said(ids, 0)
    assert (await run(cluster, max_tokens=5))[2] == []


async def test_a_stop_string_cuts_them_with_the_tokens(cluster: Cluster) -> None:
    whole, _, _ = await run(cluster, max_tokens=40)
    text, ids, scores = await run(cluster, max_tokens=40, logprobs=1, stop=[whole[12:15]])
    assert text == whole[: whole.index(whole[12:15])]
    assert len(scores) == len(ids) < 40


async def test_penalties_reach_the_workers(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    wanted = {"frequency_penalty": 0.5, "presence_penalty": -1.5, "repetition_penalty": 1.25}
    await run(cluster, max_tokens=3, **wanted)
    extra = {"repetition_penalty": wanted["repetition_penalty"]}
    penalties = {"frequency_penalty": 0.5, "presence_penalty": -1.5}
    await client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=3, logprobs=True, top_logprobs=20, extra_body=extra, **penalties
    )  # type: ignore[call-overload]
    await client.completions.create(model="fake", prompt="x", max_tokens=3, logprobs=5, extra_body=extra, **penalties)  # type: ignore[call-overload]
    await run(cluster, max_tokens=3)
    for sampling, logprobs in zip(
        [prefill.sampling for prefill in cluster.prefill.prefills], (None, 20, 5), strict=False
    ):
        assert {name: getattr(sampling, name) for name in wanted} == wanted
        assert sampling.logprobs == logprobs
    assert [reservation.sampling for reservation in cluster.decode.reservations] == [
        p.sampling for p in cluster.prefill.prefills
    ]
    assert not cluster.prefill.prefills[-1].sampling.penalized


@pytest.mark.parametrize("stream", [False, True])
async def test_chat(cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer, stream: bool) -> None:
    reply = await client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=MANY, logprobs=True, top_logprobs=2, stream=stream
    )
    if isinstance(reply, openai.AsyncStream):
        choices = [chunk.choices[0] async for chunk in reply]
        text = "".join(choice.delta.content or "" for choice in choices)
        entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content or ()]
        assert sum(bool(choice.logprobs) for choice in choices) > 1
    else:
        text = reply.choices[0].message.content or ""
        assert reply.choices[0].logprobs is not None
        entries = reply.choices[0].logprobs.content or []
    prompt = cluster.prefill.prefills[-1].prompt_token_ids
    ids = [answer_token(prompt, index) for index in range(MANY)]
    assert [entry.bytes for entry in entries] == [list(tokenizer.token_bytes(token_id)) for token_id in ids]
    assert bytes(itertools.chain.from_iterable(entry.bytes or () for entry in entries)).decode(errors="replace") == text
    for entry, wanted in zip(entries, said(ids, 2), strict=True):
        assert entry.logprob == wanted.chosen
        assert [other.logprob for other in entry.top_logprobs] == list(wanted.top)
        assert [bytes(o.bytes or ()) for o in entry.top_logprobs] == [tokenizer.token_bytes(i) for i in wanted.top_ids]


@pytest.mark.parametrize("stream", [False, True])
async def test_completion(cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer, stream: bool) -> None:
    ids = tokenizer.encode(TEXT)
    cluster.prefill.answer = cluster.decode.answer = lambda _prompt, index: ids[index]
    reply = await client.completions.create(model="fake", prompt="The", max_tokens=len(ids), logprobs=1, stream=stream)
    choices = [chunk.choices[0] async for chunk in reply] if isinstance(reply, openai.AsyncStream) else reply.choices
    assert "".join(choice.text for choice in choices) == TEXT
    logprobs = [choice.logprobs for choice in choices if choice.logprobs]
    assert [value for part in logprobs for value in part.token_logprobs or ()] == [one.chosen for one in said(ids, 1)]
    tokens = [token for part in logprobs for token in part.tokens or ()]
    tops = [top for part in logprobs for top in part.top_logprobs or ()]
    # The fakes' most likely token is never the chosen one, which is listed in addition.
    assert all(token in top and len(top) == 2 for token, top in zip(tokens, tops, strict=True))
    offsets = [offset for part in logprobs for offset in part.text_offset or ()]
    assert (offsets[0], offsets) == (0, sorted(offsets))
    parts = [token for token in tokens if token.startswith("bytes:")]
    assert 0 < len(parts) < len(tokens)
    for offset, token in zip(offsets, tokens, strict=True):
        assert token in parts or TEXT[offset:].startswith(token)


async def test_a_completion_may_ask_for_as_many_as_the_engine_reports(
    cluster: Cluster, client: openai.AsyncOpenAI
) -> None:
    reply = await client.completions.create(model="fake", prompt="The", max_tokens=2, logprobs=20)
    assert reply.choices[0].logprobs is not None
    assert cluster.prefill.prefills[-1].sampling.logprobs == 20


async def test_without_the_wish_there_are_none(client: openai.AsyncOpenAI) -> None:
    chat = await client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=3)
    assert chat.choices[0].logprobs is None
    chat = await client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=3, logprobs=True)
    assert chat.choices[0].logprobs is not None
    assert [entry.top_logprobs for entry in chat.choices[0].logprobs.content or ()] == [[], [], []]
    chosen = await client.completions.create(model="fake", prompt="x", max_tokens=3, logprobs=0)
    assert chosen.choices[0].logprobs is not None
    assert [len(top) for top in chosen.choices[0].logprobs.top_logprobs or ()] == [1, 1, 1]


def test_parts_of_characters_keep_their_bytes_and_no_number_leaves_json() -> None:
    part = ScoredToken(7, b"\xf0\x9f", float("-inf"))
    (entry,) = chat_logprobs([TokenScore(part, (part,), 0)])["content"]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("bytes:\\xf0\\x9f", -9999.0, [0xF0, 0x9F])
    nan = TokenScore(ScoredToken(7, b"a", float("nan")), (), 0)
    assert completion_logprobs([nan])["token_logprobs"] == [-9999.0]
