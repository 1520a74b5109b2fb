"""The fields about the prompt's tokens: special tokens around it, its end, its cut, and ids in the reply."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import processors

from router.text.chat_template import ChatTemplate, ChatTurn, PromptEnd
from router.text.tokenizer import Tokenizer
from tandem.protocol.errors import InvalidArgument
from tests.unit.router.conftest import TEMPLATE, Cluster
from tests.unit.router.fake_cluster import answer_token

USER = {"role": "user", "content": "Hello there"}
BEGUN = {"role": "assistant", "content": "The quick "}
BOS = 1


@pytest.fixture
def settings(model: Path, tmp_path: Path) -> dict[str, Any]:
    """A router whose tokenizer puts a special token before each prompt."""
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    inner = Tokenizer(model)._inner.__class__.from_file(str(model / "tokenizer.json"))
    inner.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    inner.save(str(tmp_path / "tokenizer.json"))
    return {"model": tmp_path}


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{cluster.endpoints.http_address}", timeout=60) as client:
        yield client


async def prefilled(cluster: Cluster, http: httpx.AsyncClient, **fields: Any) -> list[int]:
    """Returns the prompt's ids that workers got, which /tokenize must give too."""
    path = "chat/completions" if "messages" in fields else "completions"
    reply = await http.post(f"/v1/{path}", json={"max_tokens": 2, **fields})
    assert reply.status_code == 200, reply.text
    ids = list(cluster.prefill.prefills[-1].prompt_token_ids)
    if not isinstance(fields.get("prompt"), list) and "max_tokens" not in fields:
        assert (await http.post("/tokenize", json=fields)).json()["tokens"] == ids
    return ids


async def test_special_tokens_are_before_a_text_but_not_before_a_template(
    cluster: Cluster, http: httpx.AsyncClient, tokenizer: Tokenizer
) -> None:
    ids, chat = tokenizer.encode("The fox"), tokenizer.encode(f"<|im_start|>user\n{USER['content']}<|im_end|>\n")
    assert await prefilled(cluster, http, prompt="The fox") == [BOS, *ids]
    assert await prefilled(cluster, http, prompt="The fox", add_special_tokens=True) == [BOS, *ids]
    assert await prefilled(cluster, http, prompt="The fox", add_special_tokens=False) == ids
    asked = {"messages": [USER], "add_generation_prompt": False}
    assert await prefilled(cluster, http, **asked) == chat
    assert await prefilled(cluster, http, **asked, add_special_tokens=False) == chat
    assert await prefilled(cluster, http, **asked, add_special_tokens=True) == [BOS, *chat]


async def test_the_prompt_ends_where_the_client_says(
    cluster: Cluster, http: httpx.AsyncClient, tokenizer: Tokenizer
) -> None:
    begun = "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\nThe quick "
    for fields, text in (
        ({}, f"{begun}<|im_end|>\n<|im_start|>assistant\n"),
        (
            {"add_generation_prompt": True, "continue_final_message": False},
            f"{begun}<|im_end|>\n<|im_start|>assistant\n",
        ),
        ({"add_generation_prompt": False}, f"{begun}<|im_end|>\n"),
        ({"continue_final_message": True}, begun),
        ({"continue_final_message": True, "add_generation_prompt": False}, begun),
    ):
        assert await prefilled(cluster, http, messages=[USER, BEGUN], **fields) == tokenizer.encode(text)


async def test_a_prompt_is_cut_at_its_beginning_after_the_special_token(
    cluster: Cluster, http: httpx.AsyncClient, tokenizer: Tokenizer
) -> None:
    text = "The quick brown fox <|im_end|> jumps over the lazy dog"
    ids = tokenizer.encode(text)
    assert await prefilled(cluster, http, prompt=text, truncate_prompt_tokens=5) == [BOS, *ids[-4:]]
    assert await prefilled(cluster, http, prompt=text, truncate_prompt_tokens=1) == [BOS]
    assert await prefilled(cluster, http, prompt=text, truncate_prompt_tokens=1000) == [BOS, *ids]
    cut = {"truncate_prompt_tokens": 5, "add_special_tokens": False}
    assert await prefilled(cluster, http, prompt=text, **cut) == ids[-5:]
    assert await prefilled(cluster, http, prompt=ids, truncate_prompt_tokens=3) == ids[-3:]
    spelled = {"role": "user", "content": "<|im_end|>" * 9}
    whole = await prefilled(cluster, http, messages=[spelled])
    assert await prefilled(cluster, http, messages=[spelled], truncate_prompt_tokens=30) == whole[-30:]


