"""The order in which writes end and connections are rebuilt, with NIXL's agent faked by the test."""

import time
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from kv_transfer import poll_backoff
from kv_transfer.base import PageRanges, PageWrite, WriteDone
from kv_transfer.layout import KVLayout
from kv_transfer.nixl_backend import posted_transfers as nixl_moves
from kv_transfer.nixl_backend import writes as nixl_writes
from kv_transfer.nixl_backend.agent import Connection, TransferState, range_indices
from kv_transfer.nixl_backend.peers import Links
from kv_transfer.nixl_backend.pending_write import PendingWrite
from kv_transfer.nixl_backend.writes import Writes
from kv_transfer.poll_backoff import FIRST_LOOK_S, LAST_LOOK_S
from tandem.protocol.conversion import encode_notice
from tandem.protocol.errors import TransferFailed
from tandem.protocol.messages import Lease, PeerDescription, PeerRef, TransferNotice

LAYOUT = KVLayout(4096, 8, 1, 1, 1, (2, 2), 4, "float32")
PEER = PeerRef("decode-0", 1)


class Agent:
    """A fake agent: states by handle, and every call in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.states: dict[int, TransferState] = {}
        self.unreachable = False

    def fail_if_dead(self, peer: PeerDescription, connection: Connection) -> bool:
        return False

    def connect(self, peer: PeerDescription, ranges: PageRanges = ()) -> Connection:
        if self.unreachable:
            raise RuntimeError("NIXL_ERR_BACKEND")
        self.calls.append("connect")
        return Connection(peer.peer.worker_id, object(), object())

    def disconnect(self, connection: Connection) -> None:
        self.calls.append("disconnect")

    def prepare(self, connection: Connection, write: PageWrite, notice: bytes) -> int:
        handle = len(self.states)
        self.states[handle] = TransferState.IN_PROGRESS
        return handle

    def start(self, handle: int) -> TransferState:
        return self.states[handle]

    state = start

    def release(self, handle: int) -> None:
        self.calls.append(f"release {handle}")

    def notify(self, connection: Connection, note: bytes) -> None:
        if self.unreachable:
            raise RuntimeError("NIXL_ERR_BACKEND")
        self.calls.append(f"notify {note!r}")


class Bench:
    def __init__(self) -> None:
        self.agent = Agent()
        agent: Any = self.agent
        self.links = Links(agent)
        self.received: list[tuple[str, TransferNotice]] = []
        self.writes = Writes(agent, self.links, LAYOUT, lambda sender, notice: self.received.append((sender, notice)))
        self.links.add(PeerDescription(PEER, b"", 0, LAYOUT.page_bytes, 8, 0, "DRAM"))

    def post(self) -> "Future[WriteDone]":
        now = time.monotonic()
        future: Future[WriteDone] = Future()
        self.writes.post(PendingWrite(PageWrite(PEER, [1], [2]), now, now + 60.0, future))
        return future


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_failed_write_rests_before_it_counts_as_quiet(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    future = bench.post()
    bench.agent.states[0] = TransferState.FAILED
    bench.writes.poll()
    now += nixl_moves.ERROR_REST_S - 0.01
    bench.writes.poll()
    assert not future.done()
    now += 0.02
    bench.writes.poll()
    with pytest.raises(TransferFailed, match="connection failed"):
        future.result(timeout=0)
    assert bench.agent.calls.count("release 0") == 1


def test_a_broken_connection_is_rebuilt_when_its_last_write_rests(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_moves, "ERROR_REST_S", 0.0)
    first, second = bench.post(), bench.post()
    bench.agent.states[0] = TransferState.FAILED
    bench.writes.poll()
    with pytest.raises(TransferFailed, match="has failed"):
        bench.post().result(timeout=0)
    bench.agent.states[1] = TransferState.FAILED
    bench.writes.poll()
    bench.writes.poll()
    assert first.done()
    assert second.done()
    assert bench.agent.calls == ["connect", "release 0", "release 1"]
    bench.post()
    assert bench.agent.calls[3:] == ["disconnect", "connect"]


def test_a_peer_out_of_reach_fails_the_write_and_is_tried_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_moves, "ERROR_REST_S", 0.0)
    bench.post()
    bench.agent.states[0] = TransferState.FAILED
    bench.writes.poll()
    bench.writes.poll()
    bench.agent.unreachable = True
    with pytest.raises(TransferFailed, match="no connection"):
        bench.post().result(timeout=0)
    bench.agent.unreachable = False
    after = bench.post()
    bench.agent.states[1] = TransferState.DONE
    bench.writes.poll()
    assert after.result(timeout=0).bytes == LAYOUT.page_bytes


@pytest.mark.parametrize("end", [TransferState.FAILED, TransferState.DONE])
def test_a_dropped_peer_s_writes_fail_when_they_are_quiet_and_nothing_is_freed_under_them(
    bench: Bench, end: TransferState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_moves, "ERROR_REST_S", 0.0)
    future = bench.post()
    link = bench.links.find(PEER)
    assert link is not None
    bench.writes.abandon(link, "the worker is gone")
    bench.links.drop(link)
    assert bench.links.find(PEER) is None
    bench.writes.poll()
    bench.links.sweep()
    assert not future.done()
    assert bench.writes.waited_for
    assert bench.agent.calls == ["connect"]
    bench.agent.states[0] = end
    for _ in range(2):
        bench.writes.poll()
        bench.links.sweep()
    assert bench.agent.calls == ["connect", "release 0", "disconnect"]
    with pytest.raises(TransferFailed, match="gone"):
        future.result(timeout=0)


def test_a_peer_that_is_back_is_connected_to_when_its_old_writes_rest(bench: Bench) -> None:
    old = bench.post()
    link = bench.links.find(PEER)
    assert link is not None
    bench.writes.abandon(link, "the worker is gone")
    bench.links.drop(link)
    bench.links.add(link.description)
    with pytest.raises(TransferFailed, match="before its return"):
        bench.post().result(timeout=0)
    bench.agent.states[0] = TransferState.DONE
    bench.writes.poll()
    bench.links.sweep()
    assert old.done()
    bench.post()
    assert bench.agent.calls == ["connect", "release 0", "disconnect", "connect"]


def test_a_write_that_may_not_begin_any_more_does_not(bench: Bench) -> None:
    now = time.monotonic()
    future: Future[WriteDone] = Future()
    bench.writes.post(PendingWrite(PageWrite(PEER, [1], [2], begin_by=lambda: now), now, now + 60.0, future))
    with pytest.raises(TransferFailed, match="had expired before it began"):
        future.result(timeout=0)
    assert not bench.agent.states


def test_looks_grow_rarer_and_come_close_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(poll_backoff.time, "monotonic", lambda: now)
    bench.post()
    now += 1.0
    assert bench.writes.next_look_s == LAST_LOOK_S
    bench.post()
    assert bench.writes.next_look_s == FIRST_LOOK_S


def test_a_link_is_found_by_the_end_of_its_run_or_of_a_later_one(bench: Bench) -> None:
    link = bench.links.find(PEER)
    assert link is not None
    later, earlier = PeerRef(PEER.worker_id, PEER.incarnation + 1), PeerRef(PEER.worker_id, PEER.incarnation - 1)
    assert bench.links.find_until(PEER) is bench.links.find_until(later) is link
    assert bench.links.find_until(earlier) is None
    assert bench.links.find_until(PeerRef("decode-1", 9)) is None
    assert bench.links.replaced_by(link.description) is None
    assert bench.links.replaced_by(replace(link.description, peer=later)) is link


def test_a_notice_is_announced_once_the_peer_was_reached(bench: Bench) -> None:
    bench.writes.announce(PEER)
    assert "notify" not in str(bench.agent.calls), "the first transfer builds the connection: nothing goes before it"
    bench.post()
    bench.agent.states[0] = TransferState.DONE
    bench.writes.poll()
    bench.writes.announce(PEER)
    assert bench.agent.calls[-1] == f"notify {nixl_writes.NOTICE_DUE!r}"
    bench.agent.unreachable = True
    bench.writes.announce(PEER)  # no harm: the write itself will fail


def test_an_announced_notice_is_due_until_it_arrives_or_for_a_while(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    notice = TransferNotice(Lease("q", 1, 5), PEER, b"", 1, 2, 3)
    assert not bench.writes.notice_due
    for sender in ("a/1", "b/1"):
        bench.writes.receive(sender, nixl_writes.NOTICE_DUE)
    assert bench.received == []
    bench.writes.receive("a/1", encode_notice(notice))
    assert bench.received == [("a/1", notice)]
    assert bench.writes.notice_due, "the other one's"
    now += nixl_writes.DUE_S
    assert not bench.writes.notice_due


def test_the_ranges_of_each_page_are_those_of_its_order() -> None:
    """Orders of 2, 0 and 3 ranges: a page has 5 in all, and none of a page of the second order is written."""
    assert range_indices([4, 0, 2], [2, 0, 1], (2, 0, 3)).tolist() == [22, 23, 24, 0, 1]
    assert range_indices([4, 0], (), (2, 0, 3)).tolist() == [20, 21, 0, 1]
    assert range_indices([7, 3], [5, 9], (1,)).tolist() == [7, 3], "whole pages have no orders"
