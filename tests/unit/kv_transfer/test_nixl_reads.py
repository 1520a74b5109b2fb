"""What sender and receiver agree on where the receiver reads, with NIXL's agents and the network played by the test."""

import random
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from kv_transfer import nixl_fetches, nixl_moves, nixl_orders
from kv_transfer.base import PageWrite, WriteDone
from kv_transfer.layout import KVLayout
from kv_transfer.listening import OLD_S
from kv_transfer.nixl_agent import Connection, TransferState, agent_name
from kv_transfer.nixl_mover import Flight
from kv_transfer.nixl_orders import SAY_AGAIN_S
from kv_transfer.nixl_peers import Link, Links
from kv_transfer.nixl_reads import Reads
from wire.convert import decode_read_note, encode_read_note
from wire.errors import TransferFailed
from wire.messages import Lease, PeerDescription, PeerRef, TransferNotice
from wire.read_notes import ReadAnswer, ReadCancel, ReadEnd, ReadNote, ReadOrder

LAYOUT = KVLayout(4096, 8, 1, 1, 1, 2, 4, "float32")
PREFILL, DECODE = PeerRef("prefill-0", 3), PeerRef("decode-0", 5)
DEADLINE_S = 10.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Agent:
    """Reads end when the test says so; what is sent waits in `sent`."""

    def __init__(self, me: PeerRef) -> None:
        self.me = me
        self.sent: list[bytes] = []
        self.reads: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.states: dict[int, TransferState] = {}
        self.connects = 0
        self.at_once = False
        self.mute = self.unreachable = False

    def connect(self, peer: PeerDescription) -> Connection:
        if self.unreachable:
            raise RuntimeError("NIXL_ERR_BACKEND")
        self.connects += 1
        return Connection(agent_name(peer.peer), object())

    def disconnect(self, connection: Connection) -> None: ...

    def prepare(self, connection: Connection, local: Sequence[int], remote: Sequence[int], notice: bytes) -> int:
        assert notice == b""
        self.reads.append((tuple(local), tuple(remote)))
        handle = len(self.states)
        self.states[handle] = TransferState.DONE if self.at_once else TransferState.MOVING
        return handle

    def start(self, handle: int) -> TransferState:
        return self.states[handle]

    state = start

    def release(self, handle: int) -> None: ...

    def notify(self, connection: Connection, data: bytes) -> None:
        if self.mute:
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        self.sent.append(data)


class End:
    """One worker's mover, and who it knows."""

    def __init__(self, me: PeerRef, other: PeerRef) -> None:
        self.agent = Agent(me)
        agent: Any = self.agent
        self.links = Links(agent)
        self.heard: list[TransferNotice] = []
        self.said_before: list[int] = []
        """How many notes had been sent when each notice was delivered."""
        self.reads = Reads(agent, self.links, LAYOUT, self._deliver)
        self.links.add(PeerDescription(other, b"", 0, LAYOUT.page_bytes, 8, 0, "DRAM"))
        self.other = other

    def _deliver(self, sender: str, notice: TransferNotice) -> None:
        assert sender == agent_name(self.other)
        self.heard.append(notice)
        self.said_before.append(len(self.agent.sent))

    @property
    def link(self) -> Link:
        link = self.links.find(self.other)
        assert link is not None
        return link

    def hears(self, *notes: bytes, after_s: float = 0.0) -> None:
        """In one look, the one before which was so long ago."""
        for note in notes:
            self.reads.hear(agent_name(self.other), note)
        self.reads.act(time.monotonic() - after_s)

    def says(self) -> list[bytes]:
        sent, self.agent.sent = self.agent.sent, []
        return sent


