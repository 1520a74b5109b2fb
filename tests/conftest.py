"""Real clusters for tests: one at a time, on free ports, reused while tests request the same settings.

If tests run in several processes (`make test`), all tests that share clusters run in the same process.

Without a GPU, Triton kernels run in Triton's interpreter, which must be chosen before anything imports Triton.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tandem.cluster.ray_processes.ray_node import ENVIRONMENT
from tests.pairwise import each_value_once
from tests.soak import examples, soak

if TYPE_CHECKING:
    from tests.running_cluster import RunningCluster, Shelf

pytest.register_assert_rewrite("tests.running_cluster")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# Ray keeps what it reads first (its token, and whether it stays on loopback), so set both before any import of Ray.
os.environ.update(ENVIRONMENT)
# Otherwise any accidental call into Ray would start a private Ray instance.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
# Several test processes share the cores: with more threads each, every operator would take about ten times as long.
torch.set_num_threads(1)

if find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    # The time per example depends on the machine, so there is no deadline.
    settings.register_profile(
        "tests", max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("tests")

HERE = Path(__file__).parent
LONG_FOLDERS = ("e2e", "kernels", "gpu", "model", "faults", "integration")
"""Folders that run first, in this order, so that all processes end at about the same time.

Some begin with clusters, the others with computation, and the smallest files come last.
"""
SHARING_FOLDERS = {"e2e", "faults"}
"""The folders whose files share clusters with one another."""
OWN_CLUSTERS = {
    "test_processes_that_hang.py",
    "test_prometheus.py",
    "test_streams_outlive_workers.py",
    "test_three_nodes.py",
    "test_two_hosts.py",
    "test_workers_outlive.py",
}
"""Files in these folders whose clusters no other file uses.

They run in any process, and last in their folder, so that the other files start a shared cluster only once.
"""
SHARING_NOTHING = {"test_cluster_life.py", "test_cpu_machines.py", "test_families.py", "test_model_of_the_cluster.py"}
"""Long files whose tests share no cluster or fixture, so that each test may run in any process."""
EACH_VALUE_ONCE = (HERE / "kernels", HERE / "unit" / "worker" / "adapters", HERE / "unit" / "worker" / "speculation")
"""Folders whose tests combine many parameter values, and are slow without a GPU."""
GPU_FOLDERS = {"gpu", "kernels"}
COMPILE = """
import sys, torch
from tandem.engine.kernels.cpu.kernels import CpuKernels
CpuKernels(getattr(torch, sys.argv[1]), threads=1).close()
"""
SHELF: pytest.StashKey[Shelf] = pytest.StashKey()
REPORTED_LINE = "reported line"
PLUGIN_OPTIONS = {"asyncio": ("asyncio_mode", "asyncio_default_fixture_loop_scope"), "timeout": ("timeout",)}
"""The pytest plugins' settings in pyproject.toml, by plugin."""


