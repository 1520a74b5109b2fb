"""Keys with roles and quotas at both listeners, and the audit log of what came there."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import openai
import pytest

from router.access.quota import QUOTA_HEADERS
from router.requests.validation import RequestValidator
from tandem.net.limits.call_count import CallCount
from tandem.net.rpc import error_of
from tandem.protocol.errors import RateLimited, ResourceExhausted
from tandem.protocol.generated.tandem.v1 import inference_pb2 as pb
from tests.unit.router.conftest import Cluster
from tests.unit.router.fake_cluster import channel_to, until
from tests.unit.router.test_generate import Client, ask

KEYS = """
small-key name=small requests_per_minute=2
talker-key name=talker tokens_per_minute=5
other-key name=other
ops-key name=ops role=operator
reads-key name=reads role=reader
"""
BODY: dict[str, Any] = {"model": "fake", "prompt": [5, 6, 7, 8], "max_tokens": 4}


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "keys").write_text(KEYS)
    return {
        "api_key_file": tmp_path / "keys",
        "metrics_key": "metrics-key",
        "audit_log": tmp_path / "audit.jsonl",
    }


@pytest.fixture
def audited(settings: dict[str, Any]) -> Callable[[int], Awaitable[list[dict[str, Any]]]]:
    def written() -> list[dict[str, Any]]:
        return [json.loads(line) for line in settings["audit_log"].read_text().splitlines()]

    async def read(count: int) -> list[dict[str, Any]]:
        """Returns the records once there are `count`."""
        await until(lambda: len(written()) >= count, f"{count} records")
        return written()

    return read


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{cluster.endpoints.http_address}") as opened:
        yield opened


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def client_of(cluster: Cluster, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://{cluster.endpoints.http_address}/v1", api_key=key, max_retries=0)


async def status_of(call: Any) -> str:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def test_roles_at_both_listeners(cluster: Cluster, http: httpx.AsyncClient) -> None:
    expected = {  # metrics, completions, GetLoads, GetServerInfo, Generate
        "other-key": (403, 200, "PERMISSION_DENIED", "PERMISSION_DENIED", "OK"),
        "ops-key": (200, 200, "OK", "OK", "OK"),
        "reads-key": (200, 403, "OK", "OK", "PERMISSION_DENIED"),
        "metrics-key": (200, 403, "OK", "OK", "PERMISSION_DENIED"),
        "unknown": (401, 401, "UNAUTHENTICATED", "UNAUTHENTICATED", "UNAUTHENTICATED"),
    }
    for key, wanted in expected.items():
        metrics = await http.get("/metrics", headers=bearer(key))
        traces = await http.get("/traces", headers=bearer(key))
        answer = await http.post("/v1/completions", json=BODY, headers=bearer(key))
        assert traces.status_code == metrics.status_code
        async with channel_to(cluster.endpoints.grpc_address, key) as channel:
            stub = Client(channel).stub
            statuses = (
                metrics.status_code,
                answer.status_code,
                await status_of(stub.GetLoads(pb.GetLoadsRequest())),
                await status_of(stub.GetServerInfo(pb.GetServerInfoRequest())),
                await status_of(stub.Generate(ask(4)).read()),
            )
        assert statuses == wanted, key
        if answer.status_code == 403:
            assert answer.json()["error"]["type"] == "permission_error"
    async with client_of(cluster, "reads-key") as client:
        with pytest.raises(openai.PermissionDeniedError, match="this key has the role reader"):
            await client.completions.create(**BODY)


async def test_a_quota_of_requests(cluster: Cluster, http: httpx.AsyncClient) -> None:
    async with client_of(cluster, "small-key") as client:
        raw = await client.completions.with_raw_response.create(**BODY)
        assert (raw.headers["x-ratelimit-limit-requests"], raw.headers["x-ratelimit-remaining-requests"]) == ("2", "1")
        assert "x-ratelimit-limit-tokens" not in raw.headers
        await client.models.list()  # takes nothing
        await client.completions.create(**BODY)
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(**BODY)
    assert caught.value.code == "rate_limit_exceeded"
    assert caught.value.type == "rate_limit_error"
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 30
    assert caught.value.response.headers["x-ratelimit-remaining-requests"] == "0"
    async with channel_to(cluster.endpoints.grpc_address, "small-key") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await Client(channel).run(ask(4))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        error = error_of(refused.value, "the router")
        assert isinstance(error, RateLimited)
        assert 0 < error.retry_after_s <= 30
        assert await status_of(Client(channel).stub.GetModelInfo(pb.GetModelInfoRequest())) == "OK"
    other = await http.post("/v1/completions", json=BODY, headers=bearer("other-key"))
    assert other.status_code == 200, "others are not held up"
    assert not set(QUOTA_HEADERS) & set(other.headers)
    text = (await http.get("/metrics", headers=bearer("ops-key"))).text
    (line,) = (entry for entry in text.splitlines() if "admission_rejections_total{" in entry and '"quota"' in entry)
    assert float(line.split()[-1]) == 2


async def test_a_quota_of_tokens_counts_prompt_and_answer(cluster: Cluster, http: httpx.AsyncClient) -> None:
    stream = {**BODY, "stream": True}
    answer = await http.post("/v1/completions", json=stream, headers=bearer("talker-key"))
    assert answer.status_code == 200
    assert answer.headers["x-ratelimit-remaining-tokens"] == "1", "four of the prompt are taken"
    refused = await http.post("/v1/completions", json=BODY, headers=bearer("talker-key"))
    assert refused.status_code == 429
    assert "5 tokens a minute" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) > 36, "three more than there were, and one, at one in 12 s"


async def test_keys_are_rotated_without_a_restart(
    cluster: Cluster, http: httpx.AsyncClient, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.net.security.watched_files.CHECK_S", 0.0)
    settings["api_key_file"].write_text(f"{KEYS}\nnew-key name=other")
    async with channel_to(cluster.endpoints.grpc_address, "new-key") as channel:
        for _ in range(600):  # the file is read at most once a second
            if (status := await status_of(Client(channel).stub.Generate(ask(4)).read())) == "OK":
                break
            await asyncio.sleep(0.1)
        assert status == "OK"
        for key in ("other-key", "new-key"):
            assert (await http.post("/v1/completions", json=BODY, headers=bearer(key))).status_code == 200
    assert len({task.cache_salt for task in cluster.prefill.prefills}) == 1, "both keys are one tenant"
    settings["api_key_file"].write_text("new-key name=other")
    assert (await http.post("/v1/completions", json=BODY, headers=bearer("other-key"))).status_code == 401


async def test_every_call_is_in_the_audit_log(
    cluster: Cluster, http: httpx.AsyncClient, audited: Callable[[int], Awaitable[list[dict[str, Any]]]]
) -> None:
    secret = {**BODY, "prompt": "a secret prompt", "max_tokens": 5}
    await http.post("/v1/completions?who=secret", json=secret, headers=bearer("other-key"))
    await http.post("/v1/completions", json={**secret, "stream": True}, headers=bearer("ops-key"))
    await http.post("/v1/completions", json={**secret, "model": "unknown"}, headers=bearer("other-key"))
    await http.post("/v1/completions", json=secret, headers={**bearer("wrong-secret"), "x-request-id": "mine"})
    async with channel_to(cluster.endpoints.grpc_address, "other-key") as channel:
        client = Client(channel)
        _, tokens, complete = await client.run(ask(4))
        await status_of(client.stub.GetLoads(pb.GetLoadsRequest()))
    await http.get("/health")
    records = await audited(6)
    names = "tenant", "endpoint", "model", "status", "error", "completion_tokens"
    posted = "POST /v1/completions"
    assert [tuple(record[name] for name in names) for record in records] == [
        ("other", posted, "fake", 200, "", 5),
        ("ops", posted, "fake", 200, "", 5),
        ("other", posted, "", 404, "NOT_FOUND", 0),
        ("", posted, "", 401, "UNAUTHENTICATED", 0),
        ("other", "Generate", "fake", "OK", "", len(tokens)),
        ("", "GetLoads", "", "PERMISSION_DENIED", "PERMISSION_DENIED", 0),
    ]
    assert records[0]["prompt_tokens"] == records[1]["prompt_tokens"] > 0
    assert records[4]["prompt_tokens"] == complete.prompt_tokens
    assert records[3]["request_id"] == "mine"
    assert {record["client"] for record in records} == {"127.0.0.1"}
    assert all(record["request_id"] for record in records[:4])
    text = json.dumps(records)
    assert "secret" not in text
    assert "-key" not in text


async def test_grpc_calls_without_a_key_and_aborts_are_in_the_audit_log(
    cluster: Cluster, audited: Callable[[int], Awaitable[list[dict[str, Any]]]]
) -> None:
    reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    async with grpc.aio.insecure_channel(cluster.endpoints.grpc_address) as channel:
        stub = Client(channel).stub
        twice = (("authorization", "Bearer other-key"), ("authorization", "Bearer ops-key"))
        wrong = (("authorization", "Bearer wrong-secret"),)
        assert await status_of(stub.Generate(ask(4)).read()) == "UNAUTHENTICATED"
        assert await status_of(stub.GetLoads(pb.GetLoadsRequest(), metadata=wrong)) == "UNAUTHENTICATED"
        assert await status_of(channel.unary_unary(reflection)(b"")) == "UNAUTHENTICATED"
        assert await status_of(stub.Abort(pb.AbortRequest(request_id="x"), metadata=twice)) == "INVALID_ARGUMENT"
        await audited(4)
        abort = pb.AbortRequest(request_id="mine")
        assert not (await stub.Abort(abort, metadata=twice[:1])).found
    records = await audited(5)
    names = "tenant", "endpoint", "status", "error", "request_id", "client"
    client = "127.0.0.1"
    assert [tuple(record[name] for name in names) for record in records] == [
        ("", "Generate", "UNAUTHENTICATED", "UNAUTHENTICATED", "", client),
        ("", "GetLoads", "UNAUTHENTICATED", "UNAUTHENTICATED", "", client),
        ("", reflection, "UNAUTHENTICATED", "UNAUTHENTICATED", "", client),
        ("", "Abort", "INVALID_ARGUMENT", "INVALID_ARGUMENT", "", client),
        ("other", "Abort", "OK", "", "mine", client),
    ]
    assert "secret" not in json.dumps(records)


async def test_errors_outside_of_handlers_are_recorded(
    cluster: Cluster,
    http: httpx.AsyncClient,
    audited: Callable[[int], Awaitable[list[dict[str, Any]]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: a call over the limit, a defect and an unknown path had a status and no error."""

    async def defect(*_arguments: Any, **_options: Any) -> None:
        raise RuntimeError

    def refuse(_count: CallCount) -> None:
        raise ResourceExhausted("too many calls")

    key = bearer("other-key")
    await http.get("/unknown", headers=key)
    await http.get("/v1/completions", headers=key)
    monkeypatch.setattr(RequestValidator, "tokenize", defect)
    assert (await http.post("/tokenize", json={"prompt": "x"}, headers=key)).status_code == 500
    monkeypatch.setattr(CallCount, "enter", refuse)
    await http.post("/v1/messages", json=BODY, headers=key)
    assert [(record["status"], record["error"]) for record in await audited(4)] == [
        (404, "NOT_FOUND"),
        (405, "METHOD_NOT_ALLOWED"),
        (500, "INTERNAL"),
        (429, "RESOURCE_EXHAUSTED"),
    ]


async def test_a_client_that_leaves_is_recorded(
    cluster: Cluster, http: httpx.AsyncClient, audited: Callable[[int], Awaitable[list[dict[str, Any]]]]
) -> None:
    cluster.decode.switches.held_at = 2
    stream = {**BODY, "stream": True, "max_tokens": 8}
    async with http.stream("POST", "/v1/completions", json=stream, headers=bearer("other-key")) as answer:
        await anext(answer.aiter_bytes())
    (record,) = await audited(1)
    assert (record["status"], record["error"], record["tenant"]) == (200, "CANCELLED", "other")
    async with channel_to(cluster.endpoints.grpc_address, "other-key") as channel:
        call = Client(channel).stub.Generate(ask(8))
        await anext(aiter(call))
        call.cancel()
    _, record = await audited(2)
    assert (record["endpoint"], record["status"], record["error"]) == ("Generate", "CANCELLED", "CANCELLED")
    cluster.decode.go.set()
