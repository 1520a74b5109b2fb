"""`stop` is bounded, whatever hangs, and ends all processes."""

import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import MagicMock

import psutil
import pytest

from tandem.cluster.launcher import Cluster
from tandem.cluster.ray_processes.ray_node import RayNode
from tandem.cluster.ray_processes.temp_folder import TempFolder
from tandem.protocol.errors import Unavailable
from tandem.settings.cluster import ClusterSettings


class HangingNode:
    """A Ray that never starts, until it is killed."""

    gpus = 0

    def __init__(self, _: int) -> None:
        self.starting = threading.Event()
        self.killed = threading.Event()

    def start(self, *_: object, **__: object) -> None:
        self.starting.set()
        self.killed.wait()
        raise ConnectionError("Ray was killed")

    def stop(self) -> None: ...

    def kill(self) -> None:
        self.killed.set()


def test_a_ray_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.cluster.launcher.RayNode", HangingNode)
    cluster = Cluster(ClusterSettings.of(model=Path("m")), lambda _: None)
    node = cluster._node
    assert isinstance(node, HangingNode)
    cluster._thread.start()
    node.starting.wait()
    cluster.stop(timeout_s=0.05)
    assert node.killed.is_set()
    with pytest.raises(Unavailable, match="Ray was killed"):
        cluster.wait()


@pytest.mark.parametrize("error", [Unavailable("it does not answer"), AttributeError("Ray is shut down")])
@pytest.mark.parametrize("outlive_s", [0.0, 9.0])
def test_workers_of_a_controller_that_does_not_stop_in_time_may_live_on(outlive_s: float, error: Exception) -> None:
    config = ClusterSettings.of(Path("m"), ray_address="auto", token="t", outlive_s=outlive_s)
    cluster = Cluster(config, lambda _: None)
    controller = MagicMock()
    controller.stop.side_effect = error
    cluster._stop_controller(controller)
    assert cluster.left_workers is bool(outlive_s)


def test_kill_ends_the_family_and_removes_the_folder(tmp_path: Path) -> None:
    node = RayNode()
    node._folder = folder = TempFolder(tmp_path)
    script = (
        "import subprocess, sys, time, signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('up', flush=True)\n"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(folder.path)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        family = [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]
        assert len(family) == 2
        node.kill()
        assert not [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    assert not folder.path.exists()
