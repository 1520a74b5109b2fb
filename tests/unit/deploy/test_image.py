"""The parts of deploy/Dockerfile that can be checked without a container engine: stages, sources, user, entry point."""

from __future__ import annotations

import re
import shlex
import tomllib
from dataclasses import dataclass, field
from fnmatch import fnmatch

import pytest
import typer

from tandem.cli.main import app
from tests.unit.deploy.chart import ROOT

DOCKERFILE = ROOT / "deploy" / "Dockerfile"
FINAL = ("cpu", "cuda")
BUILD_TOOLS = {"g++", "make", "cmake", "git", "curl", "wget", "python3-pip", "build-essential"}


@dataclass
class Stage:
    """One FROM with the instructions that follow."""

    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        return [rest for name, rest in self.steps if name == instruction]


@pytest.fixture(scope="module")
def stages() -> dict[str, Stage]:
    text = re.sub(r"\\\n\s*", "", DOCKERFILE.read_text())
    by_name: dict[str, Stage] = {}
    stage = Stage("")
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        instruction, _, rest = line.partition(" ")
        assert instruction in {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "USER", "EXPOSE", "ENTRYPOINT", "CMD"}
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            stage = by_name[name] = Stage(base)
        stage.steps.append((instruction, rest))
    return by_name


def sent() -> list[str]:
    """Returns names in the repository's root that the ignore file sends to the builder."""
    lines = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
    assert lines[0] == "**"
    return [line.removeprefix("!") for line in lines if line.startswith("!")]


def test_what_is_copied_is_there_and_is_sent(stages: dict[str, Stage]) -> None:
    for stage in stages.values():
        for copy in stage.all("COPY"):
            words = shlex.split(copy)
            if words[0].startswith("--from="):
                assert words[0].removeprefix("--from=") in stages
                continue
            for source in words[:-1]:
                assert (ROOT / source).exists(), source
                assert source in sent(), f"{source} is not sent to the builder"


def test_every_package_is_in_it(stages: dict[str, Stage]) -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    copied = {source for copy in stages["build"].all("COPY") for source in shlex.split(copy)[:-1]}
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    installed = {name for name in packages if any(fnmatch(name, pattern) for pattern in patterns)}
    assert installed <= copied
    assert "tandem" in installed


@pytest.mark.parametrize("name", FINAL)
def test_it_runs_a_real_command_and_not_as_root(stages: dict[str, Stage], name: str) -> None:
    stage = stages[name]
    assert stage.all("USER") == ["10001:10001"]
    assert [instruction for instruction, _ in stage.steps].index("USER") > [
        index for index, (instruction, _) in enumerate(stage.steps) if instruction in {"RUN", "COPY"}
    ][-1], "nothing is made by that user"
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert stage.all("ENTRYPOINT") == ['["tandem"]']
    assert scripts["tandem"] == "tandem.cli.main:main"
    group: object = typer.main.get_command(app)
    assert stage.all("CMD") == ['["doctor"]']
    assert "doctor" in group.commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", FINAL)
def test_no_build_tools_are_left(stages: dict[str, Stage], name: str) -> None:
    words = {word for run in stages[name].all("RUN") for word in shlex.split(run)}
    assert not words & BUILD_TOOLS
    assert (words & {"gcc", "python3-dev"} != set()) is (name == "cuda"), "Triton's launchers alone need a compiler"
    (source,) = stages[name].all("COPY")
    builder = stages[source.split()[0].removeprefix("--from=")]
    removed = builder.all("RUN")[-1]
    assert removed.startswith("pip uninstall -y")
    assert {"pip", "setuptools", "wheel"} <= set(removed.split())


def test_versions_are_the_pinned_ones_and_no_registry_is_named(stages: dict[str, Stage]) -> None:
    environment = " ".join(stages["build"].all("ENV"))
    assert "PIP_CONSTRAINT=/src/constraints.txt" in environment
    for line in re.findall(r"(?m)^(?:ARG \w+=|FROM )(\S+)", DOCKERFILE.read_text()):
        first, slash, _ = line.partition("/")
        assert not (slash and ("." in first or ":" in first)), f"{line} names a registry"
