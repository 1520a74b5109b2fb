"""What works where no cluster can run, on macOS and Windows: the client, and the commands that need no worker here."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tandem.cli.main import app

ABSENT = ("fcntl", "resource", "pwd", "termios", "nixl", "nixl_cu13", "triton")
"""Modules that Windows does not have."""
THEIRS = ("psutil", "torch", "numba", "grpc", "transformers", "concurrent.futures.process")
"""Other packages, whose builds for Linux import some of `ABSENT`."""
COMMANDS = {
    "plan --rate 2 --workers 2 --no-simulate": "bottleneck",
    "bench --url http://127.0.0.1:9/v1": "does not answer",
    "generate x --address 127.0.0.1:9": "cannot reach the router",
    "top --once --metrics 127.0.0.1:9": "127.0.0.1:9",
    "status --address 127.0.0.1:9": "127.0.0.1:9",
}


def test_commands_that_need_no_worker_here_need_no_module_of_linux() -> None:
    script = f"""
import importlib, json, sys
for name in {THEIRS}:
    importlib.import_module(name)
sys.modules.update(dict.fromkeys({ABSENT}))
import tandem.client
from typer.testing import CliRunner
from tandem.cli.main import app
done = {{words: CliRunner().invoke(app, words.split()) for words in {list(COMMANDS)}}}
print(json.dumps({{words: result.output + repr(result.exception) for words, result in done.items()}}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for words, output in json.loads(done.stdout.splitlines()[-1]).items():
        assert COMMANDS[words] in output, words
        assert "Error(" not in output, words


def test_a_cluster_is_refused_on_another_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.cli.start.up.sys.platform", "darwin")
    result = CliRunner().invoke(app, ["up"])
    assert result.exit_code == 1
    assert result.output.startswith("error: a cluster runs on Linux only, as NIXL does; ")
