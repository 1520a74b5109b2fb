"""The checks of `tandem doctor`. Each check gives one line with ok, warn or fail, and advice."""

import importlib
import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tandem.version import install_command

SHM = Path("/dev/shm")
SHM_BYTES_MIN = 256 << 20
PYTHON_MIN = (3, 11)
_FP8_CAPABILITY = (8, 9)


class Level(StrEnum):
    """The result of a check."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of output: the subject, the level, the finding and, unless the level is ok, advice."""

    name: str
    level: Level
    found: str
    advice: str = ""


_SECRET_OPTIONS = ("--token", "--api-key", "--metrics-key")


def check_python(running: tuple[int, ...] = tuple(sys.version_info[:3])) -> Check:
    """Check that Python is 3.11 or newer."""
    finding = ".".join(str(part) for part in running)
    if running[:2] < PYTHON_MIN:
        return Check("Python", Level.FAIL, finding, "install Python 3.11 or newer and run `make clean run`")
    return Check("Python", Level.OK, finding)


def check_cores(cores: int | None = None) -> Check:
    """Check for at least two cores, so that prefill and decode can run at the same time."""
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    if cores < 2:
        return Check(
            "cores", Level.WARN, str(cores), "prefill and decode will take turns; two cores or more are better"
        )
    return Check("cores", Level.OK, str(cores))


def check_shared_memory(free_bytes: int | None = None) -> Check:
    """Check the free space in /dev/shm, because Ray's object store and transfers within the host use it."""
    if free_bytes is None:
        if not SHM.is_dir():
            return Check("/dev/shm", Level.FAIL, "missing", "mount a tmpfs there; in a container give it --shm-size=1g")
        free_bytes = shutil.disk_usage(SHM).free
    finding = f"{free_bytes / (1 << 30):.1f} GiB free"
    if free_bytes < SHM_BYTES_MIN:
        return Check("/dev/shm", Level.FAIL, finding, "free some, or in a container give it --shm-size=1g")
    return Check("/dev/shm", Level.OK, finding)


def check_ray() -> Check:
    """Check that Ray is installed."""
    try:
        return Check("Ray", Level.OK, version("ray"))
    except PackageNotFoundError:
        return Check("Ray", Level.FAIL, "not installed", "run `make run`, which installs it")


def check_torch() -> Check:
    """Check that PyTorch can be imported."""
    try:
        return Check("PyTorch", Level.OK, importlib.import_module("torch").__version__)
    except ImportError as error:
        return Check("PyTorch", Level.FAIL, str(error), "run `make run`, which installs it")


def check_gpu() -> Check:
    """Check the GPUs that PyTorch can use. A host without GPUs passes, because the CPU can serve."""
    try:
        import torch
    except ImportError:
        return Check("GPU", Level.WARN, "unknown without PyTorch", "see PyTorch above")
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if importlib.util.find_spec("triton") is None:
            advice = install_command("gpu")
            return Check("GPU", Level.FAIL, f"{', '.join(names)}, without triton", advice)
        oldest = min(torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count()))
        advice = "" if oldest >= _FP8_CAPABILITY else "for --kv-cache-dtype take int8: fp8 needs compute capability 8.9"
        return Check("GPU", Level.OK, ", ".join(names), advice)
    if Path("/dev/nvidiactl").exists():
        return Check("GPU", Level.WARN, "present, but PyTorch cannot use it", "install a CUDA build of torch 2.13")
    return Check("GPU", Level.OK, "none; --device cpu it is")


