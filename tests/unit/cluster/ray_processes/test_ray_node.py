"""A private Ray that fails to start is started once more, then reported. Its logs rotate as the cluster's do."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from tandem.cluster.ray_processes import ray_node
from tandem.cluster.ray_processes.ray_node import RayNode
from tandem.cluster.ray_processes.temp_folder import ROOT_LENGTH_MAX, temp_root
from tandem.protocol.errors import Unavailable

SOCKET_PATH_MAX = 107
"""Maximum length of socket paths on Linux, in bytes."""
SLOW = "The current node timed out during startup. This could happen because some of the raylet failed to startup."


@pytest.fixture
def node() -> Iterator[RayNode]:
    node = RayNode()
    yield node
    node.stop()


@pytest.fixture(autouse=True)
def no_real_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects another test's cluster, whose Ray may run in this process and would end with it."""
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray_node, "remove_abandoned", list)


def starts(monkeypatch: pytest.MonkeyPatch, *errors: Exception | None) -> list[str]:
    """Makes `ray.init` fail with these errors, one after the other; returns the folders that it was given."""
    folders: list[str] = []

    def init(*, _temp_dir: str, **_: object) -> None:
        error = errors[len(folders)]
        folders.append(_temp_dir)
        if error is not None:
            raise error

    monkeypatch.setattr(ray, "init", init)
    return folders


def test_ray_is_started_once_more(node: RayNode, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = starts(monkeypatch, Exception(SLOW), None)
    node.start({}, 2)
    assert len(set(folders)) == 2, "nothing of the first is left"


def test_no_other_user_gets_into_the_folder_that_ray_opens_to_all(
    node: RayNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = starts(monkeypatch, None)
    node.start({}, 2)
    ray_folder = Path(folders[0])
    ray_folder.mkdir(exist_ok=True)
    ray_folder.chmod(0o777)  # as Ray does
    assert ray_folder.parent.stat().st_mode & 0o077 == 0
    socket_path = ray_folder / "session_2026-11-24_04-59-14_287174_4194304" / "sockets" / "plasma_store"
    assert ROOT_LENGTH_MAX + len(str(socket_path.relative_to(temp_root()))) + 1 <= SOCKET_PATH_MAX


def test_ray_that_never_comes_up_is_said_in_words(node: RayNode, monkeypatch: pytest.MonkeyPatch) -> None:
    starts(monkeypatch, Exception(SLOW), Exception(SLOW))
    with pytest.raises(Unavailable, match="twice; free processors"):
        node.start({}, 2)


def test_another_failure_is_not_tried_again(node: RayNode, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = starts(monkeypatch, ValueError("no such option"))
    with pytest.raises(ValueError, match="no such option"):
        node.start({}, 2)
    assert len(folders) == 1


def test_its_logs_rotate_by_the_clusters_setting_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts(monkeypatch, None, None)
    monkeypatch.setenv("RAY_ROTATION_BACKUP_COUNT", "7")
    monkeypatch.setenv("RAY_ROTATION_MAX_BYTES", "1")  # so that its absence is restored, too
    monkeypatch.delenv("RAY_ROTATION_MAX_BYTES")
    node = RayNode(3 << 20)
    node.start({}, 2)
    node.stop()
    assert os.environ["RAY_ROTATION_MAX_BYTES"] == str(3 << 20)
    assert os.environ["RAY_ROTATION_BACKUP_COUNT"] == "7"


def test_ray_starts_no_process_that_only_grown_or_watched_clusters_need(
    node: RayNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray._private.node import Node

    helpers = ("start_monitor", "start_api_server", "start_log_monitor")
    before = [getattr(Node, name) for name in helpers]
    during: list[object] = []

    def init(**_: object) -> None:
        during.extend(getattr(Node, name) for name in helpers)
        assert [getattr(Node, name)(None, include_dashboard=False) for name in helpers] == [None] * 3
        raise Unavailable("it does not start")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(Unavailable, match="does not start"):
        node.start({}, 2)
    assert not set(during) & set(before)
    assert [getattr(Node, name) for name in helpers] == before, "a Ray that others start in this process has them"
