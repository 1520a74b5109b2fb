"""Formats of answers by HTTP and gRPC: the grammar that workers get, and formats that are refused by name."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest

from router.api.openai.requests import parse_chat
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.generated.tandem.v1 import inference_pb2 as pb
from tandem.protocol.generated.tandem.v1 import inference_pb2_grpc
from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent
from tandem.tokenizers.grammar_process import GrammarKind, GrammarProcess
from tandem.tokenizers.grammars import of_choices, of_ebnf, of_json_schema, of_regex
from tests.unit.router.conftest import Cluster
from tests.unit.router.fake_cluster import channel_to, until

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
EBNF = 'root ::= "a" | "b" root'
CHAT: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
NAMED = {"name": "n", "strict": True, "description": "d", "schema": SCHEMA}
SERVED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_object"}}, of_json_schema({"type": "object"})),
    ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, of_json_schema(SCHEMA)),
    ({"structured_outputs": {"json": SCHEMA}}, of_json_schema(SCHEMA)),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, of_json_schema(SCHEMA)),
    ({"structured_outputs": {"json_object": True, "regex": None}}, of_json_schema({"type": "object"})),
    ({"structured_outputs": {"choice": ["a", "b"]}}, of_choices(["a", "b"])),
    ({"structured_outputs": {"grammar": EBNF}}, of_ebnf(EBNF)),
    ({"guided_json": SCHEMA}, of_json_schema(SCHEMA)),
    ({"guided_regex": "a+"}, of_regex("a+")),
    ({"guided_choice": ["a", "b"]}, of_choices(["a", "b"])),
    ({"guided_grammar": EBNF}, of_ebnf(EBNF)),
    ({"json_schema": json.dumps(SCHEMA)}, of_json_schema(SCHEMA)),
    ({"regex": "a+"}, of_regex("a+")),
    ({"ebnf": EBNF}, of_ebnf(EBNF)),
    ({"response_format": {"type": "text"}}, ""),
    ({}, ""),
]
OBJECT = {"type": "json_object"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": 3}}, "response_format.json_schema"),
    ({"response_format": OBJECT, "guided_regex": "a"}, "guided_regex"),
    ({"response_format": OBJECT, "min_tokens": 2}, "min_tokens"),
    ({"response_format": OBJECT, "ignore_eos": True}, "ignore_eos"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": "3"}, "guided_json"),
    ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json"),
    ({"guided_regex": "(("}, "guided_regex"),
    ({"guided_regex": ["a"]}, "guided_regex"),
    ({"guided_choice": "a"}, "guided_choice"),
    ({"guided_choice": ["a", ""]}, "guided_choice"),
    ({"guided_choice": ["a", 3]}, "guided_choice"),
    ({"guided_grammar": "root := ("}, "guided_grammar"),
    ({"guided_grammar": "root ::= " + '"a" ' * 10_000}, "guided_grammar"),
    ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"disable_fallback": True}}, "structured_outputs"),
    ({"structural_tag": {"format": {}}}, "structural_tag"),
]


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{cluster.endpoints.http_address}", timeout=60) as client:
        yield client


def forget(cluster: Cluster) -> None:
    """Empties the workers' records of their calls."""
    for worker in cluster.workers:
        worker.reservations.clear()
        worker.prefills.clear()


async def test_workers_get_the_grammar(cluster: Cluster, http: httpx.AsyncClient) -> None:
    for fields, grammar in SERVED:
        reply = await http.post("/v1/chat/completions", json={**CHAT, **fields, "n": 2})
        assert reply.status_code == 200, reply.text
        assert "x-tandem-ignored" not in reply.headers
        asked = [reservation.sampling.grammar for worker in cluster.workers for reservation in worker.reservations]
        asked += [prefill.sampling.grammar for worker in cluster.workers for prefill in worker.prefills]
        assert len(asked) >= 4
        assert set(asked) == {grammar}, fields
        forget(cluster)


