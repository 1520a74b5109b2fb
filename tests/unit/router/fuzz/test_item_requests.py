"""Any body of the Responses and the Messages API gets an answer that is never the server's fault."""

from __future__ import annotations

import json
from http.client import HTTPMessage
from typing import Any

from hypothesis import given

from tests.unit.router.fuzz.conftest import AUTHORIZATION, FuzzedRouter, cases
from tests.unit.router.fuzz.item_bodies import MESSAGES, RESPONSES
from tests.unit.router.fuzz.json_bodies import encoded

_KEY = [("Authorization", AUTHORIZATION)]


def answer_of(status: int, headers: HTTPMessage, body: bytes) -> dict[str, Any]:
    """Returns the answer or the last event of a stream; asserts a success or a 4xx error with a message."""
    assert 200 <= status < 500, (status, body)
    if headers.get_content_type() == "text/event-stream":
        events = [block.split(b"\ndata: ") for block in body.split(b"\n\n") if block.startswith(b"event: ")]
        items = [json.loads(data) for _, data in events]
        assert [event["type"].encode() for event in items] == [name.removeprefix(b"event: ") for name, _ in events]
        return dict(items[-1])
    reply = json.loads(body)
    if status >= 400:
        assert reply["error"]["message"]
    return dict(reply)


@cases(0.1)
@given(body=encoded(RESPONSES))
def test_responses(router: FuzzedRouter, body: bytes) -> None:
    status, headers, reply = router.send("POST", "/v1/responses", _KEY, body)
    answer = answer_of(status, headers, reply)
    if status == 200:
        answer = answer.get("response", answer)
        assert answer["status"] in ("completed", "incomplete")
        assert answer["output"]
    router.assert_next_one_works(every=10)


@cases(0.1)
@given(body=encoded(MESSAGES))
def test_messages(router: FuzzedRouter, body: bytes) -> None:
    status, headers, reply = router.send("POST", "/v1/messages", _KEY, body)
    answer = answer_of(status, headers, reply)
    assert answer["type"] == ("error" if status != 200 else "message" if "content" in answer else "message_stop")
    counted = answer_of(*router.send("POST", "/v1/messages/count_tokens", _KEY, body))
    assert status != 200 or counted["input_tokens"] > 0
    router.assert_next_one_works(every=10)
