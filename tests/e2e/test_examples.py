"""Every program in examples/ runs, and prints what its page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tandem.protocol.generate import ROOT
from tests.soak import soak

EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def cluster(running_cluster: Callable[..., Any]) -> Any:
    return running_cluster(dtype="float32", page_tokens=16, max_step_tokens=128)


def run(name: str, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def openai(cluster: Any, name: str) -> str:
    return run(name, f"http://{cluster.http_address.removeprefix('http://')}/v1")


def test_a_chat_answer_is_the_same_whole_and_streamed(cluster: Any) -> None:
    said = openai(cluster, "openai_chat.py")
    whole, streamed = (re.search(f"^{kind}: (.*)$", said, re.MULTILINE) for kind in ("whole", "streamed"))
    assert whole
    assert streamed
    assert "Paris" in whole[1]
    assert whole[1] == streamed[1]


def test_the_python_client_streams_the_same_answer(cluster: Any) -> None:
    said = run("python_client.py", cluster.grpc_address)
    whole, streamed = (re.search(f"^{kind}: (.*)$", said, re.MULTILINE) for kind in ("whole", "streamed"))
    assert whole
    assert streamed
    assert "Paris" in whole[1]
    assert whole[1] == streamed[1]


def test_a_tool_is_called_and_its_result_is_answered(cluster: Any) -> None:
    said = openai(cluster, "openai_tools.py")
    assert re.search(r"^call: get_weather\(\{'city': '.*'\}\)$", said, re.MULTILINE)
    assert "result: It is 18 degrees" in said
    assert "answer: " in said


def test_an_answer_follows_its_schema(cluster: Any) -> None:
    said = openai(cluster, "openai_structured_output.py")
    assert [line.split(":")[0] for line in said.splitlines()] == ["city", "population_millions", "continent"]


def test_grpc_streams_an_answer_and_its_timeline(cluster: Any) -> None:
    said = run("grpc_generate.py", cluster.grpc_address)
    assert "Paris" in said
    assert "prefill on prefill-0, decode on decode-0" in said
    assert re.search(r"0\.0 ms +LIFECYCLE_EVENT_\w+", said)


@soak
def test_a_cluster_lives_in_a_program(model_folder: Any) -> None:
    assert "Paris" in run("embedded_cluster.py", str(model_folder))


def test_every_example_is_listed_and_has_its_test() -> None:
    listed = re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text())
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.glob("*.py"))
    tested = (ROOT / "tests" / "e2e" / "test_examples.py").read_text()
    assert all(f'"{name}"' in tested for name in listed)
