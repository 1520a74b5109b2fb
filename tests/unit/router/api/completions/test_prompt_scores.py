"""The echo of prompts and their log probabilities, over HTTP and gRPC, from fake workers."""

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
import httpx
import pytest

from router.api.grpc import responses
from router.api.openai.replies import OpenAIReply
from router.api.prompt_replies import PromptForm, PromptReplies
from router.requests.answer import Answer
from router.requests.choices import Choices
from router.requests.request import ClientRequest, Options
from router.text.token_scores import format_prompt_logprobs
from router.text.tokenizer import Tokenizer
from tandem.protocol.errors import Cancelled
from tandem.protocol.generated.tandem.v1 import inference_pb2 as pb
from tandem.protocol.generated.tandem.v1 import inference_pb2_grpc
from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent
from tandem.protocol.messages import PROMPT_SCORES_MAX, PromptLogprobs
from tests.unit.router.conftest import Cluster
from tests.unit.router.fake_cluster import answer_logprobs

TEXT = "The quick brown fox, naïve 你好 😀"


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{cluster.endpoints.http_address}/v1", timeout=60) as client:
        yield client


async def choices(http: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    reply = await http.post("/completions", json={"model": "fake", "prompt": TEXT, "max_tokens": 1} | fields)
    assert reply.status_code == 200, reply.text
    choices_of_reply: list[dict[str, Any]] = reply.json()["choices"]
    return choices_of_reply


async def test_the_echo_has_the_scores_of_prompt_and_answer(
    cluster: Cluster, http: httpx.AsyncClient, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(TEXT)
    (plain,) = await choices(http, logprobs=1)
    (choice,) = await choices(http, echo=True, logprobs=1)
    assert choice["text"] == TEXT + plain["text"]
    logprobs = choice["logprobs"]
    assert {len(column) for column in logprobs.values()} == {len(ids) + 1}
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    wanted = [answer_logprobs(token_id, 1)[0] for token_id in ids]
    assert logprobs["token_logprobs"][1:-1] == [score.chosen for score in wanted[1:]]
    for token, top, score in zip(logprobs["tokens"], logprobs["top_logprobs"], wanted, strict=False):
        if top is not None:
            assert sorted(top.values()) == sorted((score.chosen, *score.top))
            assert top[token] == score.chosen
    assert {name: value[-1:] for name, value in logprobs.items() if name != "text_offset"} == {
        name: value for name, value in plain["logprobs"].items() if name != "text_offset"
    }
    assert logprobs["text_offset"][-1] == len(TEXT)
    for offset, token in zip(logprobs["text_offset"][:-1], logprobs["tokens"], strict=False):
        assert token.startswith("bytes:") or TEXT[offset:].startswith(token)
    assert cluster.prefill.prefills[-1].sampling.prompt_logprobs == 1


async def test_the_echo_alone(cluster: Cluster, http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    reply = await http.post(
        "/completions", json={"model": "fake", "prompt": TEXT, "max_tokens": 0, "echo": True, "logprobs": 0}
    )
    (choice,) = reply.json()["choices"]
    ids = tokenizer.encode(TEXT)
    assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")
    assert {len(logprob) for logprob in choice["logprobs"].values()} == {len(ids)}
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:]] == [1] * (len(ids) - 1)
    assert reply.json()["usage"]["completion_tokens"] == 0
    assert cluster.prefill.prefills[-1].sampling.max_tokens == 1


async def test_the_echo_alone_has_no_other_limit(http: httpx.AsyncClient) -> None:
    """Regression: tokens up to `max_completion_tokens` were generated and taken from the quota, and not returned."""
    body = {"model": "fake", "prompt": TEXT, "echo": True, "max_tokens": 0, "max_completion_tokens": 9}
    reply = await http.post("/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "max_tokens")


async def test_without_logprobs_the_prompt_is_not_scored(cluster: Cluster, http: httpx.AsyncClient) -> None:
    ids = [5, 6, 7, 8]
    (choice,) = await choices(http, echo=True, prompt=ids)
    assert choice["text"].startswith(cluster.router._validator._prompts._tokenizer.decode_all(ids))
    assert choice["logprobs"] is None
    assert cluster.prefill.prefills[-1].sampling.prompt_logprobs is None


async def test_prompts_of_one_call_have_their_own_scores(
    cluster: Cluster, http: httpx.AsyncClient, tokenizer: Tokenizer
) -> None:
    prompts = [TEXT, "The", "brown fox"]
    answers = await choices(http, prompt=prompts, echo=True, logprobs=1, n=2, max_tokens=3)
    for index, choice in enumerate(answers):
        ids = tokenizer.encode(prompts[index // 2])
        assert choice["text"].startswith(prompts[index // 2])
        wanted = [answer_logprobs(token_id, 1)[0].chosen for token_id in ids[1:]]
        assert choice["logprobs"]["token_logprobs"][1 : len(ids)] == wanted
    scored = [prefill.sampling.prompt_logprobs for prefill in cluster.prefill.prefills]
    assert sorted(scored, key=str) == [1, 1, 1, None, None, None], "one answer of each prompt scores it"


@pytest.mark.parametrize("chat", [False, True])
async def test_prompt_logprobs_as_in_vllm(
    cluster: Cluster, http: httpx.AsyncClient, tokenizer: Tokenizer, chat: bool
) -> None:
    body: dict[str, Any] = {"model": "fake", "max_tokens": 3, "prompt_logprobs": 2}
    body |= {"messages": [{"role": "user", "content": TEXT}]} if chat else {"prompt": TEXT}
    reply = (await http.post("/chat/completions" if chat else "/completions", json=body)).json()
    entries = reply["prompt_logprobs"] if chat else reply["choices"][0]["prompt_logprobs"]
    ids = cluster.prefill.prefills[-1].prompt_token_ids
    assert (len(entries), entries[0]) == (len(ids), None)
    for token_id, entry in zip(ids[1:], entries[1:], strict=True):
        wanted = answer_logprobs(token_id, 2)[0]
        assert {int(name): logprob["logprob"] for name, logprob in entry.items()} == {
            token_id: wanted.chosen,
            **dict(zip(wanted.top_ids, wanted.top, strict=True)),
        }
        assert [entry[str(top_id)]["rank"] for top_id in wanted.top_ids] == [1, 2]
        text = entry[str(token_id)]["decoded_token"]
        assert text.startswith("bytes:") or text.encode() == tokenizer.token_bytes(token_id)
    assert reply["choices"][0]["logprobs"] is None


async def test_both_forms_may_differ_in_their_alternatives(http: httpx.AsyncClient, cluster: Cluster) -> None:
    (choice,) = await choices(http, echo=True, logprobs=1, prompt_logprobs=3)
    assert {len(top) for top in choice["logprobs"]["top_logprobs"][1:]} <= {1, 2}
    assert {len(entry) for entry in choice["prompt_logprobs"][1:]} <= {3, 4}
    assert cluster.prefill.prefills[-1].sampling.prompt_logprobs == 3


@pytest.mark.parametrize("only", [False, True])
async def test_a_stream_begins_with_the_prompt(http: httpx.AsyncClient, tokenizer: Tokenizer, only: bool) -> None:
    body = {"model": "fake", "prompt": [TEXT, "The"], "max_tokens": 0 if only else 4, "echo": True, "logprobs": 1}
    whole = (await http.post("/completions", json=body)).json()
    streamed = await http.post("/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}})
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert events[-1]["usage"] == whole["usage"]
    for index, choice in enumerate(whole["choices"]):
        mine = [piece for event in events for piece in event["choices"] if piece["index"] == index]
        assert "".join(piece["text"] for piece in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == "length"
        scores = [piece["logprobs"] for piece in mine if piece["logprobs"]]
        for name, values in choice["logprobs"].items():
            assert list(itertools.chain.from_iterable(score[name] for score in scores)) == values, name


@pytest.mark.parametrize("trouble", ["", "race", "retry"])
async def test_grpc_sends_them_first(
    cluster: Cluster, stub: inference_pb2_grpc.InferenceStub, tokenizer: Tokenizer, trouble: str
) -> None:
    cluster.prefill.switches.decode_first = trouble == "race"
    cluster.prefill.switches.fail_transfers = 2 if trouble == "retry" else 0
    ids = tokenizer.encode(TEXT)
    options = pb.GenerationOptions(max_tokens=5, n=2, prompt_logprobs=2, logit_bias={7: 1.5})
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), options=options)
    messages = [message async for message in stub.Generate(request)]
    assert [message.WhichOneof("event") == "prompt" for message in messages] == [True] + [False] * (len(messages) - 1)
    tokens = messages[0].prompt.tokens
    assert [token.chosen.token_id for token in tokens] == ids
    assert (tokens[0].chosen.logprob, len(tokens[0].top)) == (0.0, 0)
    for token_id, token in zip(ids[1:], tokens[1:], strict=True):
        wanted = answer_logprobs(token_id, 2)[0]
        assert (token.chosen.logprob, [alternative.token_id for alternative in token.top]) == (
            wanted.chosen,
            [*wanted.top_ids],
        )
        assert token.chosen.utf8 == tokenizer.token_bytes(token_id)
    assert cluster.prefill.prefills[0].sampling.logit_bias == ((7, 1.5),)


@pytest.mark.parametrize("end", ["token", "abort"])
async def test_the_scores_are_not_lost_if_another_answer_begins_first(cluster: Cluster, end: str) -> None:
    """Regression: the echo of a stream had no log probabilities if answer 1 began before answer 0, which scores."""
    ids = (5, 6, 7)
    options = Options(n=2, logprobs=0, prompt_logprobs=0)
    request = ClientRequest("", "", ids, options, EventTime.now(LifecycleEvent.RECEIVED))
    answers = [Answer("r"), Answer("r")]
    form = PromptForm(echo=True, echo_top=0)
    validator = cluster.router._validator
    admitted = await validator.admit(request)
    replies = PromptReplies(form, validator, [request], [admitted], Choices(answers))
    answers[1].push("a", [5], [])
    asked = asyncio.create_task(replies.of(1))
    await asyncio.sleep(0.05)
    if end == "token":
        answers[0].prompt_logprobs = PromptLogprobs((-1.0, -2.0))
        answers[0].push("a", [5], [])
    else:
        answers[0].fail(Cancelled("the client left"))
    reply = await asked
    assert reply is not None
    assert [score.chosen.logprob for score in reply.scores][1:] == ([-1.0, -2.0] if end == "token" else [])


async def test_a_scored_prompt_is_placed_as_if_nothing_were_cached(cluster: Cluster, http: httpx.AsyncClient) -> None:
    queued: list[tuple[bytes, ...]] = []
    scheduler = cluster.router._dispatcher._scheduler
    enter = scheduler.enter

    def noted(request: Any, **more: int) -> None:
        queued.append(request.digests)
        enter(request, **more)

    scheduler.enter = noted  # type: ignore[method-assign]
    await choices(http, prompt=TEXT * 4)
    await choices(http, prompt=TEXT * 4, prompt_logprobs=0)
    assert queued[0]
    assert queued[1] == ()


async def test_a_prompt_with_too_many_scores_is_refused(http: httpx.AsyncClient, cluster: Cluster) -> None:
    most = PROMPT_SCORES_MAX // 21
    body = {"model": "fake", "prompt": [5] * (most + 1), "max_tokens": 1, "prompt_logprobs": 20}
    cluster.prefill.max_context = cluster.decode.max_context = 1 << 16
    cluster.prefill.pages_total = cluster.decode.pages_total = 1 << 13
    await cluster.members(cluster.prefill, cluster.decode)
    reply = await http.post("/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt_logprobs")
    assert f"the limit is {PROMPT_SCORES_MAX}" in reply.json()["error"]["message"]
    reply = await http.post("/completions", json={**body, "prompt": [5] * most})
    assert len(reply.json()["choices"][0]["prompt_logprobs"]) == most


def test_offsets_count_characters_over_parts_of_characters() -> None:
    parts = {1: b"a", 2: "😀".encode()[:2], 3: "😀".encode()[2:], 4: b"b"}
    scores = format_prompt_logprobs((1, 2, 3, 4), PromptLogprobs((-1.0, -2.0, -3.0)), parts.__getitem__)
    assert [score.offset for score in scores] == [0, 1, 1, 2]
    assert [score.chosen.logprob for score in scores[1:]] == [-1.0, -2.0, -3.0]


async def test_workers_that_send_no_scores_are_named(
    cluster: Cluster, http: httpx.AsyncClient, stub: inference_pb2_grpc.InferenceStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.unit.router.fake_cluster.prompt_logprobs", lambda _: None)
    reply = await http.post(
        "/completions", json={"model": "fake", "prompt": "x", "max_tokens": 1, "prompt_logprobs": 1}
    )
    assert (reply.status_code, "of the router's release" in reply.text) == (500, True)
    options = pb.GenerationOptions(max_tokens=1, prompt_logprobs=1)
    with pytest.raises(grpc.aio.AioRpcError, match="of the router's release"):
        _ = [message async for message in stub.Generate(pb.GenerateRequest(text="x", options=options))]


async def test_the_event_loop_does_not_wait_for_the_scores_of_a_prompt(
    cluster: Cluster, http: httpx.AsyncClient, stub: inference_pb2_grpc.InferenceStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: 250,000 log probabilities of one streamed prompt kept all other streams waiting for 0.2 s."""
    threads: list[threading.Thread] = []

    def noting(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any) -> Any:
            threads.append(threading.current_thread())
            return make(*arguments)

        return made

    monkeypatch.setattr(OpenAIReply, "prompt", noting(OpenAIReply.prompt))
    monkeypatch.setattr(responses, "prompt_details", noting(responses.prompt_details))
    body = {"model": "fake", "prompt": TEXT, "max_tokens": 4, "echo": True, "logprobs": 1, "stream": True}
    assert TEXT[:9] in (await http.post("/completions", json=body)).text
    options = pb.GenerationOptions(max_tokens=4, prompt_logprobs=1)
    _ = [message async for message in stub.Generate(pb.GenerateRequest(text=TEXT, options=options))]
    assert len(threads) == 2
    assert threading.main_thread() not in threads
