"""Several prompts in one call, and the best of several answers."""

import asyncio
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import openai
import pytest

from router.api.answers import CompleteAnswer, best_of
from router.requests.answer import AnswerEnd
from router.text.token_scores import ScoredToken, TokenScore
from router.text.tokenizer import Tokenizer
from tandem.metrics import families as f
from tandem.protocol.errors import Internal
from tandem.protocol.lifecycle.events import Timeline
from tandem.protocol.messages import FinishReason, SamplingParams
from tandem.tokenizers.grammar_process import GrammarKind, GrammarProcess
from tests.unit.router.conftest import Cluster
from tests.unit.router.fake_cluster import answer_token, until

TEXTS = ["The quick", "brown fox jumps over", "naïve café"]


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    base = f"http://{cluster.endpoints.http_address}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{cluster.endpoints.http_address}/v1", timeout=60) as client:
        yield client


def answer(tokenizer: Tokenizer, prompt: str | Sequence[int], tokens: int) -> str:
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    return tokenizer.decode([answer_token(ids, index) for index in range(tokens)])


@pytest.mark.parametrize("n", [1, 2])
async def test_choices_are_ordered_by_prompt(client: openai.AsyncOpenAI, tokenizer: Tokenizer, n: int) -> None:
    ids = [[5, 6, 7], [9, 8, 7, 6]]
    for prompts in (TEXTS, ids):
        reply = await client.completions.create(model="fake", prompt=prompts, max_tokens=6, n=n)
        assert [choice.index for choice in reply.choices] == list(range(n * len(prompts)))
        assert [choice.text for choice in reply.choices] == [
            answer(tokenizer, prompt, 6) for prompt in prompts for _ in range(n)
        ]
        assert reply.usage is not None
        assert reply.usage.completion_tokens == 6 * n * len(prompts)
        lengths = [len(tokenizer.encode(prompt)) if isinstance(prompt, str) else len(prompt) for prompt in prompts]
        assert reply.usage.prompt_tokens == sum(lengths)


async def test_texts_and_ids_may_be_mixed_and_one_in_a_list_is_one(
    http: httpx.AsyncClient, tokenizer: Tokenizer
) -> None:
    for prompts in ([TEXTS[0], [5, 6, 7]], [TEXTS[0]], [[5, 6, 7]]):
        reply = await http.post("/completions", json={"model": "fake", "prompt": prompts, "max_tokens": 4})
        wanted = [answer(tokenizer, prompt, 4) for prompt in prompts]
        assert [choice["text"] for choice in reply.json()["choices"]] == wanted


async def test_a_stream_names_the_prompt_by_the_index(client: openai.AsyncOpenAI, tokenizer: Tokenizer) -> None:
    stream = await client.completions.create(
        model="fake", prompt=TEXTS, max_tokens=6, n=2, stream=True, stream_options={"include_usage": True}
    )
    texts: dict[int, str] = defaultdict(str)
    ids, finished, usage = set(), [], None
    async for chunk in stream:
        ids.add(chunk.id)
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            finished += [choice.index] * (choice.finish_reason is not None)
    assert len(ids) == 1
    assert sorted(finished) == list(range(6))
    assert [texts[index] for index in range(6)] == [answer(tokenizer, text, 6) for text in TEXTS for _ in range(2)]
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (sum(len(tokenizer.encode(text)) for text in TEXTS), 36)


