"""Common load generators, client libraries and a generated stub, each in a virtual environment of its own.

`.ci/client_environments` creates them, in TANDEM_CLIENT_ENVIRONMENTS or the user's cache; TANDEM_EXTERNAL_CLIENTS=1
runs it first, which takes minutes. `make soak` runs the tests whose environment is there. The commands are those of
docs/operations/clients.md.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.soak import soak

REQUESTS, PROMPT_TOKENS, ANSWER_TOKENS = 50, 64, 16
MODEL = "SmolLM2-135M-Instruct"
PROTO = Path(__file__).parents[2] / "proto"
CLIENT_TEST_S = 1440.0
"""The time limit of a test, in which its environment may be installed."""
ASKED = "What is the weather in Paris, in celsius?"
SCHEMAS = """
import json
import sys
from typing import Literal
from pydantic import BaseModel, ConfigDict, Field

model, url, question = sys.argv[1:]

class Weather(BaseModel):
    "Returns the weather of a city."
    model_config = ConfigDict(extra="forbid")
    city: str = Field(max_length=30)
    unit: Literal["celsius", "fahrenheit"]

class Person(BaseModel):
    "A person."
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=40)
    age: int = Field(ge=0, le=150)

ANN = "Describe Ann, who is 31 years old, as JSON with a name and an age."
"""
LITELLM = (
    SCHEMAS
    + """
import litellm

def chat(content=question, **fields):
    asked = {"api_base": url, "max_tokens": 100, "temperature": 0, "num_retries": 0} | fields
    messages = asked.pop("messages", [{"role": "user", "content": content}])
    return litellm.completion(model="hosted_vllm/" + asked.pop("model", model), messages=messages, **asked)

def fails(kind, *words, **fields):
    try:
        chat(**fields)
    except kind as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(kind)

capital = "What is the capital of France?"
whole = chat(capital, max_tokens=40)
assert "Paris" in whole.choices[0].message.content
chunks = list(chat(capital, max_tokens=40, stream=True, stream_options={"include_usage": True}))
text = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
assert text == whole.choices[0].message.content
assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens

tool = {"type": "function", "function": {"name": "weather", "parameters": Weather.model_json_schema()}}
asked = chat(tools=[tool], tool_choice="required").choices[0]
(call,) = asked.message.tool_calls
arguments = json.loads(call.function.arguments)
# LiteLLM takes `additionalProperties` out of the schemas that it sends to this kind of server.
Weather.model_validate({name: arguments[name] for name in Weather.model_fields})
assert (call.function.name, asked.finish_reason) == ("weather", "tool_calls")
result = {"role": "tool", "tool_call_id": call.id, "content": "It is 21 degrees and sunny."}
final = chat(messages=[{"role": "user", "content": question}, asked.message, result])
assert final.choices[0].message.content

assert Person.model_validate_json(chat(ANN, response_format=Person).choices[0].message.content).age == 31
fails(litellm.NotFoundError, "gpt-17", model="gpt-17")
fails(litellm.BadRequestError, "logit_bias", logit_bias={"5": 300})
fails(litellm.ContextWindowExceededError, "maximum context length is", content="word " * 20_000)
"""
)
LANGCHAIN = (
    SCHEMAS
    + """
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

def chat(**fields):
    fixed = {"model": model, "base_url": url, "api_key": "unused", "max_tokens": 100, "max_retries": 0}
    return ChatOpenAI(**(fixed | {"temperature": 0} | fields))

asked = HumanMessage(question)
calling = chat().bind_tools([Weather], tool_choice="required")
called = calling.invoke([asked])
(call,) = called.tool_calls
assert not called.invalid_tool_calls
first, *rest = calling.stream([asked])
assert sum(rest, first).tool_calls[0]["args"] == call["args"]
result = ToolMessage("It is 21 degrees and sunny.", tool_call_id=call["id"])
assert chat().invoke([asked, called, result]).content

for seed in range(4):
    hot = chat(temperature=1.0, seed=seed).bind_tools([Weather, Person], tool_choice="required")
    (call,) = hot.invoke([asked]).tool_calls
    {"Weather": Weather, "Person": Person}[call["name"]].model_validate(call["args"])

for method in ("json_schema", "function_calling"):
    assert chat().with_structured_output(Person, method=method).invoke(ANN).age == 31, method
"""
)
INSTRUCTOR = (
    SCHEMAS
    + """
import instructor
from openai import OpenAI

for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.RESPONSES_TOOLS):
    client = instructor.from_openai(OpenAI(base_url=url, api_key="unused", max_retries=0), mode=mode)
    question = {"role": "user", "content": ANN}
    found = client.create(
        model=model, messages=[question], response_model=Person, max_retries=0, max_tokens=100, temperature=0
    )
    assert found.age == 31, (mode, found)
"""
)
GRPC = """
import sys
sys.path.insert(0, "stub")
import grpc
from tandem.v1 import inference_pb2, inference_pb2_grpc

channel = grpc.insecure_channel(sys.argv[1])
stub = inference_pb2_grpc.InferenceStub(channel)
assert stub.GetModelInfo(inference_pb2.GetModelInfoRequest()).model == sys.argv[2]
options = inference_pb2.GenerationOptions(max_tokens=8, ignore_eos=True)
replies = list(stub.Generate(inference_pb2.GenerateRequest(text="The sea is", options=options)))
assert sum(len(each.chunk.token_ids) for each in replies) == 8
assert replies[-1].complete.completion_tokens == 8
try:
    list(stub.Generate(inference_pb2.GenerateRequest(text="The sea is", model="gpt-17")))
except grpc.RpcError as error:
    assert error.code() == grpc.StatusCode.NOT_FOUND, error
    assert "gpt-17" in error.details()
