"""Bodies that schemathesis makes of the OpenAPI page, fitting its models or not, never get an error of the server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.router.fuzz.conftest import AUTHORIZATION, FuzzedRouter, cases

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
KEY = [("Authorization", AUTHORIZATION), ("Content-Type", "application/json")]
_EVENTS = "text/event-stream"


@pytest.fixture(scope="module")
def operations(running_router: Any) -> list[Any]:
    """All operations on the page of a router."""
    _, _, page = running_router.send("GET", "/openapi.json", [], b"")
    schema = schemathesis.openapi.from_dict(json.loads(page))
    valid = [result.ok() for result in schema.get_all_operations()]
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize", "/metrics"} <= {
        operation.path for operation in valid
    }
    return valid


def _calls(operations: list[Any], *, fitting: bool) -> st.SearchStrategy[Any]:
    mode = schemathesis.GenerationMode.POSITIVE if fitting else schemathesis.GenerationMode.NEGATIVE
    taking = [operation for operation in operations if fitting or operation.body]
    return st.one_of([operation.as_strategy(generation_mode=mode) for operation in taking])


def _send(router: FuzzedRouter, case: Any) -> tuple[int, str, bytes]:
    """Returns the reply's status, media type and body."""
    sent = case.as_transport_kwargs(base_url="http://router")
    body = json.dumps(sent["json"]).encode() if "json" in sent else sent.get("data") or b""
    status, headers, reply = router.send(case.method.upper(), sent["url"].removeprefix("http://router"), KEY, body)
    return status, headers.get_content_type(), reply


def _assert_no_error_of_the_server(status: int, media_type: str, reply: bytes) -> None:
    assert 200 <= status < 500, (status, reply)
    if status >= 400:
        error = json.loads(reply)["error"]
        assert error["message"]
        assert status != 400 or error.get("param", error["message"].partition(": ")[1])
    if media_type == _EVENTS:
        assert reply.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("fitting", [True, False])
def test_no_call_on_the_page_gets_an_error_of_the_server(
    router: FuzzedRouter, operations: list[Any], fitting: bool
) -> None:
    @cases(0.1)
    @given(case=_calls(operations, fitting=fitting))
    def run(case: Any) -> None:
        _assert_no_error_of_the_server(*_send(router, case))
        router.assert_next_one_works(every=20)

    run()
