"""Ray that does not come up: started once more, then said in words."""

from collections.abc import Iterator

import pytest
import ray

from cluster.ray_node import RayNode
from wire.errors import Unavailable

SLOW = "The current node timed out during startup. This could happen because some of the raylet failed to startup."


@pytest.fixture
def node() -> Iterator[RayNode]:
    node = RayNode()
    yield node
    node.stop()


def starts(monkeypatch: pytest.MonkeyPatch, *errors: Exception | None) -> list[str]:
    """`ray.init` fails with these, one after the other; the folders that it was given."""
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


def test_ray_that_never_comes_up_is_said_in_words(node: RayNode, monkeypatch: pytest.MonkeyPatch) -> None:
    starts(monkeypatch, Exception(SLOW), Exception(SLOW))
    with pytest.raises(Unavailable, match="twice; free processors"):
        node.start({}, 2)


def test_another_failure_is_not_tried_again(node: RayNode, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = starts(monkeypatch, ValueError("no such option"))
    with pytest.raises(ValueError, match="no such option"):
        node.start({}, 2)
    assert len(folders) == 1
