"""SIGKILL of either end in the middle of a transfer whose receiver reads, made certain: over TCP a read moves only
while the sender runs, and a stopped receiver does not begin.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kv_transfer import nixl_orders
from kv_transfer.base import Direction
from kv_transfer.nixl_transport import NixlTransport
from tests.integration.test_kv_transfer_nixl import PAGES, Peer, Prefill, digest
from wire.errors import TransferFailed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NIXL is for Linux")

NOTICED_WITHIN_S = 60.0
EVERY = list(range(PAGES))


def until(condition: Callable[[], bool], within_s: float = NOTICED_WITHIN_S) -> None:
    give_up = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


class Scene:
    """This process's transport, and peers in processes of their own."""

    def __init__(self) -> None:
        self.here = Prefill(Direction.READ)
        assert isinstance(self.here.transport, NixlTransport)
        self.transport = self.here.transport
        self.peers: list[Peer] = []
        self._gate = threading.Event()

    def start(self, incarnation: int) -> Peer:
        peer = Peer(Direction.READ, incarnation=incarnation)
        self.peers.append(peer)
        peer.meets(self.here)
        self.here.write(peer, [0], [0]).result(timeout=60)
        return peer

    def hold(self) -> None:
        """The thread of this process's transport stands still until `go_on`."""
        self._gate.clear()
        self.transport._command(lambda: self._gate.wait(60) and None)

    def go_on(self) -> None:
        self._gate.set()

    def turns(self) -> None:
        """That thread has done what it was asked for, and looked around."""
        for _ in range(3):
            done = threading.Event()
            self.transport._command(done.set)
            assert done.wait(60)

    @property
    def moving(self) -> int:
        return len(self.transport._mover.handles)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setenv("UCX_TLS", "tcp")
    scene = Scene()
    yield scene
    scene.go_on()
    scene.transport.close()
    for peer in scene.peers:
        peer.process.kill()
        peer.process.communicate()


def test_a_sender_that_dies_amid_a_read_leaves_no_notice_and_a_quiet_pool(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Any] = []
    monkeypatch.setattr(scene.transport, "_on_notice", heard.append)
    sender = scene.start(incarnation=1)
    scene.hold()
    sender.ask("write")
    looks = 0
    while looks < 10:  # each sends what was to be sent
        looks += sender.ask("looks", seconds=0.1)[0]
    sender.process.send_signal(signal.SIGSTOP)
    scene.go_on()
    until(lambda: scene.moving == 1)
    sender.process.kill()
    sender.process.wait()
    until(lambda: scene.moving == 0)
    quiet = digest(scene.here.pool)

    scene.transport.remove_peer(sender.ref)
    scene.start(incarnation=2)
    assert digest(scene.here.pool) == quiet
    assert heard == []
    scene.peers[-1].ask("write")
    until(lambda: len(heard) == 1)
    assert scene.peers[-1].ask("digests") == [digest(page) for page in scene.here.pool]


@pytest.mark.parametrize("told", ["by the controller", "by its next run"])
def test_a_receiver_that_dies_amid_a_transfer_holds_pages_until_its_end_is_known(
    told: str, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies between order and read: amid a read over TCP, UCX would end this process as well (`fragile_wire`)."""
    receiver = scene.start(incarnation=1)
    receiver.stands_still()
    write = scene.here.write(receiver, EVERY, EVERY, scene.here.notice(1, EVERY, 0), deadline_s=0.5)
    scene.turns()
    time.sleep(0.2)
    receiver.process.kill()
    receiver.process.wait()
    with pytest.raises(TimeoutError):
        write.result(timeout=2.0)
    monkeypatch.setattr(nixl_orders, "REMOVED_REST_S", 1.0)
    if told == "by the controller":
        scene.transport.remove_peer(receiver.ref)
    else:
        scene.start(incarnation=2)
    with pytest.raises(TransferFailed, match=r"the worker (is gone|was restarted)"):
        write.result(timeout=60)

    reborn = scene.peers[-1] if len(scene.peers) > 1 else scene.start(incarnation=2)
    scene.here.write(reborn, EVERY, EVERY, scene.here.notice(2, EVERY, 0)).result(timeout=60)
    assert reborn.hears(1) == [{"epoch": 2, "whole": True}]
