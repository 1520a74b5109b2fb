"""Common load generators and a client library, each in a virtual environment of its own.

`.ci/client_environments` creates them, in TANDEM_CLIENT_ENVIRONMENTS or the user's cache; TANDEM_EXTERNAL_CLIENTS=1
runs it first, which takes minutes. A test whose environment is missing is skipped. The commands are those of
docs/operations.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

REQUESTS, PROMPT_TOKENS, ANSWER_TOKENS = 50, 64, 16
MODEL = "SmolLM2-135M-Instruct"
CLIENT_TEST_S = 1440.0
"""The time limit of a test, in which its environment may be installed."""
OVERLONG = """
import sys
import litellm

try:
    litellm.completion(
        model="hosted_vllm/" + sys.argv[1],
        api_base=sys.argv[2] + "/v1",
        messages=[{"role": "user", "content": "word " * 20_000}],
        max_tokens=4,
        num_retries=0,
    )
except litellm.ContextWindowExceededError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def url(running_cluster: Callable[..., Any]) -> str:
    """The URL of the router's HTTP listener."""
    return f"http://{running_cluster(dtype='float32', page_tokens=16, max_step_tokens=512).http_address}"


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
    counted = [sum(each[name] for each in requests["successful"]) for name in ("prompt_tokens", "output_tokens")]
    assert tuple(counted) == since(url, before)
    assert counted[1] == REQUESTS * ANSWER_TOKENS


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


@pytest.mark.timeout(CLIENT_TEST_S)
def test_litellm_knows_an_overlong_prompt(run: Callable[..., str], url: str) -> None:
    out = run("litellm", "python", "-c", OVERLONG, MODEL, url, LITELLM_LOCAL_MODEL_COST_MAP="True")
    assert "maximum context length is" in out
