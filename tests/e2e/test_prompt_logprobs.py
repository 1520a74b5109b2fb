"""Log-likelihoods of prompts and biased answers of the running cluster against transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import openai
import pytest
import torch

from tests.e2e.reference import Reference
from tests.soak import soak

TOLERANCE = 1e-3
LENGTHS = (1, 12, 15)
"""Numbers of prompts: of 7, 100 and 129 tokens, the last of which takes two chunks."""
AS_STARTED: dict[str, Any] = {"mode": "disaggregated", "prefill": 1, "decode": 1, "step_policy": "unchunked"}
WAYS: dict[str, dict[str, Any]] = {
    "disaggregated": AS_STARTED,
    "colocated": {"mode": "colocated", "step_policy": "chunked", "step_budget": 192},
}


@pytest.fixture(scope="module", params=["disaggregated", pytest.param("colocated", marks=soak)])
def client(request: pytest.FixtureRequest, running_cluster: Callable[..., Any]) -> Iterator[openai.OpenAI]:
    cluster = running_cluster(dtype="float32", page_tokens=16, max_step_tokens=128)
    asyncio.run(cluster.controller.set_mode(**WAYS[request.param]))
    with openai.OpenAI(base_url=f"http://{cluster.http_address}/v1", api_key="unused", max_retries=0) as client:
        yield client
    cluster.assert_idle_and_sound()
    asyncio.run(cluster.controller.set_mode(**AS_STARTED))


@pytest.fixture(scope="module")
def exact(reference: Reference) -> Callable[[tuple[int, ...]], torch.Tensor]:
    """Returns the log softmax [tokens - 1, vocab] at the second and each later token of a prompt."""
    return lru_cache(lambda prompt: reference.logprobs(prompt[:1], prompt[1:]))


def test_log_likelihoods_are_those_of_transformers(
    client: openai.OpenAI, prompts: list[tuple[int, ...]], exact: Callable[..., torch.Tensor]
) -> None:
    asked = [prompts[length] for length in LENGTHS]
    for answer in (0, 5):  # the second time all prompts are cached
        reply = client.completions.create(
            model="",
            prompt=[list(prompt_ids) for prompt_ids in asked],
            max_tokens=answer,
            echo=True,
            logprobs=2,
            temperature=0,
        )
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        assert reply.usage.prompt_tokens_details.cached_tokens == 0
        for prompt, choice in zip(asked, reply.choices, strict=True):
            wanted = exact(prompt)
            scores = choice.logprobs
            assert scores is not None
            assert scores.token_logprobs is not None
            assert scores.top_logprobs is not None
            values = [wanted[at, token].item() for at, token in enumerate(prompt[1:])]
            assert scores.token_logprobs[1 : len(prompt)] == pytest.approx(values, abs=TOLERANCE)
            for at, top in enumerate(scores.top_logprobs[1 : len(prompt)]):
                best = wanted[at].topk(2).values.tolist()
                assert sorted(top.values(), reverse=True)[:2] == pytest.approx(best, abs=TOLERANCE)
            assert len(scores.token_logprobs) - len(prompt) in ([0] if answer == 0 else range(1, answer + 1))


def test_prompt_logprobs_of_a_conversation(client: openai.OpenAI, exact: Callable[..., torch.Tensor]) -> None:
    reply = client.chat.completions.create(
        model="",
        messages=[{"role": "user", "content": "Say a word."}],
        max_tokens=3,
        extra_body={"prompt_logprobs": 1, "return_token_ids": True},
    ).model_dump()
    prompt = tuple(reply["prompt_token_ids"])
    wanted = exact(prompt)
    assert reply["prompt_logprobs"][0] is None
    for at, (token, entry) in enumerate(zip(prompt[1:], reply["prompt_logprobs"][1:], strict=True)):
        assert entry[str(token)]["logprob"] == pytest.approx(wanted[at, token].item(), abs=TOLERANCE)


def test_biases_change_each_token(client: openai.OpenAI, prompts: list[tuple[int, ...]], reference: Reference) -> None:
    prompt = prompts[2]
    plain = reference.generate(prompt, 6)
    forced = client.completions.create(
        model="", prompt=list(prompt), max_tokens=6, temperature=0, logit_bias={"28": 100}, logprobs=0
    ).choices[0]
    assert forced.logprobs is not None
    logprobs = reference.logprobs(prompt, (28,) * 6)
    values = [logprobs[at, 28].item() for at in range(6)]
    assert forced.logprobs.token_logprobs == pytest.approx(values, abs=2 * TOLERANCE), "the model's own"
    banned = {str(token): -100 for token in plain}
    other = client.completions.create(
        model="", prompt=list(prompt), max_tokens=6, temperature=0.7, seed=4, logit_bias=banned,
        extra_body={"return_token_ids": True},
    ).choices[0].model_dump()  # fmt: skip
    assert len(other["token_ids"]) == 6
    assert not {*other["token_ids"]} & {*plain}


def test_the_best_of_several_answers(client: openai.OpenAI, prompts: list[tuple[int, ...]]) -> None:
    options: dict[str, Any] = {"model": "", "prompt": list(prompts[3]), "max_tokens": 5, "temperature": 1.0, "seed": 3}
    several = client.completions.create(**options, n=4, logprobs=0).choices
    best = client.completions.create(**options, best_of=4, n=2).choices
    means = {choice.text: sum(choice.logprobs.token_logprobs) / 5 for choice in several if choice.logprobs}  # type: ignore[arg-type]
    assert [choice.text for choice in best] == sorted(means, key=lambda text: means[text], reverse=True)[:2]
