"""The commands of the quick start are those of the command line, the examples and the chart."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from tandem.cli.main import app
from tandem.cli.models.hub_model import hub_model
from tests.unit.deploy.chart import CHART, ROOT, Chart, one

PAGE = (ROOT / "docs" / "quick_start.md").read_text()
COMMANDS = [
    shlex.split(command, comments=True)
    for block in re.findall(r"```\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
    if not line.startswith((" ", "}"))
    if not line.startswith("curl")
    for command in line.split("&&")
]
TANDEM: Any = typer.main.get_command(app)


@pytest.mark.parametrize("words", [words for words in COMMANDS if words[0] == "tandem"], ids=" ".join)
def test_a_command_is_parsed(words: list[str]) -> None:
    TANDEM.commands[words[1]].make_context(words[1], words[2:])


def test_examples_are_there() -> None:
    ((_, file),) = [words for words in COMMANDS if words[0] == "python"]
    assert (ROOT / file).is_file()


def test_the_chart_renders_the_readers_model(chart: Chart) -> None:
    ((_, command, release, folder, *words),) = [words for words in COMMANDS if words[0] == "helm"]
    assert ROOT / folder == CHART
    text = chart.run(
        command, release, str(CHART), *(str(ROOT / word) if "/examples/" in word else word for word in words)
    )
    id_ = words[-1].partition("=")[2]
    assert hub_model(Path(id_)) is not None
    manifests = [manifest for manifest in yaml.safe_load_all(text) if manifest]
    pod = one(manifests, "Deployment")["spec"]["template"]["spec"]
    assert pod["initContainers"][0]["command"][-1] == id_
    assert f"--model={id_}" in pod["containers"][0]["command"]
