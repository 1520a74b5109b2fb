"""Placement groups that are made, reused and released, over a Ray that only keeps names."""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import ray

from tandem.cluster.ray_processes import orphaned_workers as left_workers
from tandem.cluster.ray_processes.orphaned_workers import RayOrphanedWorkers, release_placement_group
from tandem.cluster.ray_processes.worker_actors import WorkerActors
from tandem.cluster.supervision.roles import Slot
from tandem.protocol.messages import Role
from tandem.settings.cluster import ClusterSettings
from tandem.worker.actor import release_own_group

SLOT = Slot("decode-0", Role.DECODE, "cpu")
OUTLIVING = ClusterSettings.of(Path("m"), ray_address="auto", token="t", outlive_s=9.0)


class Group:
    def __init__(self, name: str, bundle_specs: list[dict[str, float]], lifetime: str | None) -> None:
        self.name = name
        self.bundle_specs = bundle_specs
        self.lifetime = lifetime
        self.state = "CREATED"


class Groups:
    """The placement groups of one namespace, next to those of another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        importlib.import_module("ray.util.placement_group")  # as an attribute it is the function of that name
        self.mine: dict[str, Group] = {}
        self.theirs = {"decode-9": "CREATED"}
        self.actors: set[str] = set()
        self.here: Group | None = None
        """The namespace in which the test runs."""
        for name, function in (
            ("placement_group", self.make),
            ("get_placement_group", self.get),
            ("remove_placement_group", self.remove),
            ("placement_group_table", self.table),
            ("get_current_placement_group", lambda: self.here),
        ):
            monkeypatch.setattr(sys.modules["ray.util.placement_group"], name, function)
        monkeypatch.setattr(ray.util, "list_named_actors", lambda: sorted(self.actors))
        monkeypatch.setattr(ray, "get_actor", lambda name: name)
        monkeypatch.setattr(ray, "kill", self.kill)

    def kill(self, actor: str) -> None:
        self.actors.remove(actor)

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
        group.state = "REMOVED"

    def table(self, one: Group | None = None) -> dict[str, Any]:
        if one is not None:
            return {"name": one.name, "state": one.state}
        all_of_them = [*((name, group.state) for name, group in self.mine.items()), *self.theirs.items()]
        states = {str(number): {"name": name, "state": state} for number, (name, state) in enumerate(all_of_them)}
        return {**states, "gone": {"name": "decode-5", "state": "REMOVED"}, "unnamed": {"name": "", "state": "CREATED"}}


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Groups:
    return Groups(monkeypatch)


async def test_an_orphaned_placement_group_is_used_again_and_released(groups: Groups) -> None:
    first = WorkerActors(OUTLIVING, "t")._group(SLOT)
    assert first.lifetime == "detached"
    second = WorkerActors(OUTLIVING, "t")
    assert second._group(SLOT) is first
    second.release_all()
    assert groups.mine == {"decode-0": first}
    third = WorkerActors(OUTLIVING, "t")
    await third.release(SLOT)
    assert not groups.mine, "of a worker that was taken over with its place"


def test_one_that_does_not_fit_is_made_anew(groups: Groups) -> None:
    old = groups.make([{"decode": 1.0, "GPU": 1.0}], name="decode-0", lifetime="detached")
    new = WorkerActors(OUTLIVING, "t")._group(SLOT)
    assert new is not old
    assert groups.mine == {"decode-0": new}


async def test_workers_that_end_with_their_start_have_places_that_do_so_too(groups: Groups) -> None:
    actors = WorkerActors(ClusterSettings.of(Path("m")), "t")
    assert actors._group(SLOT).lifetime is None
    await actors.release(SLOT)
    assert not groups.mine


async def test_releasing_a_placement_group_does_not_block_the_event_loop(
    groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray may be slow; meanwhile the event loop has workers to watch."""
    actors, looked = WorkerActors(OUTLIVING, "t"), threading.Event()
    actors._group(SLOT)
    remove = groups.remove

    def slowly(group: Group) -> None:
        assert looked.wait(10), "the event loop stood still"
        remove(group)

    monkeypatch.setattr(sys.modules["ray.util.placement_group"], "remove_placement_group", slowly)
    releasing = asyncio.ensure_future(actors.release(SLOT))
    await asyncio.sleep(0)
    looked.set()
    await releasing
    assert not groups.mine


