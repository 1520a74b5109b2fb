"""The registry: one incarnation per id, dead ones stay dead, watchers see the latest membership."""

import asyncio
import logging
from dataclasses import replace

import pytest

from tandem.cluster.supervision.registry import Registry
from tandem.protocol.errors import StaleEpoch
from tandem.protocol.messages import ModelFacts, PeerRef, Role, WorkerInfo

FACTS = ModelFacts("m", 10, 10, (1,), "float32")


def info(worker_id: str, incarnation: int, address: str = "127.0.0.1:1") -> WorkerInfo:
    return WorkerInfo(PeerRef(worker_id, incarnation), Role.PREFILL, address, FACTS, 4, 16, 2, 64, "cpu", "none")


def names(registry: Registry) -> list[tuple[str, int]]:
    return [(w.peer.worker_id, w.peer.incarnation) for w in registry.membership().workers]


def test_a_later_incarnation_replaces_the_earlier() -> None:
    registry = Registry()
    registry.register(info("b", 5))
    registry.register(info("a", 1))
    registry.register(info("b", 6))
    assert names(registry) == [("a", 1), ("b", 6)]
    assert registry.membership().revision == 3


def test_an_earlier_incarnation_is_refused() -> None:
    registry = Registry()
    registry.register(info("a", 6))
    with pytest.raises(StaleEpoch, match="incarnation 5 of a"):
        registry.register(info("a", 5))
    assert names(registry) == [("a", 6)]


def test_the_dead_do_not_register_again() -> None:
    registry = Registry()
    assert not registry.unregister(PeerRef("a", 5))  # died before it registered
    with pytest.raises(StaleEpoch):
        registry.register(info("a", 5))
    registry.register(info("a", 6))
    assert names(registry) == [("a", 6)]


def test_unregistering_an_old_incarnation_leaves_the_new_one() -> None:
    registry = Registry()
    registry.register(info("a", 6))
    revision = registry.membership().revision
    assert not registry.unregister(PeerRef("a", 5))
    assert names(registry) == [("a", 6)]
    assert registry.membership().revision == revision
    assert registry.unregister(PeerRef("a", 6))
    assert names(registry) == []


def test_registering_again_unchanged_is_no_change() -> None:
    registry = Registry()
    registry.register(info("a", 6))
    registry.register(info("a", 6))
    assert registry.membership().revision == 1
    registry.register(info("a", 6, "127.0.0.1:2"))
    assert registry.membership().revision == 2


async def test_a_watcher_sees_now_and_each_latest_change() -> None:
    registry = Registry()
    registry.register(info("a", 1))
    watch = registry.watch()
    assert [w.peer.worker_id for w in (await anext(watch)).workers] == ["a"]

    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0)
    assert not waiting.done()
    registry.register(info("b", 1))
    registry.unregister(PeerRef("a", 1))
    assert [w.peer.worker_id for w in (await waiting).workers] == ["b"]

    registry.register(info("c", 1))  # while nobody waits
    assert [w.peer.worker_id for w in (await anext(watch)).workers] == ["b", "c"]


def test_what_changes_for_the_worse_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry()
    slow = replace(info("a", 1), warnings=("slow; do this",))
    lost = replace(slow, not_ready="5 of 8 pages are lost")
    with caplog.at_level(logging.INFO):
        for state in (slow, lost, replace(lost, not_ready="6 of 8 pages are lost"), slow):
            registry.register(state)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "a: slow; do this"),
        ("ERROR", "a is not ready: 5 of 8 pages are lost"),
        ("INFO", "a is ready again"),
    ]
    assert registry.membership().revision == 4
