"""Large conversations of every API are measured first, and read in a thread."""

import json
import re
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from router.api.body import Body
from router.text.tokenizer import Tokenizer
from tests.unit.router.conftest import Cluster

MIB = 1 << 20
ITEMS = {
    "/v1/chat/completions": "messages",
    "/v1/responses": "input",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "messages",
    "/tokenize": "messages",
}
pytestmark = pytest.mark.parametrize("path", ITEMS)


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{cluster.endpoints.http_address}", timeout=60) as opened:
        yield opened


def asked(path: str, text: str) -> dict[str, Any]:
    return {ITEMS[path]: [{"role": "user", "content": text}]}


async def test_a_body_of_many_items_is_refused_before_it_is_read(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(Body, "model_validate", None)  # reading it would fail
    for items in (b"{}," * MIB, b'{"role":"user","content":[' + b"{}," * MIB):
        data = b'{"%s":[' % ITEMS[path].encode() + items
        answer = await http.post(path, content=data[: 4 * MIB])
        assert answer.status_code == 400
        assert re.search("more than (262144 fields|65536 strings)", answer.json()["error"]["message"])


async def test_a_large_body_is_read_in_a_thread(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    threads, read = [], Body.model_validate

    def noted(kind: type[Body], value: Any) -> Body:
        threads.append(threading.current_thread().name)
        return read.__func__(kind, value)  # type: ignore[attr-defined, no-any-return]

    monkeypatch.setattr(Body, "model_validate", classmethod(noted))
    answer = await http.post(path, content=json.dumps(asked(path, "a")).encode() + b" " * MIB)
    assert answer.status_code == 200
    assert [name.startswith("router-tokenizer") for name in threads] == [True]


async def test_a_conversation_that_no_context_holds_is_not_tokenized(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(Tokenizer, "encode_rendered", None)
    answer = await http.post(path, json=asked(path, "the quick brown fox " * 50_000))
    assert answer.status_code == 400
    words = "prompt is too long" if path.startswith("/v1/messages") else "requested at least"
    assert words in answer.json()["error"]["message"]