def check_transfer() -> list[Check]:
    """Check NIXL with its UCX plug-in, and list the RDMA devices that it could use."""
    from kv_transfer.backends import available_backends

    report = available_backends()
    if report.error:
        return [Check("NIXL", Level.FAIL, report.package or "not usable", report.error)]
    plugins = f"{report.package}: {', '.join(report.plugins) or 'no plug-ins'}"
    if "UCX" not in report.plugins:
        nixl = Check("NIXL", Level.FAIL, plugins, "the UCX plug-in is missing; install nixl-cu12 or nixl-cu13 again")
    else:
        nixl = Check("NIXL", Level.OK, plugins)
    if report.rdma_devices:
        return [nixl, Check("RDMA", Level.OK, ", ".join(report.rdma_devices))]
    advice = "fine on one host; between hosts KV would travel over TCP"
    return [nixl, Check("RDMA", Level.WARN, "no device in /sys/class/infiniband", advice)]


def check_port(option: str, host: str, port: int, ours: dict[int, int]) -> Check:
    """Check that a port is free or belongs to a `tandem up` of this user.

    `ours` maps the ports of this user's clusters to process ids.
    """
    name = f"port {port}"
    if port in ours:
        return Check(name, Level.OK, f"in use by the running cluster (process {ours[port]})")
    if (problem := port_problem(host, port)) is None:
        return Check(name, Level.OK, "free")
    return Check(name, Level.FAIL, problem, f"start with {option} and another port, or 0 for any free one")


def check_listeners(host: str, grpc_port: int, http_port: int, ours: dict[int, int]) -> list[Check]:
    """Check the router's address and, if the host can listen there, its ports."""
    if (problem := host_problem(host)) is not None:
        return [Check(f"host {host!r}", Level.FAIL, problem, "give --host an address of this machine, like 127.0.0.1")]
    return [check_port("--grpc-port", host, grpc_port, ours), check_port("--http-port", host, http_port, ours)]


def host_problem(host: str) -> str | None:
    """Return the reason why this machine cannot listen at `host`, or None if it can."""
    return port_problem(host, 0) if host else "it is empty"


def port_problem(host: str, port: int) -> str | None:
    """Return the reason why this port cannot be opened, or None if it can. Port 0 always can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return (error.strerror or str(error)).lower()
    return None


def check_command_lines(running: Iterable[tuple[int, list[str]]] | None = None) -> list[Check]:
    """Check that no `tandem` process on this host has a secret on its command line, which every user can read.

    `running` are pairs of process id and command line, by default of all processes of this host.
    """
    showing = [
        Check(
            f"process {pid}",
            Level.WARN,
            f"its command line shows {', '.join(shown)} to every user of this host",
            f"give {' and '.join(f'{option}-file' for option in shown)} instead, or the environment",
        )
        for pid, line in (_command_lines() if running is None else running)
        if (shown := _secrets_in(line))
    ]
    return showing or [Check("secrets", Level.OK, "none in the command line of a tandem that runs here")]


def _secrets_in(command: list[str]) -> list[str]:
    """Return the options of `command` that contain a secret; none if the command does not run Tandem."""
    if not any(Path(word).name == "tandem" or word == "tandem.cli.main" for word in command[:4]):
        return []
    given = {word.partition("=")[0] for word in command}
    return [option for option in _SECRET_OPTIONS if option in given]


def _command_lines() -> list[tuple[int, list[str]]]:
    import psutil

    return [(process.pid, process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]


def all_checks(host: str, grpc_port: int, http_port: int, ours: dict[int, int]) -> list[Callable[[], list[Check]]]:
    """Return all checks, in the order of the output, as functions that run the check when called."""
    return [
        lambda: [check_python(), check_cores(), check_shared_memory(), check_ray()],
        lambda: [check_torch(), check_gpu()],
        check_transfer,
        lambda: check_listeners(host, grpc_port, http_port, ours),
        check_command_lines,
        lambda: [check_default_model()],
    ]


def check_default_model() -> Check:
    """Check that the small model that `tandem up` serves by default is installed."""
    from tandem.cli.models.default_model import find_default_model
    from tandem.protocol.errors import ModelError

    try:
        return Check("small model", Level.OK, str(find_default_model()))
    except ModelError as error:
        return Check("small model", Level.WARN, "not installed", error.message)
