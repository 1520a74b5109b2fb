"""guidellm and aiperf measure the throughput that `tandem bench` does, within 5 %, against the same router.

They are skipped where their commands are not installed; `TANDEM_LOAD_GENERATORS` names the folder of an environment's
commands, since their own dependencies are many: `pip install guidellm aiperf`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.router.streams import UNCOALESCED, running
from tandem.cli.main import app
from tests.soak import soak

RATE, SECONDS, TOKENS = 5, 20, 64
WITHIN = 0.05
TIMEOUT_S = 280


def command(name: str) -> str:
    """Returns the command's path, or skips the test."""
    folders = os.pathsep.join([os.environ.get("TANDEM_LOAD_GENERATORS", ""), os.environ.get("PATH", "")])
    path = shutil.which(name, path=folders)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


@pytest.fixture
def url(model_folder: Path) -> Iterator[str]:
    with running(model_folder, 0.02, UNCOALESCED) as router:
        yield f"http://{router.http}"


def bench(url: str, tmp_path: Path) -> float:
    """Returns the output tokens per second of `tandem bench`."""
    load = ["--rate", f"{RATE}", "--arrivals", "constant", "--duration", f"{SECONDS}", "--clients", "1"]
    lengths = ["--prompt-tokens", f"{TOKENS}", "--answer-tokens", f"{TOKENS}"]
    file = tmp_path / "bench.json"
    run = CliRunner().invoke(app, ["bench", "--url", url, *load, *lengths, "--json", str(file)])
    assert run.exit_code == 0, run.output
    (figures,) = json.loads(file.read_text())["loads"]
    assert not figures["errors"]
    return float(figures["output_tokens_per_s"])


def run(words: list[str], folder: Path) -> None:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@soak
@pytest.mark.timeout(900)
def test_guidellm_measures_the_same_throughput(url: str, model_folder: Path, tmp_path: Path) -> None:
    words = [command("guidellm"), "run", "--disable-progress"]
    words += ["--backend", f"kind=openai_http,target={url}", "--profile", f"kind=constant,rate={RATE}"]
    words += ["--constraint", f"kind=max_duration,seconds={SECONDS}"]
    words += ["--tokenizer", f"kind=hf_auto,model={model_folder}"]
    words += ["--data", f"kind=synthetic_text,prompt_tokens={TOKENS},output_tokens={TOKENS}"]
    run([*words, "--output", "kind=json,path=guidellm.json"], tmp_path)
    metrics: dict[str, Any] = json.loads((tmp_path / "guidellm.json").read_text())["benchmarks"][0]["metrics"]
    theirs = metrics["output_tokens_per_second"]["successful"]["mean"]
    assert bench(url, tmp_path) == pytest.approx(theirs, rel=WITHIN)


@soak
@pytest.mark.timeout(900)
def test_aiperf_measures_the_same_throughput(url: str, model_folder: Path, tmp_path: Path) -> None:
    words = [command("aiperf"), "profile", "-m", "tokens", "-u", url, "--endpoint-type", "completions", "--streaming"]
    words += ["--tokenizer", str(model_folder), "--request-rate", f"{RATE}", "--request-rate-mode", "constant"]
    words += ["--request-count", f"{RATE * SECONDS - 1}", "--extra-inputs", "ignore_eos:true"]
    for side in ("synthetic-input-tokens", "output-tokens"):
        words += [f"--{side}-mean", f"{TOKENS}", f"--{side}-stddev", "0"]
    words += ["--use-server-token-count", "--use-legacy-max-tokens", "--ui", "none", "--output-artifact-dir", "aiperf"]
    run(words, tmp_path)
    profile: dict[str, Any] = json.loads((tmp_path / "aiperf" / "profile_export_aiperf.json").read_text())
    assert bench(url, tmp_path) == pytest.approx(profile["output_token_throughput"]["avg"], rel=WITHIN)
