"""KV events as a subscriber of vLLM's format gets them: what is cached in the cluster, its sequence, and replays."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from router.access.tenants import split_salt, tenant_of, tenant_salt
from router.config import RouterConfig
from router.placement.prefix_index import PrefixIndex
from router.workers.kv_events import KvEventLog, KvEventPublisher
from router.workers.prefix_feed import PrefixFeed
from tandem.protocol.errors import FailedPrecondition, InvalidArgument
from tandem.protocol.page_digests import page_digests, root_digest
from tandem.protocol.prefixes import PrefixChanges, PrefixList, PrefixRun
from tandem.settings.model import ModelSettings
from tests.unit.router.conftest import Cluster
from tests.worker_pair import until

PAGE = 4


class KvEvent(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """The base of the events in vLLM's subscriber."""


class BlockStored(KvEvent):
    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(KvEvent):
    block_hashes: list[bytes]
    medium: str | None


class AllBlocksCleared(KvEvent):
    pass


class KvEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


DECODER = msgspec.msgpack.Decoder(KvEventBatch)


def prompt(pages: int, first: int = 0) -> list[int]:
    return list(range(first, first + PAGE * pages))


def run(token_ids: Sequence[int], salt: str = "", parent: bytes = b"") -> PrefixRun:
    parent = parent or root_digest(salt)
    return PrefixRun(parent, tuple(page_digests(token_ids, PAGE, parent)), tuple(token_ids), salt)


class Subscriber:
    """Follows an endpoint, requests what it has missed, and keeps an index of the cached blocks."""

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.subscribe(b"kv@")
        self.socket.connect(endpoint)
        self.requests = self.context.socket(zmq.DEALER)
        self.requests.connect(replay_endpoint)
        self.tokens: dict[bytes, tuple[int, ...]] = {}
        self.parents: dict[bytes, bytes | None] = {}
        self.topics: set[bytes] = set()

    async def receive(self) -> int:
        topic, sequence, payload = await self.socket.recv_multipart()
        self.topics.add(topic)
        self.apply(payload)
        return int.from_bytes(sequence, "big")

    async def replay(self, first: int) -> list[int]:
        await self.requests.send_multipart((b"", first.to_bytes(8, "big")))
        sequences = []
        while True:
            _, sequence, payload = await self.requests.recv_multipart()
            number = int.from_bytes(sequence, "big", signed=True)
            if number == -1:
                return sequences
            sequences.append(number)
            self.apply(payload)

    def apply(self, payload: bytes) -> None:
        for event in DECODER.decode(payload).events:
            match event:
                case AllBlocksCleared():
                    self.tokens.clear()
                case BlockRemoved():
                    for block in event.block_hashes:
                        del self.tokens[block]
                case BlockStored():
                    assert len(event.token_ids) == event.block_size * len(event.block_hashes)
                    parent = event.parent_block_hash
                    for number, block in enumerate(event.block_hashes):
                        first = number * event.block_size
                        self.tokens[block] = tuple(event.token_ids[first : first + event.block_size])
                        self.parents[block], parent = parent, block

    def close(self) -> None:
        self.context.destroy(linger=0)


def make_log(slots: int = 1) -> tuple[KvEventLog, list[PrefixFeed]]:
    index = PrefixIndex()
    events = KvEventLog(index, {"hash": "sql"}.get)
    feeds = []
    for slot in range(slots):
        index.open(slot, 100)
        feeds.append(PrefixFeed(index, slot, events))
        feeds[-1].load(PrefixList(0))
    return events, feeds


# ---- the events of the cluster ----


def test_a_page_is_stored_with_the_first_worker_and_removed_with_the_last() -> None:
    events, (one, two) = make_log(2)
    both, first = run(prompt(3)), run(prompt(2))
    one.take(PrefixChanges(1, (first,)))
    assert events.take() == [("BlockStored", first.digests, None, first.token_ids, PAGE, None, "GPU", None, None)]
    two.take(PrefixChanges(1, (both,)))
    rest = (both.digests[2:], both.digests[1], both.token_ids[2 * PAGE :])
    assert events.take() == [("BlockStored", *rest, PAGE, None, "GPU", None, None)]
    one.take(PrefixChanges(2, removed=first.digests))
    assert events.take() == []
    two.lose()
    ((name, removed, medium),) = events.take()
    assert (name, set(removed), medium) == ("BlockRemoved", set(both.digests), "GPU")


def test_a_page_that_goes_and_comes_back_between_two_batches_is_no_event() -> None:
    events, (feed,) = make_log()
    pages = run(prompt(2))
    feed.take(PrefixChanges(1, (pages,)))
    events.take()
    feed.take(PrefixChanges(2, removed=pages.digests))
    feed.take(PrefixChanges(3, (pages,)))
    assert events.take() == []
    feed.take(PrefixChanges(4, (run(prompt(1, 50)),)))
    feed.take(PrefixChanges(5, removed=run(prompt(1, 50)).digests))
    assert events.take() == [], "it came and went"


def test_a_new_full_list_is_an_event_only_where_it_differs() -> None:
    events, (feed,) = make_log()
    pages = run(prompt(2))
    feed.take(PrefixChanges(1, (pages,)))
    events.take()
    feed.load(PrefixList(5, (run(prompt(1)), run(prompt(1, 50)))))
    removed, stored = events.take()
    assert removed == ("BlockRemoved", [pages.digests[1]], "GPU")
    assert stored[1:4] == (run(prompt(1, 50)).digests, None, tuple(prompt(1, 50)))


