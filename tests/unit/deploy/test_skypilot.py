"""The SkyPilot example: its commands are those of the command line, and its ports and secrets agree with them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import typer
import yaml

from tandem.capacity.plan.what_fits import what_fits
from tandem.capacity.planner.demand import Demand
from tandem.cli.main import app
from tandem.cli.models.hub_model import hub_model
from tandem.engine.models.shapes import shape_config
from tests.unit.deploy.chart import ROOT

FILE = ROOT / "deploy" / "skypilot" / "tandem.yaml"
TASK = yaml.safe_load(FILE.read_text())
GROUP: Any = typer.main.get_command(app)


def commands(script: str) -> list[list[str]]:
    """Returns the words after `tandem` of each of its commands in a script."""
    lines = [shlex.split(line.replace('"$MODEL"', TASK["envs"]["MODEL"])) for line in script.splitlines()]
    return [words for program, *words in lines if program.endswith("/bin/tandem")]


def test_it_serves_the_model_that_it_downloads() -> None:
    ((group, pull, model),) = commands(TASK["setup"])
    assert pull in GROUP.commands[group].commands
    assert hub_model(Path(model)) is not None
    ((serve, *words),) = commands(TASK["run"])
    options = GROUP.commands[serve].make_context(serve, words).params
    assert options["served_model"] == model
    assert options["http_port"] == TASK["resources"]["ports"]
    assert options["host"] == "0.0.0.0"


def test_clients_need_a_key() -> None:
    """SkyPilot asks for a secret without a value; the server reads it from its environment."""
    assert TASK["secrets"]["TANDEM_API_KEY"] is None
    assert FILE.read_text().count("--secret TANDEM_API_KEY") == 2


def test_the_model_fits_on_every_gpu_it_may_get() -> None:
    assert TASK["envs"]["MODEL"] == "Qwen/Qwen3-8B"
    stored = next(what_fits("qwen3-8b", shape_config("qwen3-8b"), Demand(1.0, 8192, 0)))
    for name, count in TASK["resources"]["accelerators"].items():
        fit = stored.fits[name.removesuffix("GB")]
        assert fit is not None
        assert fit.gpus == count
