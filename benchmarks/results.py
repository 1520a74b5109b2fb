"""Saves and reads benchmark results; each result records its machine, versions, commit and command."""

import datetime
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

Run = Mapping[str, Any]
RESULTS = Path(__file__).parent / "results"
_PACKAGES = (
    "torch", "triton", "flash-attn-4", "quack-kernels", "fla-core", "transformers", "numba", "nixl", "nixl-cu13", "ray",
    "grpcio",
)  # fmt: skip


def run_facts(device: str) -> dict[str, object]:
    """Return the hardware, versions, commit, date and command of this run as JSON."""
    return {
        "hardware": _hardware(device),
        "versions": {"python": platform.python_version()} | _versions(),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": _command(),
    }


def save_result(name: str, result: Mapping[str, object], folder: Path = RESULTS) -> Path:
    """Write `result` with `run_facts` as <name>-<hardware>-<date>-<dtype>.json, and return the file.

    `result` must contain a `dtype`.
    """
    hardware = result["hardware"]
    machine = hardware["name"] if isinstance(hardware, Mapping) else "unknown"
    date = str(result["date"])[:19].replace(":", "")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}-{_file_name(str(machine))}-{date}-{result['dtype']}.json"
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return file


def scheme_suffix(quantization: str | None, kv_cache_dtype: str) -> str:
    """Return the quantization as a suffix for a result's name: `_fp8`, `_fp8_kv-int8`, or an empty text."""
    weights = f"_{quantization}" if quantization else ""
    return weights + (f"_kv-{kv_cache_dtype}" if kv_cache_dtype != "auto" else "")


def read_results(folder: Path = RESULTS, kind: str = "") -> list[tuple[str, Run]]:
    """Return the runs whose file names begin with `kind`, each with its file name, oldest first."""
    runs = [(file.name, json.loads(file.read_text(encoding="utf-8"))) for file in folder.glob(f"{kind}*.json")]
    return sorted(runs, key=lambda named_run: (str(named_run[1]["date"]), named_run[0]))


def newest_result(folder: Path, kind: str, figure: str = "") -> tuple[str, Run]:
    """Return the file name and the newest run of `kind` that has `figure`. Raises LookupError if there is none."""
    runs = [named_run for named_run in read_results(folder, kind) if not figure or figure in named_run[1]]
    if not runs:
        raise LookupError(f"no run of {kind} with {figure or 'any figure'} is kept in {folder.name}")
    return runs[-1]


def _hardware(device: str) -> dict[str, object]:
    facts: dict[str, object] = {"name": _cpu_name(), "cores": len(os.sched_getaffinity(0)), "arch": platform.machine()}
    if device.startswith("cuda"):
        name, driver = torch.cuda.get_device_name(device), _driver()
        facts |= {"cpu": facts["name"], "name": name, "gpus": torch.cuda.device_count(), "driver": driver}
    facts["capability"] = torch.backends.cpu.get_cpu_capability()
    return facts


def _cpu_name() -> str:
    try:
        listed = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    match = re.search(r"^model name\s*:\s*(.+)$", listed, re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def _driver() -> str:
    """Return the version of NVIDIA's driver; empty = unknown."""
    try:
        listed = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return ""
    match = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", listed)
    return match[1] if match else ""


def _versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _commit() -> str:
    """Return the commit, with `-dirty` if tracked files differ from it; without a repository, $TANDEM_COMMIT."""
    if "TANDEM_COMMIT" in os.environ:
        return os.environ["TANDEM_COMMIT"]
    here = Path(__file__).parent
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _command() -> str:
    """Return the command without paths of this machine."""
    program = Path(sys.argv[0])
    module = program.parent if program.name == "__main__.py" else program
    parts = module.with_suffix("").parts
    inside = parts[len(parts) - parts[::-1].index("benchmarks") :] if "benchmarks" in parts else ()
    name = f"python -m {'.'.join(('benchmarks', *inside))}" if inside else program.name
    return " ".join(
        [name, *(Path(argument).name if argument.startswith("/") else argument for argument in sys.argv[1:])]
    )


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "_", text).strip("_")
