"""Ray accepts deploy/ray-cluster.yaml, whose commands start nodes with the places in a host's environment."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml
from ray.scripts import scripts

from tests.unit.deploy.chart import ROOT

CONFIG = yaml.safe_load((ROOT / "deploy" / "ray-cluster.yaml").read_text())
SCHEMA = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())


def started(line: str, home: Path) -> dict[str, Any]:
    """Returns the options that Ray parses from a command line after a host's shell."""
    ray_there = home / "tandem" / ".venv" / "bin" / "ray"
    ray_there.parent.mkdir(parents=True, exist_ok=True)
    ray_there.write_text('#!/bin/sh\nfor word; do printf "%s\\0" "$word"; done\n')
    ray_there.chmod(0o755)
    env = {"HOME": str(home), "PATH": "/usr/bin:/bin", "RAY_HEAD_IP": "10.0.0.1"}
    words = subprocess.run(["bash", "-c", line], env=env, capture_output=True, text=True, check=True).stdout
    command, *rest = words.rstrip("\0").split("\0")
    assert command == "start"
    return dict(scripts.start.make_context("start", rest).params)


def test_ray_takes_it() -> None:
    jsonschema.validate(CONFIG, SCHEMA)
    assert CONFIG["max_workers"] == len(CONFIG["provider"]["worker_ips"])


@pytest.mark.parametrize("commands", ["head_start_ray_commands", "worker_start_ray_commands"])
@pytest.mark.parametrize("places", [{}, {"prefill": 2}, {"prefill": 1, "decode": 1}])
def test_nodes_offer_what_their_hosts_say(commands: str, places: dict[str, int], tmp_path: Path) -> None:
    exports = f"export TANDEM_PLACES={shlex.quote(json.dumps(places))}\n" if places else ""
    (tmp_path / ".tandem-env").write_text(f"export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=secret\n{exports}")
    options = started(CONFIG[commands][-1], tmp_path)
    assert json.loads(options["resources"]) == places
    assert options["head"] is (commands == "head_start_ray_commands")
    assert options["address"] == (None if options["head"] else "10.0.0.1:6379")


def test_no_host_starts_without_a_token(tmp_path: Path) -> None:
    (tmp_path / ".tandem-env").write_text("")
    with pytest.raises(subprocess.CalledProcessError) as refusal:
        started(CONFIG["worker_start_ray_commands"][-1], tmp_path)
    assert "RAY_AUTH_TOKEN: is missing in ~/.tandem-env" in refusal.value.stderr
