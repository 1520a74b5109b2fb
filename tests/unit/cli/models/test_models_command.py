"""`tandem models`: with a local server with the Hub's endpoints, in processes with its environment."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.cli.main import app
from tandem.cli.models.default_model import NAME, find_default_model
from tandem.cli.progress import each_part
from tandem.engine.models.load_spec import load_spec
from tandem.engine.weights.gguf import gguf_spec, prepare_model
from tests.unit.cli.models.hub_server import HubServer, hub_environment

COMMANDS = """
import json, sys
from typer.testing import CliRunner
from tandem.cli.main import app
for line in sys.stdin:
    done = CliRunner().invoke(app, ["models", *json.loads(line)])
    print(json.dumps([done.exit_code, done.stdout, done.stderr]), flush=True)
"""
"""A process that runs commands, because huggingface_hub reads its environment once."""


class Machine:
    """Runs `tandem models` with caches in a folder of its own."""

    def __init__(self, hub: HubServer, home: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMANDS],
            env=hub_environment(hub, home),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *words: str, status: int = 0) -> str:
        """Return what the command prints, on stderr if it fails with `status`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(words), file=self.process.stdin, flush=True)
        ended, output, error = json.loads(self.process.stdout.readline())
        assert ended == status, output + error
        return str(error if status else output)

    def notes(self) -> dict[str, str]:
        """Return the notes of `tandem models list` by the name of the model."""
        header, *rows = self("list").splitlines()
        at = header.index("NOTE")
        return {row.split()[0]: row[at:].strip() for row in rows}


@pytest.fixture
def machine(hub: HubServer, tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(hub, tmp_path)
    with machine.process as process:
        yield machine
        process.kill()


def test_a_model_is_described_downloaded_listed_and_removed(machine: Machine, hub: HubServer) -> None:
    described = machine("show", "org/tiny")
    assert "attention: " in described
    assert re.search(r"H200 +1 GPU, ", described)
    assert hub.fetched() == {"config.json"}
    assert machine.notes()["org/tiny"] == "no weights; tandem models pull org/tiny"
    pulled = machine("pull", "org/tiny")
    assert re.search(r"^fetching org/tiny: [\d.]+ of [\d.]+ GiB$", pulled, re.MULTILINE)
    assert pulled.endswith("serve it: tandem serve org/tiny\n")
    assert machine.notes()["org/tiny"] == ""
    hub.requests.clear()
    assert machine("show", "org/tiny").splitlines()[:-1] == described.splitlines()[:-1]  # the last has the free memory
    assert not hub.requests
    assert machine("rm", "org/tiny").startswith("org/tiny is removed; 0.0")
    assert machine.notes().keys() == {NAME}
    assert "org/tiny is not on this machine" in machine("rm", "org/tiny", status=2)


def test_each_gguf_model_of_a_repository_has_its_name(machine: Machine, tmp_path: Path) -> None:
    assert "is not in the cache; tandem models pull org/quants:a-Q4.gguf" in machine(
        "show", "org/quants:a-Q4.gguf", status=3
    )
    machine("pull", "org/quants:a-Q4.gguf")
    machine("pull", "org/quants:sub/b-00001-of-00002.gguf")
    next(tmp_path.rglob("b-00002-of-00002.gguf")).unlink()
    second, first = "sub/b-00002-of-00002.gguf", "org/quants:sub/b-00001-of-00002.gguf"
    assert machine.notes() == {
        "org/quants:a-Q4.gguf": "",
        first: f"{second} is missing; tandem models pull {first}",
        NAME: "",
    }
    assert "give org/quants" in machine("rm", "org/quants:a-Q4.gguf", status=2)
    assert "org/quants is removed" in machine("rm", "org/quants")


def test_revisions_are_removed_one_by_one(machine: Machine) -> None:
    machine("pull", "org/tiny@v1")
    assert machine.notes().keys() == {"org/tiny@v1", NAME}
    assert "is not on this machine" in machine("rm", "org/tiny@v2", status=2)
    assert "org/tiny@v1 is removed" in machine("rm", "org/tiny@v1")


def test_a_gated_repository_is_one_sentence(machine: Machine) -> None:
    error = machine("pull", "gated/tiny", status=3)
    assert error.startswith("error: gated/tiny: the repository is gated; accept its conditions at")
    assert error.count("\n") == 1


def test_a_converted_model_is_listed_and_removed(machine: Machine, tmp_path: Path) -> None:
    folder = tmp_path / "tandem" / "models" / "0123" / "small.Q4_1"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert machine.notes() == {"small.Q4_1": "", NAME: ""}
    assert "small.Q4_1 is removed" in machine("rm", "small.Q4_1")
    assert not folder.exists()
    assert "pip uninstall" in machine("rm", NAME, status=2)


def test_show_and_plan_agree() -> None:
    shown = CliRunner().invoke(app, ["models", "show", "llama-3-8b", "--tokens", "2500"]).stdout
    row = next(line for line in shown.splitlines() if line.startswith("L4 "))
    for column, options in ((0, []), (1, ["--quantization", "int8"]), (2, ["--quantization", "int4"])):
        gpus, tokens = re.findall(r"(\d) GPUs?, ([\d,]+)", row)[column]
        load = ["--gpu", "L4", "--rate", "0.1", "--slo-ttft", "60000", "--slo-itl", "1000", "--no-simulate"]
        planned = CliRunner().invoke(app, ["plan", *load, "--tensor-parallel-size", gpus, *options]).stdout
        assert f"{tokens} tokens a worker" in planned


def test_a_gguf_model_is_described_as_it_is_served() -> None:
    file = find_default_model()
    assert gguf_spec([file]) == load_spec(prepare_model(file, codes=True))


def test_a_log_has_a_line_of_progress_for_each_part() -> None:
    lines: list[tuple[str, float]] = []
    report = each_part(lambda *line: lines.append(line))
    for percent in range(101):
        report(f"{percent} %", percent / 100)
    assert lines == [(f"{percent} %", percent / 100) for percent in range(0, 101, 5)]


def test_what_is_no_repository_is_refused(tmp_path: Path) -> None:
    refused = CliRunner().invoke(app, ["models", "pull", "llama"])
    assert refused.exit_code == 2
    assert "is not ORG/NAME" in refused.stderr
    assert "takes as it is" in CliRunner().invoke(app, ["models", "pull", str(tmp_path)]).stderr
