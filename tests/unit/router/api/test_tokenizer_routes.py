"""The HTTP routes to the tokenizer."""

import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from router.text.tokenizer import Tokenizer
from tests.unit.router.conftest import TEMPLATE, Cluster

MESSAGES = [{"role": "user", "content": "Hello there"}]


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"api_keys": ("k",)}


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=f"http://{cluster.endpoints.http_address}", timeout=60, headers={"authorization": "Bearer k"}
    ) as client:
        yield client


async def test_a_text_there_and_back(http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    text = "The fox <|im_end|> naïve 😀"
    reply = (await http.post("/tokenize", json={"model": "fake", "prompt": text})).json()
    ids = tokenizer.encode(text)
    assert reply == {"count": len(ids), "max_model_len": 2048, "tokens": ids}
    assert 2 in ids
    back = await http.post("/detokenize", json={"model": "fake", "tokens": ids})
    assert back.json() == {"prompt": text}


async def test_token_strs_are_the_tokenizer_s_spellings(http: httpx.AsyncClient) -> None:
    reply = (await http.post("/tokenize", json={"prompt": " fox<|im_end|>", "return_token_strs": True})).json()
    assert "".join(reply["token_strs"]) == "Ġfox<|im_end|>"
    assert len(reply["token_strs"]) == reply["count"]


async def test_a_conversation_has_the_tokens_that_a_completion_prefills(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    reply = (await http.post("/tokenize", json={"model": "fake", "messages": MESSAGES})).json()
    await http.post("/v1/chat/completions", json={"model": "fake", "messages": MESSAGES, "max_tokens": 2})
    assert tuple(reply["tokens"]) == cluster.prefill.prefills[-1].prompt_token_ids


async def test_no_id_shows_the_separator_of_special_tokens(http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    reply = await http.post("/detokenize", json={"tokens": [5, tokenizer.vocab_size]})
    assert reply.status_code == 400 or reply.json()["prompt"] == tokenizer.decode([5])
    assert tokenizer.decode_all([5, tokenizer.vocab_size]) == tokenizer.decode([5])


@pytest.mark.parametrize(
    ("path", "body", "field", "status"),
    [
        ("/tokenize", {"model": "other", "prompt": "x"}, "model", 404),
        ("/tokenize", {"prompt": ""}, "prompt", 400),
        ("/tokenize", {}, "messages", 400),
        ("/tokenize", {"messages": []}, "messages", 400),
        ("/tokenize", {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens", 400),
        ("/detokenize", {"tokens": []}, "tokens", 400),
        ("/detokenize", {"tokens": [10**6]}, "tokens", 400),
        ("/detokenize", {"tokens": [5] * 2049}, "tokens", 400),
        ("/detokenize", {"tokens": "x"}, "tokens", 400),
    ],
)
async def test_wrong_fields_are_named(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], field: str, status: int
) -> None:
    reply = await http.post(path, json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, field)


async def test_the_work_is_done_in_the_tokenizer_s_threads(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    encode = Tokenizer.encode

    def seen(self: Tokenizer, text: str, **options: Any) -> list[int]:
        names.append(threading.current_thread().name)
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", seen)
    assert (await http.post("/tokenize", json={"prompt": "x"})).status_code == 200
    assert [name.startswith("router-tokenizer") for name in names] == [True]


async def test_info_says_what_the_folder_says_and_a_key_is_needed(http: httpx.AsyncClient) -> None:
    info = (await http.get("/tokenizer_info")).json()
    assert info == {
        "tokenizer_class": None,
        "chat_template": TEMPLATE,
        "eos_token": "<|im_end|>",
        "bos_token": "<|im_start|>",
    }
    for method, path in (("GET", "/tokenizer_info"), ("POST", "/tokenize"), ("POST", "/detokenize")):
        assert (await http.request(method, path, headers={"authorization": ""})).status_code == 401
