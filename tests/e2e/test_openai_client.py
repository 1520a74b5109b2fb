"""The official OpenAI client against the running cluster."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pydantic
import pytest

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client(running_cluster: Callable[..., Any]) -> openai.OpenAI:
    cluster = running_cluster(dtype="float32", page_tokens=16, max_step_tokens=128)
    return openai.OpenAI(
        base_url=f"http://{cluster.http_address.removeprefix('http://')}/v1", api_key="unused", max_retries=0
    )


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    (served,) = client.models.list().data
    return served.id


def test_chat_knows_paris(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=40)  # type: ignore[arg-type]
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream_is_the_same_text(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=40)  # type: ignore[arg-type]
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=QUESTION,  # type: ignore[arg-type]
            temperature=0,
            max_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"


def test_completion_with_stop(client: openai.OpenAI, model: str) -> None:
    free = client.completions.create(model=model, prompt="one two three four", temperature=0, max_tokens=24)
    text = free.choices[0].text
    assert len(text) > 12
    stop = text[8:11]
    cut = client.completions.create(model=model, prompt="one two three four", temperature=0, max_tokens=24, stop=[stop])
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_seed(client: openai.OpenAI, model: str) -> None:
    def once(seed: int) -> str:
        answer = client.completions.create(model=model, prompt="The sea", temperature=1.0, seed=seed, max_tokens=8)
        return answer.choices[0].text

    assert once(1) == once(1)
    assert len({once(seed) for seed in (2, 3)}) > 1


def test_several_answers(client: openai.OpenAI, model: str) -> None:
    prompt = "Once upon a time there was a lighthouse keeper who had never seen the sea by day, and"

    def texts(n: int, **sampling: float) -> list[str]:
        answer = client.completions.create(model=model, prompt=prompt, max_tokens=8, n=n, **sampling)  # type: ignore[call-overload]
        assert [choice.index for choice in answer.choices] == list(range(n))
        assert answer.usage
        assert answer.usage.prompt_tokens < 30
        return [choice.text for choice in answer.choices]

    assert texts(3, temperature=0) == 3 * texts(1, temperature=0)
    seeded = texts(3, temperature=1.0, seed=5)
    assert len(set(seeded)) == 3
    assert seeded == texts(3, temperature=1.0, seed=5)
    assert seeded[:1] == texts(1, temperature=1.0, seed=5)


def test_errors_are_typed(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model=model, prompt="x", max_tokens=0)
    with pytest.raises(openai.NotFoundError, match="gpt-17"):
        client.completions.create(model="gpt-17", prompt="x")
    with pytest.raises(openai.BadRequestError, match="logit_bias"):
        client.chat.completions.create(model=model, messages=QUESTION, logit_bias={"5": 300})


class Person(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=40)
    age: int = pydantic.Field(ge=0, le=150)
    tags: list[str] = pydantic.Field(max_length=2)


def test_answers_are_parsed(client: openai.OpenAI, model: str) -> None:
    """The schema that the client makes of a class: answers validate on one worker and on two, greedy and random."""
    question: Any = [{"role": "user", "content": "Describe Ann, who is 31 years old, as JSON with a name and an age."}]
    parsed = client.chat.completions.parse(
        model=model, messages=question, response_format=Person, temperature=0, max_tokens=120
    )
    answer = parsed.choices[0].message.parsed
    assert answer is not None
    assert answer.age == 31
    assert parsed.choices[0].finish_reason == "stop"
    many = client.chat.completions.parse(
        model=model, messages=question, response_format=Person, temperature=1.0, seed=1, n=2, max_tokens=120
    )
    assert any(choice.message.parsed for choice in many.choices if choice.finish_reason == "stop")


def test_a_choice_is_one_of_them(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=QUESTION,  # type: ignore[arg-type]
        extra_body={"structured_outputs": {"choice": ["It is Paris.", "It is Rome."]}},
        max_tokens=20,
        logprobs=True,
    )
    assert answer.choices[0].message.content == "It is Paris."
    assert answer.choices[0].logprobs is not None


def test_a_schema_that_is_not_served_is_the_clients_error(client: openai.OpenAI, model: str) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}}
    with pytest.raises(openai.BadRequestError, match="not") as caught:
        client.chat.completions.create(model=model, messages=QUESTION, response_format=schema)  # type: ignore[call-overload]
    assert caught.value.param == "response_format.json_schema.schema"


def test_formats_that_cost_too_much_fail_alone(client: openai.OpenAI, model: str) -> None:
    """Some as they are compiled, some within the answer, beside a stream that goes on; the error names the field."""

    def refused(fields: dict[str, Any]) -> openai.BadRequestError:
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=model, prompt="x", max_tokens=60, extra_body=fields)
        return caught.value

    costly = [
        *([{"guided_regex": "a?" * 120_000}] * 2),
        {"guided_regex": "[a-c]{5}a{200000}"},
        {"guided_grammar": "root ::= root root root | [a-z] | [a-z ]+"},
    ]
    with ThreadPoolExecutor(len(costly)) as threads:
        stream = client.completions.create(model=model, prompt="One two", temperature=0, max_tokens=60, stream=True)
        errors = list(threads.map(refused, costly))
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
    assert [error.param for error in errors] == [next(iter(fields)) for fields in costly]
    assert all("simplify it" in str(error) for error in errors)


def test_a_required_tool_is_called(client: openai.OpenAI, model: str) -> None:
    """The model was not trained for tools; its arguments validate nevertheless, whole and streamed."""
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 30}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    asked: Any = {
        "model": model,
        "messages": [{"role": "user", "content": "What is the weather in Paris, in celsius?"}],
        "tools": [tool],
        "tool_choice": "required",
        "temperature": 0,
        "max_tokens": 100,
    }
    whole = client.chat.completions.create(**asked).choices[0]
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0]
    for choice in (whole, streamed):
        (call,) = choice.message.tool_calls or ()
        assert call.function.name == "weather"
        arguments = json.loads(call.function.arguments)
        assert set(arguments) == {"city", "unit"}
        assert arguments["unit"] in ("celsius", "fahrenheit")
        assert choice.finish_reason == "tool_calls"
    one, other = (choice.message.tool_calls[0].function for choice in (whole, streamed))  # type: ignore[index]
    assert one.arguments == other.arguments
