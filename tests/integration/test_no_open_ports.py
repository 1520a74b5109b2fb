"""Open ports of two processes between which KV pages move: none, unless a trusted network was declared."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path

import pytest

from kv_transfer.backends import open_transport
from kv_transfer.nixl_backend.agent import PoolAgent
from tandem.protocol.errors import FailedPrecondition, InvalidArgument, TransferFailed
from tandem.protocol.messages import PeerRef
from tests.integration.test_kv_transfer_nixl import PAGES, Peer, Prefill, layout_of, pool_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NIXL is for Linux")

LISTEN = "0A"
"""The state of listening sockets in /proc/net/tcp."""
EVERY = list(range(PAGES))
NOTICED_WITHIN_S = 30.0

StartPair = Callable[[], "tuple[Prefill, Peer]"]


def listening_sockets(process: int) -> list[str]:
    """Returns the local addresses, as the kernel writes them, of all TCP sockets on which a process listens."""
    files = Path(f"/proc/{process}/fd").iterdir()
    sockets = {os.readlink(file) for file in files if file.is_symlink()}
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]
    ]
    return [row[1] for row in rows if row[3] == LISTEN and f"socket:[{row[9]}]" in sockets]


@pytest.fixture
def start_pair() -> Iterator[StartPair]:
    pairs: list[tuple[Prefill, Peer]] = []

    def start() -> tuple[Prefill, Peer]:
        prefill, peer = Prefill(), Peer()
        pairs.append((prefill, peer))
        peer.meets(prefill)
        prefill.write(peer, [0], [0]).result(timeout=60)
        return prefill, peer

    yield start
    for prefill, peer in pairs:
        peer.process.kill()
        peer.process.communicate()
        prefill.transport.close()


def test_nothing_listens_where_pages_stay_on_the_host(start_pair: StartPair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = listening_sockets(os.getpid())
        assert any(address.endswith(f":{listener.getsockname()[1]:04X}") for address in here), "what listens is seen"
        prefill, peer = start_pair()
        done = prefill.write(peer, EVERY, EVERY, prefill.notice(1, EVERY, 0)).result(timeout=60)
        assert done.bytes == prefill.pool.nbytes
        assert peer.wait_for_notices(1) == [{"epoch": 1, "whole": True}]
        assert listening_sockets(peer.process.pid) == []
        assert listening_sockets(os.getpid()) == here
        assert prefill.transport.open_ports() == ()


def test_open_ports_lists_the_ports_of_a_trusted_network(
    monkeypatch: pytest.MonkeyPatch, start_pair: StartPair
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,cuda")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    before = listening_sockets(os.getpid())
    prefill, _ = start_pair()
    (address,) = set(listening_sockets(os.getpid())) - set(before)
    assert prefill.transport.open_ports() == (f"127.0.0.1:{int(address.partition(':')[2], 16)}",)


@pytest.mark.parametrize("still", [False, True], ids=["killed", "killed while it stood still"])
def test_writes_to_a_dead_peer_end(still: bool, start_pair: StartPair) -> None:
    """No connection ends with the process; and the data that it did not read exceeds its segment."""
    prefill, peer = start_pair()
    writes = []
    if still:
        peer.stands_still()
        pages = [[number % PAGES] for number in range(1000)]
        writes = [prefill.write(peer, page, page, prefill.notice(1, page, 0)) for page in pages]
        assert wait(writes, timeout=1.0).done != set(writes), "some wait for it"
    peer.process.kill()
    peer.process.wait()
    assert not wait(writes, timeout=NOTICED_WITHIN_S).not_done
    with pytest.raises(TransferFailed):
        prefill.write(peer, [0], [0]).result(timeout=NOTICED_WITHIN_S)


def test_a_peer_that_dies_while_it_connects_does_no_harm() -> None:
    """UCX 1.23 with its keepalive crashes this process when it reads the dead peer's request."""
    pool = pool_of(1, PAGES, 1024)
    agent, peer = PoolAgent(layout_of(pool), PeerRef("prefill-0", 1)), Peer()
    me = agent.describe()
    facts = {"worker_id": "prefill-0", "incarnation": 1, "base": me.base_address, "metadata": me.agent_metadata.hex()}
    peer.ask("know", peer=facts | {"memory": me.memory, "host": me.host})
    peer.ask("expect", leases=1)
    looks, _ = peer.ask("looks", seconds=0.3)
    assert looks, "it has connected, and this process has not looked since"
    peer.process.kill()
    peer.process.communicate()
    for _ in range(100):
        assert agent.notices() == []
    agent.close()


def test_a_transport_that_would_listen_does_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    pool = pool_of(1, 2, 1024)
    with pytest.raises(InvalidArgument, match="--trusted-network"):
        open_transport("nixl", layout_of(pool), PeerRef("decode-0", 1), lambda notice: None)


def test_a_peer_on_another_host_is_refused(start_pair: StartPair) -> None:
    prefill, peer = start_pair()
    elsewhere = replace(peer.description, host="another")
    with pytest.raises(FailedPrecondition, match=r"decode-0 is on another host.*--trusted-network"):
        prefill.transport.add_peer(elsewhere)