class Bench:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.sender, self.receiver = End(PREFILL, DECODE), End(DECODE, PREFILL)
        self.posted = 0

    def post(self, *, notice: bool = True) -> "Future[WriteDone]":
        self.posted += 1
        future: Future[WriteDone] = Future()
        page = self.posted % 8
        told = TransferNotice(Lease("r", 1, self.posted), PREFILL, b"", 1, 0, 0) if notice else None
        write = PageWrite(DECODE, [page], [7 - page], told)
        self.sender.reads.post(Flight(write, self.clock.now, self.clock.now + DEADLINE_S, future))
        return future

    def land(self, state: TransferState = TransferState.DONE) -> None:
        """Everything that moves comes to rest."""
        for handle in self.receiver.agent.states:
            self.receiver.agent.states[handle] = state
        self.receiver.reads.poll()

    def after(self, seconds: float) -> list[ReadNote]:
        """What the sender has to say so much later."""
        self.clock.now += seconds
        self.sender.reads.poll()
        return [decode_read_note(note) for note in self.sender.agent.sent]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return Bench(clock)


def epochs(end: End) -> list[int]:
    return [notice.lease.epoch for notice in end.heard]


def test_the_notice_and_the_answer_come_when_every_byte_is_there(bench: Bench) -> None:
    future = bench.post()
    bench.receiver.hears(*bench.sender.says())
    assert bench.receiver.agent.reads == [((6,), (1,))]
    bench.receiver.reads.poll()
    assert bench.receiver.heard == []
    assert bench.receiver.says() == []
    bench.land()
    assert epochs(bench.receiver) == [1]
    assert bench.receiver.said_before == [0]
    assert not future.done()
    bench.sender.hears(*bench.receiver.says())
    assert future.result(timeout=0).bytes == LAYOUT.page_bytes
    assert not bench.sender.reads.unfinished
    assert not bench.receiver.reads.unfinished


def test_an_order_counts_once_however_often_it_comes(bench: Bench) -> None:
    future = bench.post()
    (order,) = bench.sender.says()
    bench.receiver.hears(order, order)
    bench.land()
    bench.receiver.hears(order)
    answers = bench.receiver.says()
    assert len(answers) == 2
    assert len(bench.receiver.agent.reads) == len(bench.receiver.heard) == 1
    bench.sender.hears(*answers)
    assert future.done()


@pytest.mark.parametrize("lost", ["order", "answer"])
def test_a_lost_note_costs_time_and_nothing_else(bench: Bench, lost: str) -> None:
    future = bench.post()
    notes = bench.sender.says()
    if lost == "answer":
        bench.receiver.hears(*notes)
        bench.land()
        bench.receiver.says()
    assert bench.after(SAY_AGAIN_S / 2) == []
    bench.after(SAY_AGAIN_S / 2)
    bench.receiver.hears(*bench.sender.says())
    bench.land()
    bench.sender.hears(*bench.receiver.says())
    assert future.result(timeout=0)
    assert epochs(bench.receiver) == [1]
    assert len(bench.receiver.agent.reads) == 1


def test_what_was_never_begun_is_cancelled_and_its_late_order_dropped(bench: Bench) -> None:
    future = bench.post()
    late = bench.sender.says()
    assert [type(note) for note in bench.after(DEADLINE_S)] == [ReadCancel]
    assert not future.done()
    bench.receiver.hears(*bench.sender.says(), *late)
    assert bench.receiver.agent.reads == []
    bench.sender.hears(*bench.receiver.says())
    with pytest.raises(TransferFailed, match="never began"):
        future.result(timeout=0)


@pytest.mark.parametrize("notice", [True, False])
def test_past_its_deadline_a_read_ends_when_it_is_at_rest(bench: Bench, *, notice: bool) -> None:
    future = bench.post(notice=notice)
    bench.receiver.hears(*bench.sender.says())
    bench.after(DEADLINE_S)
    bench.receiver.hears(*bench.sender.says())
    assert bench.receiver.says() == []
    bench.land()
    assert bench.receiver.heard == []
    assert not future.done()
    bench.sender.hears(*bench.receiver.says())
    with pytest.raises(TransferFailed, match="after its deadline"):
        future.result(timeout=0)


@pytest.mark.parametrize("notice", [True, False])
def test_a_cancel_that_comes_too_late_hears_how_it_ended(bench: Bench, *, notice: bool) -> None:
    future = bench.post(notice=notice)
    bench.receiver.hears(*bench.sender.says())
    bench.land()
    bench.receiver.says()
    bench.after(DEADLINE_S)
    bench.receiver.hears(*bench.sender.says())
    bench.sender.hears(*bench.receiver.says())
    if notice:
        assert epochs(bench.receiver) == [1]
        assert future.result(timeout=0)
    else:
        assert isinstance(future.exception(timeout=0), TransferFailed)


