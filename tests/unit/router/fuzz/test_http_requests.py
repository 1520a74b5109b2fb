"""Whole HTTP requests with any body, headers and method get an answer that is never the server's fault."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.router.fuzz.conftest import AUTHORIZATION, FuzzedRouter, cases
from tests.unit.router.fuzz.json_bodies import bodies, encoded

_VALUES = st.one_of(
    st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=12),
    st.sampled_from(["", "application/json", "text/plain; charset=utf-16", "gzip", "a" * 5000, "00-" + "0" * 52]),
)
_NAMES = [
    *("Content-Type", "Content-Encoding", "Accept", "Accept-Encoding", "Traceparent", "Tracestate", "X-Request-Id"),
    *("Origin", "Cookie", "Access-Control-Request-Method", "X-Api-Key", "Forwarded", "Range", "Authorization", "TE"),
]
_HEADERS = st.lists(st.tuples(st.sampled_from(_NAMES), _VALUES), max_size=4)
_METHODS = st.sampled_from(["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "FOO"])
_KNOWN_PATHS = [
    *("/", "/health", "/ready", "/live", "/metrics", "/traces", "/traces?id=x", "/traces?slow", "/version", "/ping"),
    *("/v1/models", "/v1/models/fake", "/v1/models/%00", "/v1/models/a%2Fb", "/v1/chat/completions", "/v1/completions"),
    *("/v1/completions/", "//v1/completions", "/v1/../v1/completions", "/v1/nothing", "/%ff", "/?%ff=%ff"),
]
_PATHS = st.one_of(
    st.sampled_from(_KNOWN_PATHS),
    st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20).map(lambda text: f"/{text}"),
)
_SENT = st.tuples(_METHODS, _PATHS, _HEADERS, st.binary(max_size=40))


def assert_answered(status: int, body: bytes, *, streamed: bool) -> None:
    """Asserts a success or a 4xx error with a clear message; 503 is wrong, too, as workers are ready."""
    assert 200 <= status < 500, (status, body)
    if status >= 400:
        assert json.loads(body)["error"]["message"]
    elif streamed:
        events = [
            json.loads(event.removeprefix(b"data: ")) for event in body.split(b"\n\n") if event.startswith(b"data: {")
        ]
        assert events
        assert not any("error" in event for event in events), body
        assert body.endswith(b"data: [DONE]\n\n")
    else:
        assert json.loads(body)["choices"]


@cases(0.25)
@given(body=encoded(bodies(chat=True)))
def test_chat_completions(router: FuzzedRouter, body: bytes) -> None:
    status, headers, reply = router.send("POST", "/v1/chat/completions", [("Authorization", AUTHORIZATION)], body)
    assert_answered(status, reply, streamed=headers.get_content_type() == "text/event-stream")
    router.assert_next_one_works(every=10)


@cases(0.2)
@given(body=encoded(bodies(chat=False)))
def test_completions(router: FuzzedRouter, body: bytes) -> None:
    status, headers, reply = router.send("POST", "/v1/completions", [("Authorization", AUTHORIZATION)], body)
    assert_answered(status, reply, streamed=headers.get_content_type() == "text/event-stream")
    router.assert_next_one_works(every=10)


@cases(0.15)
@given(sent=_SENT, keys=st.integers(0, 2))
def test_any_method_path_and_headers(
    router: FuzzedRouter, sent: tuple[str, str, list[tuple[str, str]], bytes], keys: int
) -> None:
    method, path, headers, body = sent
    status, _, _ = router.send(method, path, [*headers, *[("Authorization", AUTHORIZATION)] * keys], body)
    assert 200 <= status < 500
    router.assert_next_one_works(every=10)
