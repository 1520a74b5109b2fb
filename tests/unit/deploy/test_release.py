"""The release workflow and the systemd unit, as far as they can be checked without running them."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from tandem.cli.main import app
from tests.unit.deploy.chart import ROOT

WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
UNIT = ROOT / "deploy" / "systemd" / "tandem.service"


@pytest.fixture(scope="module")
def jobs() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    return loaded


def steps(jobs: dict[str, Any], key: str) -> list[Any]:
    return [step[key] for job in jobs.values() for step in job["steps"] if key in step]


def test_each_command_of_the_workflow_exists(jobs: dict[str, Any]) -> None:
    scripts = "\n".join(steps(jobs, "run"))
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"check", "test", "dist"} <= set(re.findall(r"make (\w+)", scripts)) <= targets
    assert all((ROOT / path).exists() for path in re.findall(r"(?:deploy|tests)/[\w/.]+", scripts))
    commands: Any = get_command(app)
    for line in re.findall(r"\btandem (\w+ [^&\n]*)", scripts):
        name, *words = shlex.split(line)
        known = {option for param in commands.commands[name].params for option in (*param.opts, *param.secondary_opts)}
        assert {word for word in words if word.startswith("--")} <= known | {"--help"}, line


def test_actions_are_named_by_commit_and_release() -> None:
    uses = re.findall(r"uses: (.+)", WORKFLOW.read_text())
    assert [line for line in uses if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", line)] == []
    assert len({tuple(line.split("@")) for line in uses}) == len({line.split("@")[0] for line in uses}), "one release"


def test_the_package_and_the_site_name_the_repository_of_the_release(jobs: dict[str, Any], tmp_path: Path) -> None:
    """No other file has an address of the repository, which a checkout does not know."""
    url = "https://host.example/org/tandem"
    (step,) = [step for step in jobs["dist"]["steps"] if "REPOSITORY_URL" in step.get("run", "")]
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    subprocess.run(["sh", "-c", step["run"]], cwd=tmp_path, env={"REPOSITORY_URL": url}, check=True)
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert project["urls"] == {"Source": url}
    assert project["name"] == "tandem-serving"
    assert '\nrepo_url: !ENV [REPOSITORY_URL, ""]\n' in (ROOT / "mkdocs.yml").read_text()


def test_nothing_is_published_before_the_wheel_has_served_and_tests_have_passed(jobs: dict[str, Any]) -> None:
    def before(name: str) -> set[str]:
        needs = jobs[name].get("needs", [])
        named = [needs] if isinstance(needs, str) else needs
        return {*named, *(earlier for each in named for earlier in before(each))}

    for name in ("package", "image", "chart"):
        assert {"test", "arm64", "dist", "install"} <= before(name)
        assert jobs[name]["environment"] == "release"


def test_both_images_are_stages_of_the_dockerfile(jobs: dict[str, Any]) -> None:
    (build,) = [step for step in steps(jobs, "with") if "target" in step]
    dockerfile = (ROOT / build["file"]).read_text()
    for image in jobs["image"]["strategy"]["matrix"]["include"]:
        assert re.search(rf"^FROM .* AS {image['target']}$", dockerfile, re.MULTILINE)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "tandem.service"
    # systemd-analyze wants the program to exist.
    unit.write_text(UNIT.read_text().replace("/opt/tandem/bin/tandem up", "/bin/true up"))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, check=False)
    assert (done.returncode, "tandem.service" in done.stderr) == (0, False), done.stderr


def test_the_unit_ends_a_cluster_as_down_does_and_starts_none_with_wrong_settings_again() -> None:
    settings = dict(re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.MULTILINE))
    assert (settings["KillSignal"], settings["KillMode"]) == ("SIGINT", "mixed")
    assert settings["SuccessExitStatus"] == "130"
    assert settings["RestartPreventExitStatus"].split() == ["2", "3"]
    assert settings["ExecStart"].endswith("tandem up --config /etc/tandem/tandem.yaml")