def test_a_place_that_has_the_name_since_is_left_alone(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group belongs to another controller, which took the name as soon as it was free."""
    groups.make([{"decode": 1.0}], name="decode-0", lifetime="detached")
    remove = groups.remove

    def and_another(group: Group) -> None:
        remove(group)
        groups.make([{"decode": 1.0}], name="decode-0", lifetime="detached")

    monkeypatch.setattr(sys.modules["ray.util.placement_group"], "remove_placement_group", and_another)
    assert release_placement_group("decode-0")
    assert groups.mine["decode-0"].state == "CREATED"


def test_a_placement_group_that_ray_does_not_remove_is_logged(
    groups: Groups, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(left_workers, "GONE_S", 0.0)
    groups.make([{"decode": 1.0}], name="decode-0", lifetime="detached")
    monkeypatch.setattr(sys.modules["ray.util.placement_group"], "remove_placement_group", lambda _group: None)
    assert release_placement_group("decode-0")
    assert "Ray still has the placement group of decode-0" in caplog.text


async def test_what_no_worker_needs_is_cleared(groups: Groups) -> None:
    for name in ("decode-0", "decode-1"):
        groups.make([{"decode": 1.0}], name=name, lifetime="detached")
    await RayOrphanedWorkers().clear({"decode-0"})
    assert list(groups.mine) == ["decode-0"]
    await RayOrphanedWorkers().clear(())
    assert not groups.mine


def test_a_placement_group_that_was_released_is_created_anew(groups: Groups) -> None:
    actors = WorkerActors(OUTLIVING, "t")
    first = actors._group(SLOT)
    assert actors._group(SLOT) is first
    groups.remove(first)
    assert actors._group(SLOT) is groups.mine["decode-0"]


async def test_who_waits_for_its_place_is_not_asked_what_it_is(groups: Groups) -> None:
    """Only the worker's own group counts, not one of the same name in another cluster."""
    for name, state in (("decode-0", "CREATED"), ("decode-9", "PENDING")):
        groups.make([{"decode": 1.0}], name=name, lifetime="detached").state = state
    groups.actors = {"decode-0-7", "decode-1-7", "decode-9-7", "router-7"}
    placed = {worker.peer.worker_id: worker._placed for worker in await RayOrphanedWorkers().living()}  # type: ignore[attr-defined]
    assert placed == {"decode-0": True, "decode-1": False, "decode-9": False}


def test_the_last_worker_releases_unused_placement_groups(groups: Groups) -> None:
    for name in ("decode-0", "decode-1", "decode-2", "decode-9"):
        groups.make([{"decode": 1.0}], name=name, lifetime="detached")
    groups.mine["decode-1"].state = "PENDING"
    groups.theirs["decode-9"] = "PENDING"
    groups.here = groups.mine["decode-0"]
    groups.actors = {"decode-0-7", "decode-1-7", "decode-9-7"}
    release_own_group()
    assert list(groups.mine) == ["decode-9"], "of a worker that serves still; that of decode-2 is dead"
    assert groups.actors == {"decode-0-7", "decode-9-7"}


def test_where_a_controller_is_a_worker_gives_back_its_own_place_alone(groups: Groups) -> None:
    for name in ("decode-0", "decode-1"):
        groups.make([{"decode": 1.0}], name=name, lifetime="detached")
    groups.here = groups.mine["decode-0"]
    groups.actors = {"controller-5"}
    release_own_group()
    assert list(groups.mine) == ["decode-1"]
