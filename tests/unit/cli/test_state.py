"""The state file: found while its process lives, ignored afterwards."""

import json
import os
from pathlib import Path

import pytest

from tandem.cli.connection import state
from tandem.protocol.errors import Unavailable


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(state.FOLDER_VARIABLE, str(tmp_path / "state"))
    return tmp_path / "state"


def test_what_is_announced_is_found(folder: Path) -> None:
    path = state.announce("127.0.0.1:1", "127.0.0.1:2", "m")
    serving = state.newest()
    assert (serving.pid, serving.grpc, serving.http, serving.model) == (os.getpid(), "127.0.0.1:1", "127.0.0.1:2", "m")
    assert path.stat().st_mode & 0o077 == 0
    assert folder.stat().st_mode & 0o077 == 0
    path.unlink()
    with pytest.raises(Unavailable, match="tandem up"):
        state.newest()


def test_the_file_of_a_process_that_took_the_id_over_is_removed() -> None:
    path = state.announce("a:1", "a:2", "m")
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "started": content["started"] - 100}))
    assert state.running() == []
    assert not path.exists()


def test_the_newest_comes_first(folder: Path) -> None:
    mine = state.announce("a:1", "a:2", "mine")
    parent = json.loads(mine.read_text()) | {"pid": os.getppid(), "model": "parent"}
    import psutil

    parent["started"] = psutil.Process(os.getppid()).create_time()
    (folder / "up-parent.json").write_text(json.dumps(parent))
    assert {one.model for one in state.running()} == {"mine", "parent"}
    starts = [one.started for one in state.running()]
    assert starts == sorted(starts, reverse=True)


def test_a_broken_file_is_skipped(folder: Path) -> None:
    folder.mkdir()
    (folder / "up-1.json").write_text("{")
    (folder / "up-2.json").write_text('{"pid": 1}')
    assert state.running() == []


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"XDG_RUNTIME_DIR": "/run/user/7"}, "/run/user/7/tandem"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/tandem/run"),
    ],
)
def test_the_folder_follows_the_user(variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (state.FOLDER_VARIABLE, "XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(state.folder()) == expected