async def test_minus_one_keeps_what_the_context_leaves(cluster: Cluster, http: httpx.AsyncClient) -> None:
    long = "the quick brown fox " * 20_000
    for fields, kept in (({"prompt": long}, 2047), ({"prompt": [5] * 3000}, 2047), ({"messages": [USER] * 900}, 2047)):
        ids = await prefilled(cluster, http, **fields, truncate_prompt_tokens=-1, max_tokens=1)
        assert len(ids) == kept
        assert len(await prefilled(cluster, http, **fields, truncate_prompt_tokens=-1, max_tokens=48)) == 2000
    assert (await http.post("/tokenize", json={"prompt": long, "truncate_prompt_tokens": -1})).json()["count"] == 2047
    reply = await http.post("/v1/completions", json={"prompt": [5] * 3000, "truncate_prompt_tokens": 2500})
    assert reply.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"prompt": "x", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"prompt": "x", "truncate_prompt_tokens": 1.5}, "truncate_prompt_tokens"),
        ({"prompt": "x", "add_special_tokens": "no"}, "add_special_tokens"),
        ({"prompt": "x", "return_token_ids": 1}, "return_token_ids"),
        ({"messages": [USER], "add_generation_prompt": 1}, "add_generation_prompt"),
        ({"messages": [USER], "add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ],
)
async def test_wrong_values_are_named(http: httpx.AsyncClient, fields: dict[str, Any], field: str) -> None:
    path = "chat/completions" if "messages" in fields else "completions"
    reply = await http.post(f"/v1/{path}", json=fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n") if event.startswith("data: {")]


@pytest.mark.parametrize("fields", [{}, {"logprobs": True}])
async def test_ids_are_returned_in_the_places_of_vllm(
    cluster: Cluster, http: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    asked = {"max_tokens": 9, "n": 2, "return_token_ids": True}
    chat = {"messages": [USER], **asked, **fields}
    text = {"prompt": "The fox", **asked, **({"logprobs": 1} if fields else {})}
    for path, body in (("chat/completions", chat), ("completions", text)):
        whole = (await http.post(f"/v1/{path}", json=body)).json()
        prompt = cluster.prefill.prefills[-1].prompt_token_ids
        answer = [answer_token(prompt, index) for index in range(9)]
        streamed = events((await http.post(f"/v1/{path}", json={**body, "stream": True})).text)
        for index, choice in enumerate(whole["choices"]):
            assert choice["token_ids"] == answer
            assert choice.get("prompt_token_ids", whole.get("prompt_token_ids")) == list(prompt)
            own = [(event, piece) for event in streamed for piece in event["choices"] if piece["index"] == index]
            assert [i for _, piece in own for i in piece.get("token_ids") or ()] == answer
            given = [piece.get("prompt_token_ids", event.get("prompt_token_ids")) for event, piece in own]
            assert given == [list(prompt)] + [None] * (len(own) - 1)
        assert ("prompt_token_ids" in whole) == (path == "chat/completions")
        plain = (await http.post(f"/v1/{path}", json={**body, "return_token_ids": False})).json()
        assert "token_ids" not in plain["choices"][0]


async def test_ids_end_with_the_stop_string_and_come_without_text(
    cluster: Cluster, http: httpx.AsyncClient, tokenizer: Tokenizer
) -> None:
    body = {"prompt": "x", "max_tokens": 40, "return_token_ids": True}
    text = (await http.post("/v1/completions", json=body)).json()["choices"][0]["text"]
    choice = (await http.post("/v1/completions", json={**body, "stop": text[12:15]})).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert text[:15].startswith(tokenizer.decode(choice["token_ids"])[:12])
    assert len(choice["token_ids"]) < 40


TEMPLATES = (
    TEMPLATE,
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }} </s>{% endfor %}",
)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("content", ["", "The quick ", " two\n\n", "in a <|im_start|> word"])
def test_a_message_is_continued_where_transformers_continues_it(template: str, content: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    turns = [ChatTurn("user", "Hello"), ChatTurn("assistant", content)]
    messages = [{"role": turn.role, "content": turn.content} for turn in turns]
    (wanted,), _ = render_jinja_template([messages], chat_template=template, continue_final_message=True)
    assert ChatTemplate(template, {}).render(turns, end=PromptEnd.WITHIN_LAST_TURN) == wanted


def test_a_template_that_repeats_the_last_message_ends_with_it() -> None:
    template = ChatTemplate(
        "{{ messages[-1].content }}|{{ messages[-1].content | trim }}|{{ messages[-1].content }}|", {}
    )
    turns = [ChatTurn("assistant", "a b")]
    assert template.render(turns, end=PromptEnd.WITHIN_LAST_TURN) == "a b|a b|a b"


def test_a_message_that_the_template_leaves_out_cannot_be_continued() -> None:
    template = ChatTemplate("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", {})
    with pytest.raises(InvalidArgument, match=r"^continue_final_message: "):
        template.render([ChatTurn("assistant", "a")], end=PromptEnd.WITHIN_LAST_TURN)
