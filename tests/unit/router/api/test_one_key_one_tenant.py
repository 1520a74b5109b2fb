"""A call has exactly one API key, which determines its tenant; text from clients is truncated in errors."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from router.access.tenants import tenant_of
from tandem.net.rpc import ERROR_CODE
from tandem.protocol.generated.tandem.v1 import inference_pb2 as pb
from tandem.protocol.generated.tandem.v1 import inference_pb2_grpc
from tests.unit.router.conftest import Cluster
from tests.unit.router.fake_cluster import until
from tests.unit.router.test_generate import ask

BODY = {"model": "fake", "prompt": [5, 6, 7, 8], "max_tokens": 4}
LONG = "界" * 20_000


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"api_keys": ("one", "two")}


def tenants(cluster: Cluster) -> set[str]:
    return {tenant for tenant, _ in cluster.router._dispatcher._live._by_client_id}


async def post(cluster: Cluster, *headers: tuple[str, str]) -> httpx.Response:
    async with httpx.AsyncClient(base_url=f"http://{cluster.endpoints.http_address}") as http:
        return await http.post("/v1/completions", json=BODY, headers=list(headers))


async def test_two_authorization_headers_are_refused_over_http(cluster: Cluster) -> None:
    """Regression: the key check used the last header and the tenant the first, so clients could choose any tenant."""
    for first in ("Bearer one", "Bearer made-up", "Basic x"):
        refused = await post(cluster, ("authorization", first), ("authorization", "Bearer two"))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "authorization")
    assert (await post(cluster, ("authorization", "Bearer two"))).status_code == 200


async def test_two_authorization_headers_are_refused_over_grpc(cluster: Cluster) -> None:
    async with grpc.aio.insecure_channel(cluster.endpoints.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        twice = (("authorization", "Bearer made-up"), ("authorization", "Bearer two"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(ask(4), metadata=twice).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "authorization" in str(caught.value.details())
        assert (await stub.Generate(ask(4), metadata=twice[1:]).read()).request_id


async def test_a_key_has_one_tenant_however_its_header_is_written(cluster: Cluster) -> None:
    cluster.decode.switches.held_at = 2
    running = [
        asyncio.create_task(post(cluster, ("authorization", header)))
        for header in ("Bearer two", "bearer two", "BEARER   two")
    ]
    await until(lambda: len(cluster.router._dispatcher._live) == 3, "all came in")
    assert tenants(cluster) == {tenant_of("two")}
    cluster.decode.go.set()
    assert [(await call).status_code for call in running] == [200] * 3


async def test_two_traceparents_count_as_none(cluster: Cluster) -> None:
    one, two = (f"00-{digit * 32}-{digit * 16}-01" for digit in "12")
    key = "authorization", "Bearer two"
    for sent in ([one], [one, two]):
        headers = [key, *(("traceparent", value) for value in sent)]
        assert (await post(cluster, *headers)).status_code == 200
        trace = cluster.router._dispatcher.metrics.traces.newest()[0]
        assert (trace.context.trace_id == "1" * 32) == (len(sent) == 1)


@pytest.mark.parametrize("field", ["model", "slo_class", "request_id"])
async def test_a_long_text_in_an_error_leaves_its_grpc_status(cluster: Cluster, field: str) -> None:
    """Regression: a model name of 20 kB made the error too large for a header, and the status RESOURCE_EXHAUSTED."""
    request = ask(4)
    setattr(request.options if field == "slo_class" else request, field, LONG)
    async with grpc.aio.insecure_channel(cluster.endpoints.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(request, metadata=(("authorization", "Bearer one"),)).read()
        role = pb.ChatRequest(messages=[pb.ChatMessage(role=LONG, content="a")])
        with pytest.raises(grpc.aio.AioRpcError) as role_caught:
            await stub.Chat(role, metadata=(("authorization", "Bearer one"),)).read()
    for error, status in ((caught.value, "NOT_FOUND" if field == "model" else ""), (role_caught.value, "")):
        assert error.code().name == (status or "INVALID_ARGUMENT")
        assert dict(error.trailing_metadata() or ())[ERROR_CODE] == error.code().name
        assert len(str(error.details())) < 600
    assert field in str(caught.value.details())


@pytest.mark.parametrize(
    "body",
    [
        {"model": LONG},
        {"response_format": {"type": LONG}},
        {"slo_class": LONG},
        {"stop": [LONG]},
        {"temperature": LONG},
    ],
)
async def test_a_long_text_in_an_error_is_cut_over_http(cluster: Cluster, body: dict[str, Any]) -> None:
    async with httpx.AsyncClient(base_url=f"http://{cluster.endpoints.http_address}") as http:
        refused = await http.post("/v1/completions", json={**BODY, **body}, headers={"authorization": "Bearer one"})
        assert refused.status_code == (404 if "model" in body else 400)
        assert len(refused.content) < 4096
        lost = await http.get(f"/{'a' * 9000}", headers={"authorization": "Bearer one"})
        assert (lost.status_code, len(lost.content) < 1024) == (404, True)
