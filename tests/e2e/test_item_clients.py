"""The official clients of the Responses and the Messages API against the running cluster."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pydantic
import pytest

QUESTION = "What is the capital of France?"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 30}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
GREEDY = {"temperature": 0}
ASKED = "What is the weather in Paris, in celsius?"


@pytest.fixture(scope="module")
def url(running_cluster: Callable[..., Any]) -> str:
    return f"http://{running_cluster(dtype='float32', page_tokens=16, max_step_tokens=128).http_address}"


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    (served,) = client.models.list().data
    return served.id


@pytest.fixture(scope="module")
def messages(url: str) -> Any:
    """The messages of Anthropic's client."""
    anthropic = pytest.importorskip("anthropic")
    return anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0).messages


class Person(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=40)
    age: int = pydantic.Field(ge=0, le=150)


def test_a_response_is_the_chats_answer(client: openai.OpenAI, model: str) -> None:
    reply = client.responses.create(model=model, input=QUESTION, temperature=0, max_output_tokens=40, store=False)
    assert (reply.status, "Paris" in reply.output_text) == ("completed", True)
    with client.responses.stream(model=model, input=QUESTION, temperature=0, max_output_tokens=40) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    chat = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=40
    )
    assert reply.output_text == deltas == final.output_text == chat.choices[0].message.content
    assert reply.usage is not None
    assert chat.usage is not None
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
    )
    cut = client.responses.create(model=model, input=QUESTION, temperature=0, max_output_tokens=2)
    assert cut.incomplete_details is not None
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_a_response_has_a_format(client: openai.OpenAI, model: str) -> None:
    question = "Describe Ann, who is 31 years old, as JSON with a name and an age."
    parsed = client.responses.parse(
        model=model, input=question, text_format=Person, temperature=0, max_output_tokens=120
    ).output_parsed
    assert parsed is not None
    assert parsed.age == 31


def test_a_function_is_called_and_answered(client: openai.OpenAI, model: str) -> None:
    """The model was not trained for tools; its arguments validate nevertheless, whole and streamed."""
    tools: Any = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}]
    asked: Any = {
        "model": model,
        "input": [{"role": "user", "content": ASKED}],
        "tools": tools,
        "tool_choice": "required",
        "temperature": 0,
        "max_output_tokens": 100,
    }
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        streamed = stream.get_final_response()
    calls: list[Any] = [response.output[0] for response in (whole, streamed)]
    assert [call.name for call in calls] == ["weather"] * 2
    assert calls[0].arguments == calls[1].arguments
    assert json.loads(calls[0].arguments)["unit"] in ("celsius", "fahrenheit")
    result = {"type": "function_call_output", "call_id": calls[0].call_id, "output": "It is 21 degrees and sunny."}
    conversation: Any = [*asked["input"], *whole.output, result]
    final = client.responses.create(model=model, input=conversation, temperature=0, max_output_tokens=60)
    assert final.output_text


def test_responses_are_not_stored(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError, match="not stored") as caught:
        client.responses.create(model=model, input=QUESTION, previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"


def test_a_message_is_the_chats_answer(client: openai.OpenAI, messages: Any, model: str) -> None:
    asked = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "extra_body": GREEDY,
        "max_tokens": 40,
    }
    reply = messages.create(**asked)
    with messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    chat = client.chat.completions.create(**asked)  # type: ignore[call-overload]
    assert reply.content[0].text == text == final.content[0].text == chat.choices[0].message.content
    assert (reply.stop_reason, final.stop_reason) == ("end_turn", "end_turn")
    assert final.usage.output_tokens == chat.usage.completion_tokens
    for usage in (reply.usage, final.usage):
        assert usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens
    counted = messages.count_tokens(model=model, messages=asked["messages"])
    assert counted.input_tokens == chat.usage.prompt_tokens
    word = text.split()[1]
    stopped = messages.create(**asked, stop_sequences=[word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)


def test_a_tool_is_used_and_answered(messages: Any, model: str) -> None:
    tools = [{"name": "weather", "description": "The weather", "input_schema": PARAMETERS}]
    asked: Any = {
        "model": model,
        "messages": [{"role": "user", "content": ASKED}],
        "tools": tools,
        "tool_choice": {"type": "any"},
        "extra_body": GREEDY,
        "max_tokens": 100,
    }
    whole = messages.create(**asked)
    with messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    one, other = (reply.content[0] for reply in (whole, streamed))
    assert (one.name, one.input, whole.stop_reason) == (other.name, other.input, "tool_use")
    assert one.input["unit"] in ("celsius", "fahrenheit")
    result = {"type": "tool_result", "tool_use_id": one.id, "content": "It is 21 degrees and sunny."}
    conversation = [
        *asked["messages"],
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": [result]},
    ]
    final = messages.create(model=model, messages=conversation, extra_body=GREEDY, max_tokens=60)
    assert final.content[0].type == "text"


def test_errors_of_messages_are_typed(messages: Any, model: str) -> None:
    import anthropic

    question = [{"role": "user", "content": QUESTION}]
    with pytest.raises(anthropic.NotFoundError, match="gpt-17"):
        messages.create(model="gpt-17", messages=question, max_tokens=5)
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        messages.create(model=model, messages=[{"role": "user", "content": "word " * 20_000}], max_tokens=5)
