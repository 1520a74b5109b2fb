"""Which placement groups a controller makes, uses again and gives back, over a Ray that only keeps names."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.config import ClusterConfig
from cluster.left_workers import RayLeftWorkers
from cluster.roles import Slot
from cluster.worker_actors import WorkerActors
from wire.messages import Role

SLOT = Slot("decode-0", Role.DECODE, "cpu")
OUTLIVING = ClusterConfig(Path("m"), ray_address="auto", token="t", workers_outlive_s=9.0)


class Group:
    def __init__(self, name: str, bundle_specs: list[dict[str, float]], lifetime: str | None) -> None:
        self.name = name
        self.bundle_specs = bundle_specs
        self.lifetime = lifetime


class Groups:
    """Those of one namespace, beside another's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        importlib.import_module("ray.util.placement_group")  # as an attribute it is the function of that name
        self.mine: dict[str, Group] = {}
        self.theirs = {"decode-9"}
        for name, function in (
            ("placement_group", self.make),
            ("get_placement_group", self.get),
            ("remove_placement_group", self.remove),
            ("placement_group_table", self.table),
        ):
            monkeypatch.setattr(sys.modules["ray.util.placement_group"], name, function)

    def make(self, bundles: list[dict[str, float]], *, name: str, lifetime: str | None) -> Group:
        assert name not in self.mine, "a name has one place"
        self.mine[name] = Group(name, bundles, lifetime)
        return self.mine[name]

    def get(self, name: str) -> Group:
        if name not in self.mine:
            raise ValueError(name)
        return self.mine[name]

    def remove(self, group: Group) -> None:
        del self.mine[group.name]

    def table(self) -> dict[str, Any]:
        names = [*self.mine, *self.theirs]
        states = {name: {"name": name, "state": "CREATED"} for name in names}
        return {**states, "gone": {"name": "decode-5", "state": "REMOVED"}, "unnamed": {"name": "", "state": "CREATED"}}


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Groups:
    return Groups(monkeypatch)


def test_a_place_that_was_left_is_used_again_and_given_back(groups: Groups) -> None:
    first = WorkerActors(OUTLIVING, "t")._group(SLOT)
    assert first.lifetime == "detached"
    second = WorkerActors(OUTLIVING, "t")
    assert second._group(SLOT) is first
    second.let_go()
    assert groups.mine == {"decode-0": first}
    third = WorkerActors(OUTLIVING, "t")
    third.release(SLOT)
    assert not groups.mine, "of a worker that was taken over with its place"


def test_one_that_does_not_fit_is_made_anew(groups: Groups) -> None:
    old = groups.make([{"decode": 1.0, "GPU": 1.0}], name="decode-0", lifetime="detached")
    new = WorkerActors(OUTLIVING, "t")._group(SLOT)
    assert new is not old
    assert groups.mine == {"decode-0": new}


def test_workers_that_end_with_their_start_have_places_that_do_so_too(groups: Groups) -> None:
    actors = WorkerActors(ClusterConfig(Path("m")), "t")
    assert actors._group(SLOT).lifetime is None
    actors.release(SLOT)
    assert not groups.mine


async def test_what_no_worker_needs_is_cleared(groups: Groups) -> None:
    for name in ("decode-0", "decode-1"):
        groups.make([{"decode": 1.0}], name=name, lifetime="detached")
    await RayLeftWorkers().clear({"decode-0"})
    assert list(groups.mine) == ["decode-0"]
    await RayLeftWorkers().clear(())
    assert not groups.mine
