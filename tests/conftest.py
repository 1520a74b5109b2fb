"""Real clusters for tests: one at a time, on free ports, reused while the same settings are asked for.

Where tests run in two processes (`make test`), those that share clusters stay in one of them.

Without a GPU, Triton's kernels run in its interpreter, which must be chosen before anything imports Triton.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cluster.ray_processes.ray_node import ENVIRONMENT

if TYPE_CHECKING:
    from tests.running_cluster import RunningCluster, Shelf

pytest.register_assert_rewrite("tests.running_cluster")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# Before any test imports Ray, which keeps what it reads first: its token, and whether it stays on loopback.
os.environ.update(ENVIRONMENT)
# Else a question to Ray that no test means to ask would start one.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
# Threads on cores that others use too wait for each other: with two test processes ten times as long as one would work.
torch.set_num_threads(1)

if find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    # How long an example takes, or is drawn for, is the machine's.
    settings.register_profile("untimed", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("untimed")

HERE = Path(__file__).parent
LONG_ROOMS = ("e2e", "kernels", "gpu", "model", "faults", "integration")
"""In this order and before all others, so that both processes end together: one begins with clusters, the other one
with what computes, and the smallest files come last.
"""
SHARING_ROOMS = {"e2e", "faults"}
"""Their files use clusters of one another."""
GPU_ROOMS = {"gpu", "kernels"}
TOLD = "told"
PLUGIN_OPTIONS = {"asyncio": ("asyncio_mode", "asyncio_default_fixture_loop_scope"), "timeout": ("timeout",)}
"""What pyproject.toml sets for plugins, by plugin."""


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Options of plugins that are missing mean nothing, and are no error: `tests/gpu` needs no plugin."""
    for plugin, options in PLUGIN_OPTIONS.items():
        for option in () if pluginmanager.hasplugin(plugin) else options:
            parser.addini(option, f"of pytest-{plugin}, which is not installed")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What shares clusters, or the GPU, stays in one process, in order; the others go there file by file."""
    from xdist.scheduler import LoadScopeScheduling

    class ByRoom(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", maxsplit=1)[0]
            room = Path(file).parts[1]
            if room in SHARING_ROOMS:
                return room
            return "gpu" if room in GPU_ROOMS and torch.cuda.is_available() else file

    return ByRoom(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long rooms first."""
    rooms = {room: number for number, room in enumerate(LONG_ROOMS)}
    items.sort(key=lambda item: rooms.get(item.path.relative_to(HERE).parts[0], len(rooms)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests had to `tell`."""
    reports = [report for some in terminalreporter.stats.values() for report in some]
    for report in (one for one in reports if getattr(one, "when", "") == "call"):
        for _, line in (each for each in report.user_properties if each[0] == TOLD):
            terminalreporter.write_line(f"{report.nodeid}: {line}")


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Print a line at the end of the run, whichever process the test is in."""
    return lambda line: record_property(TOLD, line)


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """SmolLM2-135M-Instruct in Hugging Face layout, prepared once into the user's cache."""
    from cli.models.default_model import find_default_model
    from engine.weights.gguf import prepare_model

    return prepare_model(find_default_model())


@pytest.fixture(scope="session")
def _shelf(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    from tests.running_cluster import Shelf

    shelf = Shelf(model_folder, lambda: tmp_path_factory.mktemp("logs"))
    yield shelf
    shelf.clear()


@pytest.fixture(scope="session")
def running_cluster(_shelf: Shelf) -> Callable[..., RunningCluster]:
    """A cluster with these settings of `ClusterConfig`; whichever test comes next may use it too."""
    return lambda **settings: _shelf.get(fresh=False, **settings)


@pytest.fixture
def fresh_cluster(_shelf: Shelf) -> Iterator[Callable[..., RunningCluster]]:
    """A cluster of the test's own, for tests that break it."""
    yield lambda **settings: _shelf.get(fresh=True, **settings)
    _shelf.clear()