def sharing(nodeid: str) -> str:
    """Return the key of all tests that may share a cluster: their folder or file, or the test's own name."""
    file = Path(nodeid.split("::", maxsplit=1)[0])
    folder = file.parts[1]
    if file.name in SHARING_NOTHING:
        return nodeid
    return folder if folder in SHARING_FOLDERS and file.name not in OWN_CLUSTERS else str(file)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare the option for the KV cache's dtype, and the settings of missing plugins.

    `tests/gpu` must run without any plugin.
    """
    parser.addoption("--kv-cache-dtype", default="auto", help="of clusters whose tests do not name one (auto)")
    for plugin, options in PLUGIN_OPTIONS.items():
        for option in () if pluginmanager.hasplugin(plugin) else options:
            parser.addini(option, f"of pytest-{plugin}, which is not installed")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Compile the CPU kernels once. Otherwise each test process and each worker would compile them at the same time."""
    compile_one = [sys.executable, "-c", COMPILE]
    for process in [subprocess.Popen([*compile_one, dtype], cwd=HERE.parent) for dtype in ("float32", "bfloat16")]:
        process.wait()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep tests that share clusters or the GPU in one process, in order, and distribute the others file by file."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFolder(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            on_gpu = Path(nodeid).parts[1] in GPU_FOLDERS and torch.cuda.is_available()
            return "gpu" if on_gpu else sharing(nodeid)

    return ByFolder(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disable garbage collection while tests are collected, and exclude tests and modules from it afterwards.

    It then runs less often than by default: in the unit tests of workers it takes 1.3 s of CPU instead of 3.2 of 52.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(50_000)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests: long folders first, and within a folder the tests without shared clusters last."""
    if not torch.cuda.is_available():
        slow = lru_cache(None)(lambda path: any(map(path.is_relative_to, EACH_VALUE_ONCE)))
        leave_combinations_to_soak([item for item in items if slow(item.path)])
    ranks = {folder: number for number, folder in enumerate(LONG_FOLDERS)}

    @lru_cache(None)
    def rank(path: Path) -> tuple[int, bool]:
        folder = path.relative_to(HERE).parts[0]
        return ranks.get(folder, len(ranks)), path.name in OWN_CLUSTERS | SHARING_NOTHING

    items.sort(key=lambda item: rank(item.path))


def leave_combinations_to_soak(items: list[pytest.Item]) -> None:
    """Mark tests as `soak` as long as each value of each parameter still occurs in another test of the function.

    Triton's interpreter takes a second for what a GPU does in a millisecond.
    """
    functions: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        skipped = item.get_closest_marker("soak") or any(mark.args[0] for mark in item.iter_markers("skipif"))
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not skipped:
            functions[item.nodeid.partition("[")[0]].append(item)
    for tests in functions.values():
        cases = [parameter_sets(test) for test in tests]
        kept = set(each_value_once(cases))
        for test, case in zip(tests, cases, strict=True):
            if case not in kept:
                test.add_marker(soak)


def parameter_sets(test: pytest.Function) -> tuple[object, ...]:
    """Return an identity of a test's values from each of its `parametrize` marks and parametrized fixtures."""
    values = dict(test.callspec.params)
    marked = [
        names if isinstance(names := mark.args[0], (list, tuple)) else names.split(",")
        for mark in test.iter_markers("parametrize")
    ]
    together = [tuple(id(values.pop(name.strip())) for name in names) for names in marked]
    return *together, *map(id, values.values())


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop the running cluster if no later test may share it, because even an idle cluster uses CPU time."""
    shelf = item.session.stash.get(SHELF, None)
    if shelf is not None and nextitem is not None and sharing(item.nodeid) != sharing(nextitem.nodeid):
        shelf.clear()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the lines that tests passed to `report_line`."""
    reports = [report for some in terminalreporter.stats.values() for report in some]
    for report in (one for one in reports if getattr(one, "when", "") == "call"):
        for _, line in (entry for entry in report.user_properties if entry[0] == REPORTED_LINE):
            terminalreporter.write_line(f"{report.nodeid}: {line}")


@pytest.fixture
def report_line(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Return a function that prints a line at the end of the run, whichever process the test runs in."""
    return lambda line: record_property(REPORTED_LINE, line)


@pytest.fixture
def adapters_read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read adapters in the test's process; `test_bad_adapters.py` tests the process that reads them otherwise."""
    from tandem.engine.adapters import reader

    monkeypatch.setattr(reader, "_output_of_process", lambda path: json.dumps(reader._reply(path)).encode())


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The folder of SmolLM2-135M-Instruct in Hugging Face layout, prepared once in the user's cache."""
    from tandem.cli.models.default_model import find_default_model
    from tandem.engine.weights.gguf import prepare_model

    return prepare_model(find_default_model())


@pytest.fixture(scope="session")
def _shelf(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shelf]:
    from tests.running_cluster import Shelf

    shelf = Shelf(model_folder, lambda: tmp_path_factory.mktemp("logs"), request.config.getoption("--kv-cache-dtype"))
    request.session.stash[SHELF] = shelf
    yield shelf
    shelf.clear()


@pytest.fixture(scope="session")
def running_cluster(_shelf: Shelf) -> Callable[..., RunningCluster]:
    """Return a function that starts or reuses a cluster with given `ClusterSettings`; later tests may share it."""
    return _shelf.get
