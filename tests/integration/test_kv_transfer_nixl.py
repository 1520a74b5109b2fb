"""The real transfer between two real processes: this one is the prefill side, kv_transfer_peer.py the decode side."""

import json
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kv_transfer.backends import available_backends, open_transport
from kv_transfer.base import PageWrite, Transport, WriteDone
from kv_transfer.nixl_backend.transport import CONNECT_ATTENTION_S, LISTEN_S, REST_S, NixlTransport
from kv_transfer.nixl_backend.ucx_transports import host_id
from tandem.protocol.errors import FailedPrecondition, TransferFailed
from tandem.protocol.messages import Lease, PeerDescription, PeerRef, TransferNotice
from tests.soak import soak

PEER = Path(__file__).with_name("kv_transfer_peer.py")
ROOT = Path(__file__).resolve().parents[2]
PAGES, PAGE_FLOATS = 128, 32 * 1024
ME = PeerRef("prefill-0", 7)
MEMORY = {"cpu": "DRAM", "cuda": "VRAM"}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NIXL is for Linux")

_peer_code = runpy.run_path(str(PEER))
pool_of, on_device, layout_of, digest = (_peer_code[name] for name in ("pool_of", "on_device", "layout_of", "digest"))


class Peer:
    """A decode-side process."""

    def __init__(self, incarnation: int = 1, seed: int = 2, device: str = "cpu") -> None:
        self.ref = PeerRef("decode-0", incarnation)
        self.initial = pool_of(seed, PAGES, PAGE_FLOATS)
        arguments = [self.ref.worker_id, str(incarnation), str(PAGES), str(PAGE_FLOATS), str(seed), device]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, str(PEER), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        hello = self.read()
        metadata, base = bytes.fromhex(hello["metadata"]), hello["base"]
        hello_process = hello["process"], hello["probe"]
        self.description = PeerDescription(
            self.ref, metadata, base, PAGE_FLOATS * 4, PAGES, 0, MEMORY[device], host_id(), *hello_process
        )

    def meets(self, prefill: "Prefill") -> None:
        """Introduces the two to each other, as workers are, and lets this one poll fast."""
        mine = prefill.transport.describe()
        facts = {"worker_id": mine.peer.worker_id, "incarnation": mine.peer.incarnation, "base": mine.base_address}
        self.ask("know", peer=facts | {"metadata": mine.agent_metadata.hex(), "memory": mine.memory, "host": mine.host})
        self.ask("expect", leases=1)
        prefill.transport.add_peer(self.description)

    def read(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def ask(self, do: str, **arguments: object) -> Any:
        assert self.process.stdin is not None
        print(json.dumps({"do": do, **arguments}), file=self.process.stdin, flush=True)
        return self.read()

    def wait_for_notices(self, notices: int, timeout_s: float = 60.0) -> list[dict[str, Any]]:
        """Returns the received notices, once there are so many."""
        until = time.monotonic() + timeout_s
        while len(received := self.ask("notices")) < notices and time.monotonic() < until:
            time.sleep(0.005)
        assert len(received) == notices
        return received

    def stands_still(self) -> None:
        """Stops the process; a signal takes effect with a delay."""
        self.process.send_signal(signal.SIGSTOP)
        until = time.monotonic() + 60
        while Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
            assert time.monotonic() < until
            time.sleep(0.005)

    def end(self) -> int:
        """Asks the process to exit, and returns its exit status."""
        self.process.send_signal(signal.SIGCONT)
        self.process.communicate(timeout=60)
        return self.process.returncode


class Prefill:
    """This process's pool and transport."""

    def __init__(self, device: str = "cpu") -> None:
        self.pool = pool_of(1, PAGES, PAGE_FLOATS)
        self.device_pool = on_device(self.pool, device)
        layout = layout_of(self.device_pool)
        trusted = "UCX_TLS" in os.environ  # tests that set it ask for TCP
        self.transport: Transport = open_transport("nixl", layout, ME, lambda notice: None, trusted_network=trusted)

    def notice(self, epoch: int, local: list[int], first_remote: int) -> TransferNotice:
        content = bytes.fromhex(digest(self.pool[local]))
        return TransferNotice(Lease(f"r{epoch}", 1, epoch), ME, content, len(local), first_remote, 1)

    def write(
        self,
        peer: Peer,
        local: list[int],
        remote: list[int],
        notice: TransferNotice | None = None,
        *,
        deadline_s: float = 20.0,
        after: "Sequence[Future[WriteDone]]" = (),
    ) -> "Future[WriteDone]":
        return self.transport.write(PageWrite(peer.ref, local, remote, notice, after=after), deadline_s)


WIRES = {"best": "", "tcp": "tcp"}
ONE_WIRE = pytest.mark.parametrize("wire", ["", pytest.param("tcp", marks=soak)], ids=WIRES, indirect=True)
"""Of these tests `make soak` runs those over TCP, over which each byte and each failure is tested anyway."""


@pytest.fixture(params=WIRES.values(), ids=WIRES)
def wire(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The UCX transports to allow; both ends read them from the environment when they open."""
    if request.param:
        # With a GPU in the machine NIXL insists on a transport for its memory, used or not.
        monkeypatch.setenv("UCX_TLS", f"{request.param},cuda" if torch.cuda.is_available() else request.param)
    return str(request.param)


@pytest.fixture
def prefill(request: pytest.FixtureRequest) -> Iterator[Prefill]:
    if "wire" in request.fixturenames:
        request.getfixturevalue("wire")  # both ends have to have the same
    prefill = Prefill()
    yield prefill
    prefill.transport.close()


@pytest.fixture
def start_peer() -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def start(**arguments: Any) -> Peer:
        peers.append(Peer(**arguments))
        return peers[-1]

    yield start
    for peer in peers:
        peer.process.kill()
        peer.process.communicate()


@pytest.fixture
def peer(wire: str, prefill: Prefill, start_peer: Callable[..., Peer]) -> Peer:
    peer = start_peer()
    peer.meets(prefill)
    return peer


def test_every_byte_arrives_and_no_other_page_changes(prefill: Prefill, peer: Peer, wire: str) -> None:
    shuffle = random.Random(5)
    local, remote = (shuffle.sample(range(PAGES), 70) for _ in range(2))
    done = prefill.write(peer, local[:50], remote[:50]).result(timeout=60)
    prefill.write(peer, local[50:], remote[50:]).result(timeout=60)
    expected = peer.initial.copy()
    expected[remote] = prefill.pool[local]
    assert peer.ask("digests") == [digest(page) for page in expected]
    assert done.bytes == 50 * PAGE_FLOATS * 4
    assert done.duration_nanos > 0
    name, *warnings = [prefill.transport.transport_name(), *prefill.transport.warnings()]
    assert name.startswith("UCX")
    if wire == "tcp":
        assert name == "UCX (tcp)"
        (warning,) = warnings
        assert "KV pages go to decode-0 over TCP though both workers are on this host" in warning
        assert "UCX_TLS=tcp" in warning
    assert peer.end() == 0


@ONE_WIRE
def test_the_notice_comes_after_the_data(prefill: Prefill, peer: Peer) -> None:
    shuffle = random.Random(6)
    for epoch in range(1, 61):
        count = shuffle.randint(1, 24)
        local = shuffle.sample(range(PAGES), count)
        first = shuffle.randrange(PAGES - count)
        prefill.pool[local] = np.float32(epoch) + prefill.pool[local]
        notice = prefill.notice(epoch, local, first)
        prefill.write(peer, local, list(range(first, first + count)), notice).result(timeout=60)
        received = peer.wait_for_notices(epoch)
        assert received[-1] == {"epoch": epoch, "whole": True}


@ONE_WIRE
def test_many_requests_at_once(prefill: Prefill, peer: Peer) -> None:
    futures = []
    for epoch in range(1, 33):
        first = 4 * (epoch - 1)
        local = [(first * 7 + i * 13) % PAGES for i in range(4)]
        for i in range(3):
            futures.append(prefill.write(peer, [local[i]], [first + i]))
        notice = prefill.notice(epoch, local, first)
        futures.append(prefill.write(peer, local[3:], [first + 3], notice, after=futures[-3:]))
    assert sum(future.result(timeout=60).bytes for future in futures) == PAGES * PAGE_FLOATS * 4
    received = peer.wait_for_notices(32)
    assert sorted(one["epoch"] for one in received) == list(range(1, 33))
    assert all(one["whole"] for one in received)


@ONE_WIRE
def test_a_killed_peer_fails_its_writes_and_its_next_run_is_served(
    prefill: Prefill, peer: Peer, start_peer: Callable[..., Peer]
) -> None:
    every = list(range(PAGES))
    futures = [prefill.write(peer, every, every) for _ in range(6)]
    futures.append(prefill.write(peer, every, every, after=futures[:]))
    futures[0].result(timeout=60)
    peer.process.kill()
    peer.process.wait()
    futures += [prefill.write(peer, every, every) for _ in range(6)]
    done, moving = wait(futures, timeout=60)
    assert not moving
    errors = [future.exception() for future in done]
    assert all(error is None or isinstance(error, TransferFailed) for error in errors)
    with pytest.raises(TransferFailed, match="decode-0"):
        prefill.write(peer, [0], [0]).result(timeout=60)

    reborn = start_peer(incarnation=2, seed=3)
    reborn.meets(prefill)
    prefill.transport.add_peer(peer.description)
    prefill.write(reborn, [4, 9], [1, 0], prefill.notice(5, [9, 4], 0)).result(timeout=60)
    assert reborn.wait_for_notices(1) == [{"epoch": 5, "whole": True}]
    with pytest.raises(TransferFailed, match="unknown here"):
        prefill.write(peer, [0], [0]).result(timeout=60)
    expected = reborn.initial.copy()
    expected[[1, 0]] = prefill.pool[[4, 9]]
    assert reborn.ask("digests") == [digest(page) for page in expected]


@pytest.mark.parametrize("wire", ["tcp"], indirect=True)
class TestStoppedPeer:
    """Over TCP a stopped peer takes no bytes, which gives a write that stays in flight."""

    @pytest.fixture
    def stuck(self, prefill: Prefill, peer: Peer) -> "Future[WriteDone]":
        prefill.write(peer, [0], [0]).result(timeout=60)
        peer.stands_still()
        return prefill.write(peer, list(range(PAGES)), list(range(PAGES)), deadline_s=0.2)

    def test_past_its_deadline_a_write_fails_only_when_it_is_quiet(
        self, prefill: Prefill, peer: Peer, stuck: "Future[WriteDone]"
    ) -> None:
        with pytest.raises(TimeoutError):
            stuck.result(timeout=0.7)
        assert not stuck.cancel()
        peer.process.send_signal(signal.SIGCONT)
        with pytest.raises(TransferFailed, match="after its deadline"):
            stuck.result(timeout=60)
        landed = peer.ask("digests")
        prefill.pool += 1
        assert peer.ask("digests") == landed

    def test_a_removed_peer_s_writes_fail_when_they_are_quiet(
        self,
        prefill: Prefill,
        peer: Peer,
        stuck: "Future[WriteDone]",
        start_peer: Callable[..., Peer],
    ) -> None:
        prefill.transport.remove_peer(peer.ref)
        with pytest.raises(TimeoutError):
            stuck.result(timeout=1)
        peer.process.kill()
        with pytest.raises(TransferFailed, match="gone"):
            stuck.result(timeout=60)
        reborn = start_peer(incarnation=2)
        reborn.meets(prefill)
        prefill.write(reborn, [1], [1]).result(timeout=60)

    def test_a_removed_peer_that_lives_gets_the_bytes_that_were_sent_and_no_others(
        self, prefill: Prefill, peer: Peer, stuck: "Future[WriteDone]"
    ) -> None:
        prefill.transport.remove_peer(peer.ref)
        # Refused behind the removal, which is therefore done before the peer takes the bytes.
        with pytest.raises(TransferFailed, match=str(peer.ref.worker_id)):
            prefill.write(peer, [0], [0]).result(timeout=60)
        peer.process.send_signal(signal.SIGCONT)
        with pytest.raises(TransferFailed, match="gone"):
            stuck.result(timeout=60)
        landed = peer.ask("digests")
        prefill.pool += 1
        time.sleep(0.5)
        assert peer.ask("digests") == landed

    def test_close_is_bounded_with_a_write_in_flight(
        self, prefill: Prefill, stuck: "Future[WriteDone]", monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kv_transfer.nixl_backend.transport.CLOSE_TIMEOUT_S", 0.5)
        began = time.monotonic()
        prefill.transport.close()
        assert time.monotonic() - began < 60
        with pytest.raises(TransferFailed, match="closing"):
            stuck.result(timeout=60)


@pytest.mark.parametrize("wire", [""], indirect=True)
class TestEdges:
    def test_what_cannot_be_written_fails_alone(self, prefill: Prefill, peer: Peer) -> None:
        for local, remote, deadline_s, why in (
            ([PAGES], [0], 5.0, "local page 128 is outside"),
            ([0], [-1], 5.0, "remote page -1 is outside"),
            ([0, 1], [0], 5.0, "2 pages do not go onto 1"),
            ([], [], 5.0, "neither pages nor a notice"),
            ([0], [0], 0.0, "before it began"),
        ):
            with pytest.raises(TransferFailed, match=why):
                prefill.write(peer, local, remote, deadline_s=deadline_s).result(timeout=60)
        stranger = PageWrite(PeerRef("decode-9", 1), [0], [0])
        with pytest.raises(TransferFailed, match="decode-9"):
            prefill.transport.write(stranger, 5.0).result(timeout=60)
        prefill.write(peer, [], [], prefill.notice(1, [], 0)).result(timeout=60)
        peer.wait_for_notices(1)

    def test_a_notice_that_lies_about_its_sender_is_dropped(self, prefill: Prefill, peer: Peer) -> None:
        lie = TransferNotice(Lease("r", 1, 1), PeerRef("prefill-1", 7), b"", 0, 0, 0)
        prefill.write(peer, [0], [0], lie).result(timeout=60)
        prefill.write(peer, [0], [0], prefill.notice(2, [0], 0)).result(timeout=60)
        assert [one["epoch"] for one in peer.wait_for_notices(1)] == [2]

    def test_other_page_sizes_are_refused(self, prefill: Prefill, peer: Peer) -> None:
        description = PeerDescription(PeerRef("decode-9", 1), b"", 4096, 1 << 20, 4, 0, "DRAM")
        with pytest.raises(FailedPrecondition, match="decode-9 have 1048576 bytes"):
            prefill.transport.add_peer(description)

    def test_metadata_that_is_no_metadata_fails_writes_to_that_peer_only(self, prefill: Prefill, peer: Peer) -> None:
        broken = PeerDescription(PeerRef("decode-9", 1), b"nonsense", 4096, PAGE_FLOATS * 4, 4, 0, "DRAM")
        prefill.transport.add_peer(broken)
        with pytest.raises(TransferFailed, match="no connection to decode-9"):
            prefill.transport.write(PageWrite(broken.peer, [0], [0]), 5.0).result(timeout=60)
        prefill.write(peer, [0], [0]).result(timeout=60)

    def test_a_listening_transport_sleeps_between_looks_and_an_idle_one_rests(
        self, prefill: Prefill, peer: Peer
    ) -> None:
        prefill.write(peer, [0], [0]).result(timeout=60)
        listening, seconds = peer.ask("looks", seconds=CONNECT_ATTENTION_S)
        assert listening <= 1 + seconds / LISTEN_S
        peer.ask("expect", leases=0)
        idle, seconds = peer.ask("looks", seconds=0.5)
        assert idle <= 2 + seconds / REST_S
        assert idle < listening

    def test_time_without_polls_does_not_count_as_poll_time(self, prefill: Prefill, peer: Peer) -> None:
        transport, gate = prefill.transport, threading.Event()
        transport.expect(1)
        assert isinstance(transport, NixlTransport)
        before = transport.transport_poll_s()
        until = time.monotonic() + 60
        while transport.transport_poll_s() < before + 0.2:
            assert time.monotonic() < until
            time.sleep(0.01)
        held, after = threading.Event(), threading.Event()
        transport._command(lambda: held.set() or (gate.wait(60) and None))
        assert held.wait(60)
        before, polls = transport.transport_poll_s(), []
        transport._command(lambda: polls.append(transport.transport_poll_s()) or after.set())
        time.sleep(0.4)
        assert transport.transport_poll_s() == before
        gate.set()
        assert after.wait(60)
        assert polls[0] < before + 0.4

    def test_close_is_final_and_idempotent(self, prefill: Prefill, peer: Peer) -> None:
        prefill.transport.close()
        prefill.transport.close()
        prefill.transport.remove_peer(peer.ref)
        prefill.transport.expect(3)
        with pytest.raises(TransferFailed, match="closed"):
            prefill.write(peer, [0], [0]).result(timeout=60)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("here", "there"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_device_memory_goes_the_same_way(start_peer: Callable[..., Peer], here: str, there: str) -> None:
    prefill, peer = Prefill(here), start_peer(device=there)
    peer.meets(prefill)
    expected = peer.initial.copy()
    shuffle = random.Random(8)
    for epoch in range(1, 21):
        local, first = shuffle.sample(range(PAGES), 16), shuffle.randrange(PAGES - 16)
        remote = list(range(first, first + 16))
        expected[remote] = prefill.pool[local]
        prefill.write(peer, local, remote, prefill.notice(epoch, local, first)).result(timeout=60)
        assert peer.wait_for_notices(epoch)[-1] == {"epoch": epoch, "whole": True}
    assert peer.ask("digests") == [digest(page) for page in expected]
    prefill.transport.close()
    assert peer.end() == 0


def test_the_doctor_finds_ucx() -> None:
    report = available_backends()
    assert report.error == ""
    assert "UCX" in report.plugins
    assert report.package.startswith("nixl-cu")
