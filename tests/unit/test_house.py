"""The repository: each package is imported from it, and generated code matches its schemas."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.protocol.generate import OUT, ROOT, generate

PACKAGES = ["tandem", "router", "prefill_worker", "decode_worker", "kv_transfer", "benchmarks", "deploy"]


@pytest.mark.parametrize("package", PACKAGES)
def test_package_lies_in_this_repository(package: str) -> None:
    file = importlib.import_module(package).__file__
    assert file is not None, f"{package}/ has no __init__.py"
    assert Path(file).resolve().parent == ROOT / package


def test_generated_code_matches_the_schemas(tmp_path: Path) -> None:
    fresh = {path.relative_to(tmp_path): path.read_text() for path in generate(tmp_path)}
    committed = {path.relative_to(OUT): path.read_text() for path in OUT.rglob("*_pb2*.py*") if path.suffix != ".pyc"}
    assert fresh.keys() == committed.keys(), "run `make proto`"
    stale = [str(path) for path, text in fresh.items() if committed[path] != text]
    assert not stale, "run `make proto`"


@pytest.mark.skipif(not (ROOT / ".git").exists() or shutil.which("git") is None, reason="not a checkout of git")
def test_the_environment_stays_out_of_the_repository(tmp_path: Path) -> None:
    """Git ignores `.venv` as a folder and as a link to another checkout's, which a pull would otherwise replace."""
    assert _git(ROOT, "ls-files", "--", ".venv") == ""
    shutil.copy(ROOT / ".gitignore", tmp_path)
    _git(tmp_path, "init", "--quiet")
    (tmp_path / ".venv").symlink_to("elsewhere")
    assert _git(tmp_path, "check-ignore", ".venv") == ".venv"


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=folder, check=False).stdout.strip()


def test_gpu_tests_need_no_plugin_of_pytest() -> None:
    """GPU hosts often have only pytest; a setting of a missing plugin used to fail the run before its first test."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu/test_ceilings_cuda.py"]
    plain = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    run = subprocess.run([*command, "--collect-only"], capture_output=True, text=True, cwd=ROOT, env=plain, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_command_line_loads_neither_torch_nor_ray_before_a_command_runs() -> None:
    """They take seconds, which `tandem status` and `tandem --help` have no use for."""
    script = (
        "import sys, tandem.cli.main; sys.exit(' '.join({'torch', 'numba', 'transformers', 'ray'} & {*sys.modules}))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.stderr.strip() == ""


def test_a_worker_on_a_cpu_is_imported_without_triton() -> None:
    """A CPU's installation has no Triton; the tests' own has, for its interpreter."""
    script = "import sys, tandem.worker.process, tandem.engine.load_engine; sys.exit('triton' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr or "it imports triton"