async def test_a_format_that_is_not_served_is_refused_by_name(cluster: Cluster, http: httpx.AsyncClient) -> None:
    for fields, named in REFUSED:
        reply = await http.post("/v1/chat/completions", json={**CHAT, **fields})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, named), reply.text
        assert len(reply.content) < 1000
        assert not any(worker.reservations for worker in cluster.workers), fields
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
        forget(cluster)


async def test_compiling_formats_stops_no_other_request_and_ends_with_its_clients(
    cluster: Cluster, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling: list[threading.Event] = []
    ended: list[threading.Event] = []

    def make(_process: GrammarProcess, _kind: GrammarKind, _value: Any, unwanted: threading.Event) -> str:
        compiling.append(unwanted)
        assert unwanted.wait(60)
        ended.append(unwanted)
        raise ValueError("is not wanted any longer")

    monkeypatch.setattr(GrammarProcess, "make", make)
    body = {**CHAT, "guided_regex": "a?" * 1000}
    calls = [asyncio.ensure_future(http.post("/v1/chat/completions", json=body)) for _ in range(8)]
    await until(lambda: len(compiling) == 1, "one of a tenant's is compiled at a time")
    for _ in range(8):
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
    assert not ended
    for call in calls:
        call.cancel()
    formats = cluster.router._validator._formats
    await until(lambda: not formats._unwanted and len(ended) == len(compiling), "all compilations have ended")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_that_fails_on_a_worker_names_the_field_of_the_request(
    cluster: Cluster, http: httpx.AsyncClient, stream: bool
) -> None:
    cluster.prefill.switches.prefill_error = InvalidArgument("grammar", "is too complex at this point; simplify it")
    reply = await http.post("/v1/chat/completions", json={**CHAT, "guided_choice": ["a", "b"], "stream": stream})
    assert "guided_choice: is too complex at this point; simplify it" in reply.text
    if not stream:
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "guided_choice")


def test_unknown_fields_of_a_format_are_refused_where_requests_are_strict() -> None:
    now = EventTime.now(LifecycleEvent.RECEIVED)
    body = json.dumps({**CHAT, "structured_outputs": {"regex": "a", "colour": "red"}}).encode()
    assert parse_chat(body, now).ignored == ("structured_outputs.colour",)
    with pytest.raises(InvalidArgument, match="colour"):
        parse_chat(body, now, strict=True)


@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        (pb.ResponseFormat(json_schema=json.dumps(SCHEMA)), of_json_schema(SCHEMA)),
        (pb.ResponseFormat(json_schema="{}"), of_json_schema({})),
        (pb.ResponseFormat(regex="a+"), of_regex("a+")),
        (pb.ResponseFormat(grammar=EBNF), of_ebnf(EBNF)),
        (pb.ResponseFormat(choice=pb.Texts(texts=["a", "b"])), of_choices(["a", "b"])),
    ],
)
async def test_the_same_by_grpc(cluster: Cluster, given: pb.ResponseFormat, grammar: str) -> None:
    async with channel_to(cluster.endpoints.grpc_address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        options = pb.GenerationOptions(max_tokens=2, response_format=given)
        assert [message async for message in stub.Generate(pb.GenerateRequest(text="x", options=options))]
    assert {reservation.sampling.grammar for worker in cluster.workers for reservation in worker.reservations} == {
        grammar
    }


@pytest.mark.parametrize(
    "given",
    [
        pb.ResponseFormat(),
        pb.ResponseFormat(json_schema=""),
        pb.ResponseFormat(json_schema="[1]"),
        pb.ResponseFormat(regex=""),
        pb.ResponseFormat(regex="(("),
        pb.ResponseFormat(grammar="x"),
        pb.ResponseFormat(choice=pb.Texts()),
        pb.ResponseFormat(choice=pb.Texts(texts=["a", ""])),
    ],
)
async def test_a_malformed_format_is_refused_by_grpc(cluster: Cluster, given: pb.ResponseFormat) -> None:
    async with channel_to(cluster.endpoints.grpc_address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        options = pb.GenerationOptions(max_tokens=2, response_format=given)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(pb.GenerateRequest(text="x", options=options)).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "response_format" in str(caught.value.details())