def test_once_cancelled_an_order_is_never_said_again(bench: Bench) -> None:
    bench.post()
    bench.sender.says()
    for _ in range(3):
        assert {type(note) for note in bench.after(DEADLINE_S)} == {ReadCancel}


def test_what_is_over_for_the_sender_is_forgotten_and_fenced(bench: Bench) -> None:
    bench.post()
    (first,) = bench.sender.says()
    bench.receiver.hears(first)
    bench.land()
    bench.sender.hears(*bench.receiver.says())
    bench.post()
    bench.receiver.hears(*bench.sender.says())
    fetches = bench.receiver.reads._fetches
    assert list(fetches._ledgers[bench.receiver.link].transfers) == [2]
    bench.receiver.hears(first)
    assert fetches.dropped == 1
    assert len(bench.receiver.agent.reads) == 2
    assert bench.receiver.says() == []


def test_a_silent_receiver_keeps_nothing_open_at_another(bench: Bench) -> None:
    silent = PeerRef("decode-1", 1)
    bench.sender.links.add(PeerDescription(silent, b"", 0, LAYOUT.page_bytes, 8, 0, "DRAM"))
    unanswered: Future[WriteDone] = Future()
    write = PageWrite(silent, [1], [2])
    bench.sender.reads.post(Flight(write, bench.clock.now, bench.clock.now + DEADLINE_S, unanswered))
    bench.sender.says()
    bench.receiver.agent.at_once = True
    for _ in range(30):
        future = bench.post()
        bench.receiver.hears(*bench.sender.says())
        bench.sender.hears(*bench.receiver.says())
        assert future.done()
    assert len(bench.receiver.reads._fetches._ledgers[bench.receiver.link].transfers) == 1
    assert not unanswered.done()
    again = [note for note in bench.after(SAY_AGAIN_S) if isinstance(note, ReadOrder)]
    assert [(note.number, note.oldest) for note in again] == [(1, 1)]


def test_a_sender_has_room_for_so_many_transfers_and_takes_none_of_another_s(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_fetches, "MOST_TRANSFERS", 3)
    other = PeerRef("prefill-1", 1)
    bench.receiver.links.add(PeerDescription(other, b"", 0, LAYOUT.page_bytes, 8, 0, "DRAM"))
    futures = [bench.post() for _ in range(5)]
    first, *others = bench.sender.says()
    bench.receiver.hears(*others)
    assert len(bench.receiver.agent.reads) == 3, "of five, two find no room: one is lost, one comes too early"
    order = ReadOrder(1, 1, DECODE.incarnation, (1,), (6,))
    bench.receiver.reads.hear(agent_name(other), encode_read_note(order))
    bench.receiver.reads.act(bench.clock.now)
    assert len(bench.receiver.agent.reads) == 4
    bench.land()
    bench.sender.hears(*bench.receiver.says())
    assert [future.done() for future in futures] == [False, True, True, True, False]
    bench.receiver.hears(first)
    bench.land()
    bench.sender.hears(*bench.receiver.says())
    assert futures[0].done(), "the oldest finds room"
    assert bench.receiver.reads._fetches.dropped == 1
    bench.after(SAY_AGAIN_S)
    bench.receiver.hears(*bench.sender.says())
    bench.land()
    bench.sender.hears(*bench.receiver.says())
    assert futures[4].done()
    assert epochs(bench.receiver) == [2, 3, 4, 1, 5]


