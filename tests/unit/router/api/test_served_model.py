"""The served model as clients see it: its names, and the sampling of requests that name none, over HTTP and gRPC."""

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tandem.protocol.generated.tandem.v1 import inference_pb2 as pb
from tests.unit.router.conftest import TEMPLATE, Cluster

PROMPT = {"prompt": "Hello", "max_tokens": 2}


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{cluster.endpoints.http_address}/v1") as client:
        yield client


async def sampled(cluster: Cluster, http: httpx.AsyncClient, stub: Any, **chosen: float) -> list[tuple[float, ...]]:
    """Returns the sampling that workers receive over HTTP and over gRPC."""
    await http.post("/completions", json=PROMPT | chosen)
    async for _ in stub.Generate(
        pb.GenerateRequest(text="Hello", options=pb.GenerationOptions(max_tokens=2, **chosen))
    ):
        pass
    samplings = [prefill.sampling for prefill in cluster.prefill.prefills[-2:]]
    return [
        (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.repetition_penalty)
        for sampling in samplings
    ]


class TestNames:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"served_model_names": ("first", "second", "org/third")}

    async def test_any_name_is_served_and_the_first_is_answered(self, http: httpx.AsyncClient, stub: Any) -> None:
        for name in ("first", "second", "org/third"):
            reply = await http.post("/completions", json=PROMPT | {"model": name})
            assert (reply.status_code, reply.json()["model"]) == (200, "first")
            async for _ in stub.Generate(
                pb.GenerateRequest(model=name, text="Hello", options=pb.GenerationOptions(max_tokens=2))
            ):
                pass
            assert (await http.get(f"/models/{name}")).json()["id"] == name
        listed = [model["id"] for model in (await http.get("/models")).json()["data"]]
        assert listed == ["first", "second", "org/third"]
        info = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (info.model, list(info.aliases)) == ("first", ["second", "org/third"])

    async def test_another_name_is_not_found(self, http: httpx.AsyncClient, stub: Any) -> None:
        for reply in (
            await http.post("/completions", json=PROMPT | {"model": "secon"}),
            await http.get("/models/secon"),
        ):
            assert reply.status_code == 404
            assert "serves 'first' or 'second' or 'org/third'" in reply.text
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(pb.GenerateRequest(model="secon", text="Hello")):
                pass
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


class TestGenerationConfig:
    @pytest.fixture
    def model(self, model: Path, tmp_path: Path) -> Path:
        folder = Path(shutil.copytree(model, tmp_path / "model"))
        values = {"temperature": 0.5, "top_k": 20, "top_p": 0.75, "repetition_penalty": 1.125, "max_new_tokens": 1}
        (folder / "generation_config.json").write_text(json.dumps(values))
        return folder

    async def test_it_applies_to_what_a_client_does_not_name(
        self, cluster: Cluster, http: httpx.AsyncClient, stub: Any
    ) -> None:
        assert await sampled(cluster, http, stub) == [(0.5, 20, 0.75, 0.0, 1.125)] * 2
        assert cluster.prefill.prefills[-1].sampling.max_tokens == 2
        chosen = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.25}
        assert await sampled(cluster, http, stub, **chosen) == [(1.0, 0, 1.0, 0.25, 1.125)] * 2

    class TestNone:
        @pytest.fixture
        def settings(self) -> dict[str, Any]:
            return {"generation_config": "none"}

        async def test_sampling_is_plain(self, cluster: Cluster, http: httpx.AsyncClient, stub: Any) -> None:
            assert await sampled(cluster, http, stub) == [(1.0, 0, 1.0, 0.0, 1.0)] * 2


class TestTokenizerAndTemplate:
    @pytest.fixture
    def settings(self, model: Path, tmp_path: Path) -> dict[str, Any]:
        empty = tmp_path / "model"
        empty.mkdir()
        return {
            "model": empty,
            "tokenizer": model,
            "chat_template": TEMPLATE.replace("assistant", "user"),
            "tool_call_parser": "hermes",
        }

    async def test_they_take_the_place_of_the_models(self, cluster: Cluster, http: httpx.AsyncClient) -> None:
        messages = [{"role": "user", "content": "Hi"}]
        asked = {
            "messages": messages,
            "max_tokens": 2,
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": "required",
        }
        # The grammar of the forced call is made with the other tokenizer, too.
        assert (await http.post("/chat/completions", json=asked)).status_code == 200
        text = cluster.router._validator._prompts._tokenizer.decode_all(cluster.prefill.prefills[-1].prompt_token_ids)
        assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>user\n"