@pytest.mark.parametrize(
    ("tenant", "salt", "adapter", "name", "keys"),
    [
        ("", "", "", None, None),
        ("", "mine", "", None, [("mine",), None]),
        (tenant_of("key"), "", "", None, [(f"{tenant_of('key')}/",), None]),
        (tenant_of("key"), "a/b", "hash", "sql", [(f"{tenant_of('key')}/a/b",), None]),
        ("", "", "hash", "sql", None),
    ],
)
def test_events_name_the_adapter_and_what_else_requests_must_share(
    tenant: str, salt: str, adapter: str, name: str | None, keys: Any
) -> None:
    events, (feed,) = make_log()
    pages = run(prompt(2), tenant_salt(tenant, salt, adapter))
    feed.take(PrefixChanges(1, (pages,)))
    feed.take(PrefixChanges(2, (run(prompt(1, 90), pages.salt, pages.digests[-1]),)))
    first, later = events.take()
    assert (first[2], first[7:]) == (None, (name, keys))
    assert (later[2], later[7:]) == (pages.digests[-1], (name, None))


def test_a_salt_is_split_into_its_adapter_and_the_rest() -> None:
    for tenant in ("", tenant_of("one")):
        for salt in ("", "x", "/x", "adapter:y/z"):
            for adapter in ("", "0f"):
                rest = f"{tenant}/{salt}" if tenant else salt
                assert split_salt(tenant_salt(tenant, salt, adapter)) == (adapter, rest)


def test_workers_that_report_no_tokens_are_left_out() -> None:
    events, (feed,) = make_log()
    feed.take(PrefixChanges(1, (PrefixRun(root_digest(""), run(prompt(2)).digests),)))
    assert events.take() == []


# ---- over ZeroMQ ----


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"kv_events_endpoint": "tcp://127.0.0.1:*", "kv_events_replay_endpoint": "tcp://127.0.0.1:*"}


@pytest.fixture
async def subscriber(cluster: Cluster) -> AsyncIterator[Subscriber]:
    publisher = cluster.router._dispatcher.pool._publisher
    assert publisher is not None
    await until(lambda: all(link._prefixes.in_step for link in cluster.router._dispatcher.pool.links))
    subscriber = Subscriber(publisher.endpoint, publisher.replay_endpoint)
    yield subscriber
    subscriber.close()


async def test_a_subscriber_that_replays_knows_what_the_workers_have(cluster: Cluster, subscriber: Subscriber) -> None:
    pages, later = run(prompt(3)), run(prompt(2, 500))
    held = cluster.router._dispatcher.pool.fleet.prefixes
    cluster.prefill.report(stored=(pages,))
    await until(lambda: pages.digests[2] in held)
    first = await subscriber.replay(0)
    assert first == list(range(len(first)))
    cluster.prefill.report(stored=(later,), removed=pages.digests[2:])
    await until(lambda: later.digests[1] in held)
    assert await subscriber.replay(len(first)) == [len(first)]
    assert subscriber.tokens == dict(zip(pages.digests[:2], blocks(pages), strict=False)) | dict(
        zip(later.digests, blocks(later), strict=True)
    )
    assert subscriber.parents[pages.digests[1]] == pages.digests[0]
    assert subscriber.parents[later.digests[0]] is None


async def test_a_live_subscriber_gets_each_batch_once(cluster: Cluster, subscriber: Subscriber) -> None:
    # A SUB socket gets nothing before its subscription has arrived: report pages until one does.
    numbers = iter(range(1000, 100_000, 100))
    while not await subscriber.socket.poll(50):
        cluster.decode.report(stored=(run(prompt(1, next(numbers))),))
    first = await subscriber.receive()
    for number in range(first + 1, first + 4):
        cluster.decode.report(stored=(run(prompt(1, next(numbers))),))
        assert await subscriber.receive() == number
    assert subscriber.topics == {b"kv@router@fake"}


async def test_a_request_that_is_no_sequence_number_is_ignored(cluster: Cluster, subscriber: Subscriber) -> None:
    await subscriber.requests.send_multipart((b"", b"three"))
    await subscriber.requests.send_multipart((b"no empty frame",))
    assert await subscriber.replay(0)


async def test_a_taken_endpoint_is_an_error_that_names_the_setting(model: Path, cluster: Cluster) -> None:
    publisher = cluster.router._dispatcher.pool._publisher
    assert publisher is not None
    taken = f"tcp://*:{publisher.replay_endpoint.rpartition(':')[2]}"
    config = RouterConfig("router-1", ModelSettings(model, ("fake",)), "", kv_events_endpoint=taken)
    with pytest.raises(FailedPrecondition, match=r"kv_events_endpoint.*choose another"):
        KvEventPublisher(config, KvEventLog(PrefixIndex(), str))


@pytest.mark.parametrize("endpoint", ["5557", "tcp://*", "http://a:1", "tcp://a:b", "ipc://"])
def test_malformed_endpoints_are_rejected(model: Path, endpoint: str) -> None:
    with pytest.raises(InvalidArgument, match=r"kv_events_endpoint.*must be tcp://"):
        RouterConfig("router-1", ModelSettings(model, ("fake",)), "", kv_events_endpoint=endpoint)


def blocks(pages: PrefixRun) -> list[tuple[int, ...]]:
    return [pages.token_ids[first : first + PAGE] for first in range(0, len(pages.token_ids), PAGE)]
