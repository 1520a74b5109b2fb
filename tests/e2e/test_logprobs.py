"""Log probabilities and penalties of the running cluster against transformers, through the official OpenAI client."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.e2e.reference import Reference
from tests.soak import soak

NEW_TOKENS = 10
TOLERANCE = 2e-3
PENALTIES = [
    pytest.param({"repetition_penalty": 1.3}, marks=soak),
    pytest.param({"frequency_penalty": 1.1, "presence_penalty": 0.6}, marks=soak),
    {"repetition_penalty": 1.2, "frequency_penalty": 1.4, "presence_penalty": -0.9},
]


@pytest.fixture(scope="module")
def client(running_cluster: Callable[..., Any]) -> openai.OpenAI:
    cluster = running_cluster(dtype="float32", page_tokens=16, max_step_tokens=128)
    return openai.OpenAI(
        base_url=f"http://{cluster.http_address.removeprefix('http://')}/v1", api_key="unused", max_retries=0
    )


def complete(client: openai.OpenAI, prompt: tuple[int, ...], *, stream: bool = False, **options: Any) -> Any:
    """Returns the greedy completion of a prompt, or a stream's chunks."""
    options = {"ignore_eos": True, **options}
    known = {
        name: options.pop(name) for name in ("logprobs", "frequency_penalty", "presence_penalty") if name in options
    }
    reply = client.completions.create(
        model="", prompt=list(prompt), max_tokens=NEW_TOKENS, temperature=0, stream=stream, extra_body=options, **known
    )
    return list(reply) if stream else reply


@pytest.mark.parametrize("length", [pytest.param(3, marks=soak), 12])
def test_logprobs_are_those_of_transformers(
    length: int, client: openai.OpenAI, prompts: list[tuple[int, ...]], reference: Reference
) -> None:
    prompt = prompts[length]
    tokens = reference.generate(prompt, NEW_TOKENS)
    exact = reference.logprobs(prompt, tokens)
    reply = complete(client, prompt, logprobs=5).choices[0]
    assert len(reply.logprobs.tokens) == len(reply.logprobs.top_logprobs) == NEW_TOKENS
    for number, token in enumerate(tokens):
        chosen, top = reply.logprobs.token_logprobs[number], reply.logprobs.top_logprobs[number]
        assert chosen == pytest.approx(exact[number, token].item(), abs=TOLERANCE)
        assert list(top.values()) == pytest.approx(exact[number].topk(5).values.tolist(), abs=TOLERANCE)
        assert (chosen, reply.logprobs.tokens[number]) == (max(top.values()), next(iter(top)))
        assert sum(map(math.exp, top.values())) <= 1 + 1e-5
    for token, offset in zip(reply.logprobs.tokens, reply.logprobs.text_offset, strict=True):
        assert reply.text[offset:].startswith(token)


def test_a_stream_has_the_same_log_probabilities(client: openai.OpenAI, prompts: list[tuple[int, ...]]) -> None:
    whole = complete(client, prompts[2], logprobs=2).choices[0].logprobs
    chunks = [chunk.choices[0].logprobs for chunk in complete(client, prompts[2], stream=True, logprobs=2)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for chunk in chunks if chunk for value in getattr(chunk, name)] == getattr(whole, name)


def test_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="",
        messages=[{"role": "user", "content": "Say a word."}],
        temperature=1.5,
        seed=3,
        max_tokens=NEW_TOKENS,
        logprobs=True,
        top_logprobs=20,
        presence_penalty=1.0,
        extra_body={"ignore_eos": True},
    )
    choice = reply.choices[0]
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    assert len(entries) == reply.usage.completion_tokens == NEW_TOKENS  # type: ignore[union-attr]
    assert (choice.message.content or "").startswith(entries[0].token)
    for entry in entries:
        assert bytes(entry.bytes or ()).decode() == entry.token
        values = [other.logprob for other in entry.top_logprobs]
        assert (len(values), values) == (20, sorted(values, reverse=True))
        assert sum(map(math.exp, values)) <= 1 + 1e-5
        assert entry.logprob <= values[0]
        assert entry.logprob in values or entry.logprob <= values[-1]
    # Temperature and penalties change which token is drawn, not the log probabilities that are reported.
    assert any(entry.logprob < entry.top_logprobs[0].logprob for entry in entries)


@pytest.mark.parametrize("penalties", PENALTIES, ids=["repetition", "frequency and presence", "all"])
def test_penalties_give_the_tokens_of_a_plain_loop(
    penalties: dict[str, float], client: openai.OpenAI, prompts: list[tuple[int, ...]], reference: Reference
) -> None:
    prompt = prompts[0] * 4  # repeated, so that the answer without penalties would loop
    wanted = reference.penalized(prompt, NEW_TOKENS, **penalties)
    assert wanted != reference.generate(prompt, NEW_TOKENS)
    exact = reference.logprobs(prompt, wanted)
    scores = complete(client, prompt, logprobs=0, **penalties).choices[0].logprobs
    assert scores.token_logprobs == pytest.approx([exact[n, t].item() for n, t in enumerate(wanted)], abs=TOLERANCE)


def test_bad_values_name_the_field(client: openai.OpenAI) -> None:
    for field, options in {
        "logprobs": {"logprobs": 21},
        "frequency_penalty": {"frequency_penalty": 3.0},
        "presence_penalty": {"presence_penalty": -2.5},
        "repetition_penalty": {"repetition_penalty": 0.0},
    }.items():
        with pytest.raises(openai.BadRequestError, match=f"{field}: is"):
            complete(client, (5, 6, 7), **options)
    with pytest.raises(openai.BadRequestError, match="top_logprobs: needs logprobs"):
        client.chat.completions.create(model="", messages=[{"role": "user", "content": "x"}], top_logprobs=3)
    assert len(complete(client, (5, 6, 7), logprobs=1).choices[0].logprobs.tokens) == NEW_TOKENS
