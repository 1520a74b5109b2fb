"""A dead cluster's folder is removed by the next one; a live cluster's is not."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tandem.cluster.ray_processes.temp_folder import LOCK, YOUNG_S, TempFolder, remove_abandoned


def age(path: Path) -> None:
    old = time.time() - 2 * YOUNG_S
    os.utime(path, (old, old))


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    folder = TempFolder(tmp_path)
    age(folder.path)
    assert remove_abandoned(tmp_path) == []
    assert folder.path.is_dir()
    folder.remove()
    folder.remove()
    assert not folder.path.exists()


def test_an_abandoned_folder_goes(tmp_path: Path) -> None:
    abandoned = tmp_path / "tandem-dead"
    abandoned.mkdir()
    (abandoned / LOCK).touch()
    (abandoned / "log").write_text("x")
    assert remove_abandoned(tmp_path) == []  # too young to tell
    age(abandoned)
    assert remove_abandoned(tmp_path) == [abandoned]
    assert not abandoned.exists()


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    other = tmp_path / "tandem-notes"
    other.mkdir()
    age(other)
    assert remove_abandoned(tmp_path) == []
    assert other.is_dir()


def start(name: str, log: Path) -> subprocess.Popen[bytes]:
    """Starts a sleeping process called `name` that keeps `log` open."""
    script = "import sys, time; log = open(sys.argv[1], 'w'); print(flush=True); time.sleep(60)"
    command = [name, "-c", script, os.path.relpath(log, log.parent)]
    process = subprocess.Popen(command, executable=sys.executable, stdout=subprocess.PIPE, cwd=log.parent)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_agents_of_a_killed_cluster_end_with_its_folder(tmp_path: Path) -> None:
    owned = (
        "from tandem.cluster.ray_processes.temp_folder import TempFolder; import os, sys; from pathlib import Path\n"
    )
    owned += "TempFolder(Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    killed = subprocess.run([sys.executable, "-c", owned, str(tmp_path)], check=False)
    assert killed.returncode == -9
    (folder,) = tmp_path.iterdir()
    agent, pager = start("ray::DashboardAgent", folder / "agent.log"), start("less", folder / "other.log")
    elsewhere = start("ray::DashboardAgent", tmp_path / "agent.log")
    try:
        assert remove_abandoned(tmp_path) == [folder], "however young it is"
        assert not folder.exists()
        agent.wait(60)
        assert pager.poll() is None
        assert elsewhere.poll() is None
    finally:
        for process in (agent, pager, elsewhere):
            process.kill()
            process.communicate()


def test_a_folder_is_deleted_again_while_an_ending_process_makes_files_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, rmtree, late = TempFolder(tmp_path), shutil.rmtree, iter(range(3))

    def delete(path: Path, **options: bool) -> None:
        rmtree(path, **options)
        for number in late:
            (path / str(number)).mkdir(parents=True)
            break

    monkeypatch.setattr(shutil, "rmtree", delete)
    folder.remove()
    assert list(tmp_path.iterdir()) == []
    assert list(late) == []