@pytest.mark.parametrize("seed", range(3))
def test_little_room_costs_time_and_nothing_else(bench: Bench, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(nixl_fetches, "MOST_TRANSFERS", 2)
    storm = Storm(bench, seed)
    for _ in range(30):
        future = bench.post()
        storm.futures[bench.posted] = future
        storm.step(calm=False)
        ledgers = bench.receiver.reads._fetches._ledgers.values()
        assert all(len(ledger.transfers) <= 3 for ledger in ledgers)
    for _ in range(200):
        storm.step(calm=True)
    assert all(future.done() for future in storm.futures.values())
    assert bench.receiver.reads._fetches.dropped


def test_a_read_that_moves_delivers_nothing_once_its_number_is_over(bench: Bench) -> None:
    bench.post()
    bench.receiver.hears(*bench.sender.says(), encode_read_note(ReadOrder(9, 9, DECODE.incarnation, (), ())))
    bench.land()
    assert bench.receiver.heard == []
    assert list(bench.receiver.reads._fetches._ledgers[bench.receiver.link].transfers) == [9]


def test_a_failed_read_rests_and_its_answer_takes_a_new_connection(bench: Bench) -> None:
    future = bench.post()
    bench.receiver.hears(*bench.sender.says())
    bench.land(TransferState.FAILED)
    assert bench.receiver.says() == []
    bench.clock.now += nixl_moves.ERROR_REST_S
    bench.receiver.reads.poll()
    assert bench.receiver.agent.connects == 2
    bench.sender.hears(*bench.receiver.says())
    with pytest.raises(TransferFailed, match="connection failed"):
        future.result(timeout=0)
    assert bench.receiver.heard == []


def remove_receiver(bench: Bench) -> None:
    kept = bench.sender.link
    bench.sender.reads.abandon(kept, "the worker is gone")
    bench.sender.links.drop(kept)


def test_a_removed_receiver_may_read_for_a_while_and_hears_that_nobody_waits(bench: Bench) -> None:
    future = bench.post()
    bench.sender.says()
    remove_receiver(bench)
    assert [type(decode_read_note(note)) for note in bench.sender.says()] == [ReadCancel]
    bench.clock.now += nixl_orders.REMOVED_REST_S - 0.01
    bench.sender.reads.poll()
    assert not future.done()
    bench.clock.now += 0.01
    bench.sender.reads.poll()
    with pytest.raises(TransferFailed, match="gone"):
        future.result(timeout=0)
    assert bench.sender.says() == []
    assert not bench.sender.reads.unfinished


def test_a_receiver_that_stood_still_begins_nothing_that_may_be_as_old(bench: Bench) -> None:
    """Over cma and CUDA IPC the copy may be over when `start` returns, and the pages another prompt's by now."""
    bench.receiver.agent.at_once = True
    future = bench.post()
    orders = bench.sender.says()
    remove_receiver(bench)
    bench.sender.says()  # the cancel is lost with the connection
    bench.clock.now += nixl_orders.REMOVED_REST_S + 0.1
    bench.sender.reads.poll()
    assert isinstance(future.exception(timeout=0), TransferFailed), "its pages are free"
    bench.receiver.hears(*orders, after_s=nixl_orders.REMOVED_REST_S + 0.1)
    assert (bench.receiver.agent.reads, bench.receiver.heard) == ([], [])


@pytest.mark.parametrize(("pause_s", "begun"), [(OLD_S - 0.1, True), (OLD_S + 0.1, False)])
def test_an_order_that_may_be_old_fails_at_its_sender_s_in_words(bench: Bench, pause_s: float, begun: bool) -> None:
    assert nixl_orders.REMOVED_REST_S / 3 >= OLD_S
    bench.receiver.agent.at_once = True
    future = bench.post()
    bench.receiver.hears(*bench.sender.says(), after_s=pause_s)
    bench.sender.hears(*bench.receiver.says())
    if begun:
        assert future.result(timeout=0)
    else:
        with pytest.raises(TransferFailed, match="heard of it too late"):
            future.result(timeout=0)
    again = bench.post()
    bench.receiver.hears(*bench.sender.says())
    bench.sender.hears(*bench.receiver.says())
    assert again.result(timeout=0)


def test_a_cancel_that_is_heard_with_its_order_wins(bench: Bench) -> None:
    bench.receiver.agent.at_once = True
    future = bench.post()
    notes = bench.sender.says()
    bench.after(DEADLINE_S)
    bench.receiver.hears(*notes, *bench.sender.says())
    assert (bench.receiver.agent.reads, bench.receiver.heard) == ([], [])
    bench.sender.hears(*bench.receiver.says())
    with pytest.raises(TransferFailed, match="never began"):
        future.result(timeout=0)


def test_an_order_of_a_sender_that_is_gone_before_it_begins_is_dropped(bench: Bench) -> None:
    bench.post()
    receiver = bench.receiver
    for note in bench.sender.says():
        receiver.reads.hear(agent_name(PREFILL), note)
    receiver.reads.abandon(receiver.link, "the worker is gone")
    receiver.reads.act(bench.clock.now)
    assert (receiver.agent.reads, receiver.says()) == ([], [])


def test_the_answer_of_a_removed_receiver_ends_the_wait(bench: Bench) -> None:
    future = bench.post()
    bench.receiver.hears(*bench.sender.says())
    remove_receiver(bench)
    bench.land()
    said = bench.receiver.says()
    for note in said:
        bench.sender.reads.hear("decode-0/99", note)
    assert not future.done()
    bench.sender.hears(*said)
    with pytest.raises(TransferFailed, match="gone"):
        future.result(timeout=0)
    assert not bench.sender.reads.unfinished


def test_an_end_does_not_wait_for_removed_receivers(bench: Bench) -> None:
    future = bench.post()
    remove_receiver(bench)
    bench.sender.reads.leave()
    assert future.done()
    assert not bench.sender.reads.unfinished


def test_an_order_is_not_said_again_when_it_may_not_begin(bench: Bench) -> None:
    future: Future[WriteDone] = Future()
    begin_by = bench.clock.now + 0.5
    write = PageWrite(DECODE, [1], [2], begin_by=lambda: begin_by)
    bench.sender.reads.post(Flight(write, bench.clock.now, bench.clock.now + 60.0, future))
    bench.sender.says()
    bench.clock.now += nixl_orders.SAY_AGAIN_S
    bench.sender.reads.poll()
    assert [type(decode_read_note(note)) for note in bench.sender.says()] == [ReadCancel]


def test_nothing_of_a_sender_that_is_gone_is_delivered_or_answered(bench: Bench) -> None:
    bench.post()
    bench.receiver.hears(*bench.sender.says())
    gone = bench.receiver.link
    bench.receiver.reads.abandon(gone, "the worker is gone")
    bench.receiver.links.drop(gone)
    assert not bench.receiver.reads.waited_for
    assert bench.receiver.reads.handles
    bench.land()
    assert (bench.receiver.heard, bench.receiver.says(), bench.receiver.reads.handles) == ([], [], [])
    assert bench.receiver.reads._fetches._ledgers == {}


def test_notes_for_other_runs_and_of_strangers_are_dropped(bench: Bench) -> None:
    future = bench.post()
    bench.sender.says()
    pages = ((1,), (6,))
    bench.receiver.hears(encode_read_note(ReadOrder(1, 1, DECODE.incarnation - 1, *pages)))
    bench.receiver.reads.hear("prefill-0/2", encode_read_note(ReadOrder(1, 1, DECODE.incarnation, *pages)))
    assert bench.receiver.agent.reads == []
    landed = encode_read_note(ReadAnswer(1, PREFILL.incarnation, ReadEnd.LANDED))
    bench.sender.hears(encode_read_note(ReadAnswer(1, PREFILL.incarnation - 1, ReadEnd.LANDED)))
    bench.sender.reads.hear("decode-0/4", landed)
    assert not future.done()
    with pytest.raises(DecodeError):
        bench.sender.hears(b"\xff nonsense")
    bench.sender.hears(landed)
    assert future.done()


def test_another_peer_cannot_answer(bench: Bench) -> None:
    future, other = bench.post(), PeerRef("decode-1", 1)
    bench.sender.links.add(PeerDescription(other, b"", 0, LAYOUT.page_bytes, 8, 0, "DRAM"))
    landed = encode_read_note(ReadAnswer(1, PREFILL.incarnation, ReadEnd.LANDED))
    bench.sender.reads.hear(agent_name(other), landed)
    assert not future.done()


@pytest.mark.parametrize("pages", [((1,), (8,)), ((8,), (1,)), ((1, 2), (1,))])
def test_pages_that_are_not_there_are_not_read(bench: Bench, pages: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    bench.receiver.hears(encode_read_note(ReadOrder(1, 1, DECODE.incarnation, *pages)))
    (answer,) = bench.receiver.says()
    assert decode_read_note(answer) == ReadAnswer(1, PREFILL.incarnation, ReadEnd.NOT_BEGUN)
    assert bench.receiver.agent.reads == []


def test_a_worker_that_leaves_begins_nothing_and_calls_back_what_it_asked(bench: Bench) -> None:
    future = bench.post()
    orders = bench.sender.says()
    bench.receiver.reads.leave()
    bench.receiver.hears(*orders)
    (answer,) = bench.receiver.says()
    assert bench.receiver.agent.reads == []
    bench.sender.reads.leave()
    assert [type(decode_read_note(note)) for note in bench.sender.says()] == [ReadCancel]
    bench.sender.hears(answer)
    assert isinstance(future.exception(timeout=0), TransferFailed)


def test_a_peer_out_of_reach_fails_the_write_at_once_and_later_keeps_it_open(bench: Bench) -> None:
    bench.sender.agent.mute = True
    with pytest.raises(TransferFailed, match="cannot be told"):
        bench.post().result(timeout=0)
    bench.sender.agent.mute = False
    future = bench.post()
    bench.sender.says()
    bench.sender.agent.mute = True
    assert bench.after(DEADLINE_S) == []
    bench.sender.agent.unreachable = True
    assert bench.after(SAY_AGAIN_S) == []
    assert not future.done()
    bench.sender.agent.mute = bench.sender.agent.unreachable = False
    assert [type(note) for note in bench.after(SAY_AGAIN_S)] == [ReadCancel]
    assert bench.sender.agent.connects == 3


class Storm:
    """A network that loses, doubles, delays and reorders notes, above reads that end late, or with their connection."""

    def __init__(self, bench: Bench, seed: int) -> None:
        self._bench = bench
        self._chance = random.Random(seed)
        self._on_the_way: list[tuple[End, bytes]] = []
        self.futures: dict[int, Future[WriteDone]] = {}
        self._told: set[int] = set()

    def step(self, *, calm: bool) -> None:
        bench, chance = self._bench, self._chance
        for end, other in ((bench.sender, bench.receiver), (bench.receiver, bench.sender)):
            for note in end.says():
                self._on_the_way += [(other, note)] * (1 if calm else chance.choice((0, 1, 1, 2)))
        chance.shuffle(self._on_the_way)
        self.deliver(chance.randrange(len(self._on_the_way) + 1))
        states = bench.receiver.agent.states
        for handle, state in states.items():
            if state is TransferState.MOVING and chance.random() < 0.3:
                states[handle] = TransferState.DONE if calm or chance.random() < 0.9 else TransferState.FAILED
        bench.clock.now += chance.random()
        bench.sender.reads.poll()
        bench.receiver.reads.poll()
        self._compare()

    def deliver(self, notes: int) -> None:
        for _ in range(notes):
            end, note = self._on_the_way.pop()
            end.hears(note)

    def deliver_all(self) -> None:
        self.deliver(len(self._on_the_way))

    def _compare(self) -> None:
        """A write that has ended well is delivered by then; one that has failed is not."""
        for epoch in [epoch for epoch, future in self.futures.items() if future.done()]:
            if epoch not in self._told:
                self._told.add(epoch)
                assert (epoch in epochs(self._bench.receiver)) is (self.futures[epoch].exception() is None)


@pytest.mark.parametrize("seed", range(20))
def test_both_ends_agree_whatever_the_network_does(bench: Bench, seed: int) -> None:
    storm, writes = Storm(bench, seed), 60
    for _ in range(writes):
        future = bench.post()
        storm.futures[bench.posted] = future
        storm.step(calm=False)
    for _ in range(50):
        storm.step(calm=False)
    for _ in range(40):
        storm.step(calm=True)
    assert all(future.done() for future in storm.futures.values())
    storm.deliver_all()
    heard = epochs(bench.receiver)
    assert len(heard) == len(set(heard))
    assert set(heard) == {epoch for epoch, future in storm.futures.items() if future.exception() is None}
    assert 0 < len(heard) < writes
    assert len(bench.receiver.agent.reads) <= writes
