"""Bad input gets a clear error that names the field and the limit, over gRPC and HTTP, and the next request works."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import grpc
import httpx
import pytest

from tandem.protocol.generated.tandem.v1 import inference_pb2, inference_pb2_grpc

Options = inference_pb2.GenerationOptions
NAN = float("nan")
TOO_LARGE = "10 MB body"
"""The name of a case that gRPC itself rejects by size, before the router reads anything."""


def generate(**fields: Any) -> inference_pb2.GenerateRequest:
    fields.setdefault("text", "Hello")
    return inference_pb2.GenerateRequest(**fields)


def with_options(**options: Any) -> inference_pb2.GenerateRequest:
    return generate(options=Options(**options))


def ids(*values: int) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=values))


GRPC_CASES: dict[str, tuple[inference_pb2.GenerateRequest, str]] = {
    "empty prompt": (generate(text=""), "prompt"),
    "no prompt": (inference_pb2.GenerateRequest(), "prompt"),
    "no token ids": (ids(), "prompt"),
    "prompt over the context": (ids(*[5] * 9000), "8192"),
    "prompt and answer over the context": (
        inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=[5] * 8000), options=Options(max_tokens=1000)
        ),
        "8192",
    ),
    "token id out of range": (ids(1, 49152), "49152"),
    "max_tokens 0": (with_options(max_tokens=0), "max_tokens"),
    "max_tokens negative": (with_options(max_tokens=-5), "max_tokens"),
    "temperature NaN": (with_options(temperature=NAN), "temperature"),
    "temperature negative": (with_options(temperature=-0.1), "temperature"),
    "top_p 0": (with_options(top_p=0.0), "top_p"),
    "top_p over 1": (with_options(top_p=1.5), "top_p"),
    "top_k negative": (with_options(top_k=-1), "top_k"),
    "min_p over 1": (with_options(min_p=2.0), "min_p"),
    "frequency_penalty over 2": (with_options(frequency_penalty=2.5), "frequency_penalty"),
    "repetition_penalty 0": (with_options(repetition_penalty=0.0), "repetition_penalty"),
    "logprobs over 20": (with_options(logprobs=21), "logprobs"),
    TOO_LARGE: (generate(text="a " * (5 << 20)), "4194304"),
}


@pytest.fixture(scope="module")
def cluster(running_cluster: Callable[..., Any]) -> Any:
    return running_cluster(dtype="float32", page_tokens=16, max_step_tokens=128)


def works(stub: Any) -> bool:
    *_, last = stub.Generate(with_options(max_tokens=2, ignore_eos=True), timeout=60)
    return bool(last.complete.completion_tokens == 2)


@pytest.mark.parametrize("case", GRPC_CASES)
def test_grpc(case: str, cluster: Any) -> None:
    request, words = GRPC_CASES[case]
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(request, timeout=60))
        status = grpc.StatusCode
        assert caught.value.code() is (status.RESOURCE_EXHAUSTED if case == TOO_LARGE else status.INVALID_ARGUMENT)
        assert words in caught.value.details()
        assert works(stub)


def test_grpc_unknown_model(cluster: Any) -> None:
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(generate(model="gpt-17"), timeout=60))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert "model" in caught.value.details()
        assert "gpt-17" in caught.value.details()
        assert works(stub)


CHAT: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({"messages": []}, "messages"),
    "messages missing": ({}, "messages"),
    "messages not a list": ({"messages": "hello"}, "messages"),
    "message without role": ({"messages": [{"content": "x"}]}, "role"),
    "message with unknown role": ({"messages": [{"role": "wizard", "content": "x"}]}, "role"),
    "content not text": ({"messages": [{"role": "user", "content": 17}]}, "content"),
    "max_tokens 0": ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, "max_tokens"),
    "temperature negative": ({"messages": [{"role": "user", "content": "x"}], "temperature": -1}, "temperature"),
    "temperature not a number": ({"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}, "temperature"),
    "top_p 0": ({"messages": [{"role": "user", "content": "x"}], "top_p": 0}, "top_p"),
    "unknown model": ({"messages": [{"role": "user", "content": "x"}], "model": "gpt-17"}, "gpt-17"),
}


def post(cluster: Any, path: str, **kwargs: Any) -> httpx.Response:
    return httpx.post(f"http://{cluster.http_address.removeprefix('http://')}{path}", timeout=60, **kwargs)


def http_works(cluster: Any) -> bool:
    answer = post(cluster, "/v1/completions", json={"prompt": "Hello", "max_tokens": 2, "ignore_eos": True})
    return answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", CHAT)
def test_chat(case: str, stream: bool, cluster: Any) -> None:
    body, words = CHAT[case]
    answer = post(cluster, "/v1/chat/completions", json={**body, "stream": stream})
    assert answer.status_code == (404 if case == "unknown model" else 400), answer.text
    assert words in json.dumps(answer.json()["error"])
    assert http_works(cluster)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"{not json", "JSON"), (b'"a string"', "object"), (b'{"prompt": "' + b"a" * (10 << 20) + b'"}', "bytes")],
    ids=["not JSON", "not an object", "10 MB"],
)
def test_raw_body(content: bytes, words: str, cluster: Any) -> None:
    answer = post(cluster, "/v1/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert http_works(cluster)


def test_nan_in_json(cluster: Any) -> None:
    answer = post(cluster, "/v1/completions", content=b'{"prompt": "x", "temperature": NaN}')
    assert answer.status_code == 400
    assert http_works(cluster)
