"""What Ray leaves behind when its owner is killed ends within moments."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tandem.cluster.ray_processes.temp_folder import TempFolder
from tandem.cluster.ray_processes.watchdog import Watchdog
from tests.unit.cluster.ray_processes.test_temp_folder import start

OWNER = """
import os, sys
from pathlib import Path
from tandem.cluster.ray_processes.temp_folder import TempFolder
from tandem.cluster.ray_processes.watchdog import Watchdog
folder = TempFolder(Path(sys.argv[1]))
watchdog = Watchdog(folder.path)
print(folder.path, flush=True)
sys.stdin.read()
os.kill(os.getpid(), 9)
"""


def test_agents_of_an_owner_that_was_killed_end_and_its_folder_goes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        agent, other = start("ray::DashboardAgent", folder / "agent.log"), start("less", folder / "other.log")
        try:
            owner.stdin.close()
            agent.wait(60)
            assert other.poll() is None
        finally:
            for process in (agent, other):
                process.kill()
                process.communicate()
    assert owner.wait() == -9


def test_it_ends_with_its_owners_stop(tmp_path: Path) -> None:
    folder = TempFolder(tmp_path)
    watchdog = Watchdog(folder.path)
    folder.remove()
    watchdog.stop()
    assert watchdog._process.returncode == 0