else:
    raise AssertionError("an unknown model answered")
# The bytes of HealthCheckRequest{}, HealthCheckResponse{SERVING} and ServerReflectionRequest{list_services: ""}.
assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"") == b"\\x08\\x01"
reflect = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
assert b"tandem.v1.Inference" in next(reflect(iter([b"\\x3a\\x00"])))
"""


@pytest.fixture(scope="module")
def cluster(running_cluster: Callable[..., Any]) -> Any:
    """The cluster, which other modules share."""
    return running_cluster(dtype="float32", page_tokens=16, max_step_tokens=128)


@pytest.fixture(scope="module")
def url(cluster: Any) -> str:
    """The URL of the router's HTTP listener."""
    return f"http://{cluster.http_address}"


def tokens(url: str) -> tuple[int, int]:
    """Returns the prompt and generation tokens of successful requests since the router's start."""
    totals = {"tandem_prompt_tokens_total": 0, "tandem_generation_tokens_total": 0}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=60).text):
        for sample in family.samples:
            if sample.name in totals:
                totals[sample.name] += int(sample.value)
    prompts, answers = totals.values()
    return prompts, answers


def since(url: str, before: tuple[int, int]) -> tuple[int, int]:
    """Returns the prompt and generation tokens since `before`."""
    prompts, answers = tokens(url)
    return prompts - before[0], answers - before[1]


@soak
@pytest.mark.timeout(CLIENT_TEST_S)
def test_guidellm(run: Callable[..., str], url: str, model_folder: Path, tmp_path: Path) -> None:
    before = tokens(url)
    out = run(
        "guidellm",
        *("guidellm", "run", "--disable-console-interactive"),
        *("--backend", f"kind=openai_http,target={url}"),
        *("--profile", "kind=concurrent,streams=4"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={model_folder}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={ANSWER_TOKENS}"),
        *("--output", "kind=json,path=guidellm.json"),
        HF_HUB_OFFLINE="1",
    )
    (benchmark,) = json.loads((tmp_path / "guidellm.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert (len(requests["successful"]), len(requests["errored"]), len(requests["incomplete"])) == (REQUESTS, 0, 0), out
    counted = [sum(request[name] for request in requests["successful"]) for name in ("prompt_tokens", "output_tokens")]
    assert tuple(counted) == since(url, before)
    assert counted[1] == REQUESTS * ANSWER_TOKENS


@soak
@pytest.mark.parametrize("counts", ["the-server's", "its-own"])
@pytest.mark.timeout(CLIENT_TEST_S)
def test_aiperf(run: Callable[..., str], url: str, model_folder: Path, tmp_path: Path, counts: str) -> None:
    """AIPerf counts tokens with the model's tokenizer, and then prompts are sent without a chat template."""
    served = counts == "the-server's"
    usage = ("--use-server-token-count", "--per-chunk-usage") if served else ()
    before = tokens(url)
    run(
        "aiperf",
        *("aiperf", "profile", "--model", MODEL, "--url", url, "--streaming", *usage),
        *("--endpoint-type", "chat" if served else "completions"),
        *("--tokenizer", str(model_folder), "--extra-inputs", "ignore_eos:true"),
        *("--request-count", str(REQUESTS), "--concurrency", "4"),
        *("--isl", str(PROMPT_TOKENS), "--osl", str(ANSWER_TOKENS)),
        *("--ui", "none", "--no-gpu-telemetry", "--artifact-dir", "aiperf"),
    )
    records = [json.loads(line) for line in (tmp_path / "aiperf" / "profile_export.jsonl").read_text().splitlines()]
    assert len(records) == REQUESTS
    assert not [record["error"] for record in records if record.get("error")]

    def total(name: str) -> int:
        return sum(int(record["metrics"][name]["value"]) for record in records)

    prompts, answers = since(url, before)
    assert (total("usage_prompt_tokens"), total("usage_completion_tokens")) == (prompts, answers)
    assert answers == REQUESTS * ANSWER_TOKENS
    if not served:
        assert total("input_sequence_length") == prompts


@soak
@pytest.mark.timeout(CLIENT_TEST_S)
@pytest.mark.parametrize(
    ("client", "script"), [("litellm", LITELLM), ("langchain-openai", LANGCHAIN), ("instructor", INSTRUCTOR)]
)
def test_chats_tools_and_formats(run: Callable[..., str], url: str, client: str, script: str) -> None:
    """The model was not trained for tools; its arguments validate nevertheless."""
    run(client, "python", "-c", script, MODEL, f"{url}/v1", ASKED, LITELLM_LOCAL_MODEL_COST_MAP="True")


@soak
@pytest.mark.timeout(CLIENT_TEST_S)
def test_a_stub_of_the_published_schema(run: Callable[..., str], cluster: Any, tmp_path: Path) -> None:
    """An environment with grpcio-tools alone; health and reflection answer as any gRPC tool asks for them."""
    (tmp_path / "stub").mkdir()
    schemas = [f"tandem/v1/{name}.proto" for name in ("inference", "types")]
    made = ("--python_out=stub", "--grpc_python_out=stub", f"-I{PROTO}")
    run("grpcio-tools", "python", "-m", "grpc_tools.protoc", *made, *schemas)
    run("grpcio-tools", "python", "-c", GRPC, cluster.grpc_address, MODEL)


def test_curl_reads_a_stream(url: str) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    body = {"model": MODEL, "prompt": "The sea is", "max_tokens": 8, "ignore_eos": True, "stream": True}
    command = [curl, "-sSN", f"{url}/v1/completions", "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    sent = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    events = [event.removeprefix("data: ") for event in sent.split("\n\n") if event.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert len(events) > 2
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