async def test_token_ids_of_each_prompt(http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    body = {"model": "fake", "prompt": TEXTS, "max_tokens": 2, "n": 2, "return_token_ids": True}
    choices = (await http.post("/completions", json=body)).json()["choices"]
    wanted = [tokenizer.encode(text) for text in TEXTS for _ in range(2)]
    assert [choice["prompt_token_ids"] for choice in choices] == wanted


async def test_a_failure_of_one_ends_all(cluster: Cluster, http: httpx.AsyncClient) -> None:
    cluster.decode.switches.step_s = 0.01
    body = {"model": "fake", "prompt": TEXTS, "max_tokens": 500}
    running = asyncio.create_task(http.post("/completions", json=body))
    await until(lambda: len(cluster.decode.tasks) == 3, "all decode")
    dispatcher = cluster.router._dispatcher
    dispatcher._ends.fail(list(dispatcher._live.values())[1], Internal("this one alone"))
    reply = await running
    assert (reply.status_code, reply.json()["error"]["message"]) == (500, "this one alone")
    await cluster.settled()


async def test_an_abort_ends_all(cluster: Cluster, http: httpx.AsyncClient) -> None:
    cluster.decode.switches.step_s = 0.01
    body = {"model": "fake", "prompt": TEXTS, "max_tokens": 500, "n": 2}
    running = asyncio.create_task(http.post("/completions", json=body))
    await until(lambda: len(cluster.decode.tasks) == 6, "all decode")
    dispatcher = cluster.router._dispatcher
    (request_id,) = {request.admitted.request_id for request in dispatcher._live.values()}
    assert dispatcher.abort("", request_id)
    reply = await running
    assert [choice["finish_reason"] for choice in reply.json()["choices"]] == ["abort"] * 6
    await cluster.settled()


async def test_a_client_that_leaves_ends_all(cluster: Cluster, http: httpx.AsyncClient) -> None:
    cluster.decode.switches.step_s = 0.01
    body = {"model": "fake", "prompt": TEXTS, "max_tokens": 500}
    running = asyncio.create_task(http.post("/completions", json=body))
    await until(lambda: len(cluster.decode.tasks) == 3, "all decode")
    running.cancel()
    await cluster.settled()
    assert not cluster.router._dispatcher._live


class TestSmallQueue:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"max_queued_requests": 4}

    async def test_all_prompts_are_queued_or_none(self, cluster: Cluster, http: httpx.AsyncClient) -> None:
        body = {"model": "fake", "prompt": [*TEXTS, "x", "y"], "max_tokens": 2}
        reply = await http.post("/completions", json=body)
        assert (reply.status_code, "retry-after" in reply.headers) == (429, True)
        assert not cluster.prefill.prefills
        reply = await http.post("/completions", json={**body, "prompt": [*TEXTS, "x"]})
        assert len(reply.json()["choices"]) == 4
        offered = cluster.router._dispatcher.metrics.registry.counter(f.OFFERED_REQUESTS)
        assert offered.value == 9

    async def test_a_prompt_that_is_refused_takes_the_others_along(
        self, cluster: Cluster, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        scheduler = cluster.router._dispatcher._scheduler
        enter = scheduler.enter

        def refuse_third(request: Any, **more: int) -> None:
            if len(scheduler.queue) == 2:
                raise Internal("no third one")
            enter(request, **more)

        monkeypatch.setattr(scheduler, "enter", refuse_third)
        reply = await http.post("/completions", json={"model": "fake", "prompt": TEXTS, "max_tokens": 2})
        assert reply.json()["error"]["message"] == "no third one"
        assert len(scheduler.queue) == 0
        assert not cluster.prefill.prefills


async def test_best_of_returns_the_most_likely(cluster: Cluster, http: httpx.AsyncClient) -> None:
    body = {"model": "fake", "prompt": TEXTS[:2], "max_tokens": 3, "best_of": 3, "temperature": 1.0}
    reply = (await http.post("/completions", json=body)).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert [choice["logprobs"] for choice in reply["choices"]] == [None, None]
    assert reply["usage"]["completion_tokens"] == 18
    assert {prefill.sampling.logprobs for prefill in cluster.prefill.prefills} == {0}
    assert len({prefill.sampling.seed for prefill in cluster.prefill.prefills}) == 6
    reply = (await http.post("/completions", json={**body, "n": 2, "logprobs": 1})).json()
    assert [len(choice["logprobs"]["tokens"]) for choice in reply["choices"]] == [3] * 4


def test_the_best_answers_of_each_prompt_come_first() -> None:
    ending = AnswerEnd(FinishReason.LENGTH, "", 3, 2, 0, 0, Timeline((), None, "", ""))

    def one(text: str, *logprobs: float) -> CompleteAnswer:
        scores = [TokenScore(ScoredToken(1, b"a", logprob), (), 0) for logprob in logprobs]
        return CompleteAnswer(text, [1] * len(logprobs), scores, ending)

    answers = [one("a", -1.0, -3.0), one("b", -0.5), one("c", -1.9, -1.9, -1.9)]
    others = [one("d", -math.inf), one("e", -9.0), one("f", -8.0, -8.5)]
    assert [choice.text for choice in best_of([*answers, *others], 2, 3)] == ["b", "c", "f", "e"]
    assert [choice.text for choice in best_of([*answers, *others], 1, 3)] == ["b", "f"]
    assert [choice.text for choice in best_of(answers, 3, 3)] == ["a", "b", "c"]


async def test_a_bias_reaches_the_workers(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    await client.completions.create(model="fake", prompt="x", max_tokens=3, logit_bias={"7": -100, "12": 2})
    await client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "x"}], max_tokens=3, logit_bias={"5": 1}
    )
    samplings = [prefill.sampling for prefill in cluster.prefill.prefills]
    assert [sampling.logit_bias for sampling in samplings] == [((7, -100.0), (12, 2.0)), ((5, 1.0),)]
    assert [sampling.masked_tokens for sampling in samplings] == [3, 3]
    assert SamplingParams(3, min_tokens=1).masked_tokens == 1


async def test_the_grammar_of_a_call_is_made_once(
    cluster: Cluster, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a call of 128 prompts made its grammar 128 times, each of which may take two seconds."""
    made: list[str] = []
    make = GrammarProcess.make

    def noting(process: GrammarProcess, kind: GrammarKind, *given: Any) -> str:
        made.append(kind)
        return make(process, kind, *given)

    monkeypatch.setattr(GrammarProcess, "make", noting)
    body = {"model": "fake", "prompt": [[5], [6], [7]], "max_tokens": 2, "guided_choice": ["yes", "no"]}
    assert (await http.post("/completions", json=body)).status_code == 200
    assert made == [GrammarKind.CHOICE]
    asked = cluster.prefill.prefills[-3:]
    assert len({task.sampling.grammar for task in asked}) == 1
    assert asked[0].sampling.grammar
