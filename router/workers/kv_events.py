"""Publishes which KV pages the cluster has cached, as vLLM's KV events over ZeroMQ, so that other routers can use them.

The unit is the cluster behind this router: a page is stored when the first worker caches it, and removed when no worker
has it any longer. Each batch is one message of three frames on a PUB socket: the topic, the batch's sequence number
from 0 (8 bytes, big-endian), and MessagePack of [seconds since 1970, events]. An event is an array that begins with its
name, with the fields in the order of vLLM's `kv_events.py`:

    BlockStored         block hashes, hash of the block before them (nil = they begin a prompt), token ids, tokens per
                        block, nil, medium, adapter (nil = the base model), extra keys of each block (nil = none)
    BlockRemoved        block hashes, medium
    AllBlocksCleared    sent once, when the router starts

A block is a KV page, its hash the page's digest (`tandem/protocol/page_digests.py`). The extra key of the first block
of a prompt is the request's `cache_salt`, preceded by the tenant if there are API keys: other tenants cannot use it.

A subscriber that misses a sequence number sends the first one that it needs (8 bytes) to the replay socket, and gets
the kept batches from there on, then the number -1. ZeroMQ comes with `pip install 'tandem-serving[kv-events]'`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from router.access.tenants import split_salt
from router.config import RouterConfig
from tandem.protocol.errors import FailedPrecondition
from tandem.protocol.page_digests import root_digest
from tandem.protocol.prefixes import PrefixRun
from tandem.version import install_command

if TYPE_CHECKING:
    import zmq
    import zmq.asyncio

log = logging.getLogger(__name__)

Event = tuple[Any, ...]
MEDIUM = "GPU"
"""vLLM's name of the pool from which steps read KV, on whatever device it is."""
KEPT_BATCHES = 10_000
"""Maximum number of batches kept for replay, and of batches that wait for a slow subscriber; vLLM's default."""
_END = (-1).to_bytes(8, "big", signed=True)


class KvEventLog:
    """Collects changes of the workers' cached pages, and turns them into events for the cluster as a whole.

    `PrefixFeed`s write to it on the event loop.
    """

    def __init__(self, held: Container[bytes], adapter_name: Callable[[str], str]) -> None:
        """`held` contains the digests that any worker has; `adapter_name` returns an adapter's name for its hash."""
        self._held = held
        self._adapter_name = adapter_name
        self._published: set[bytes] = set()
        self._stored: list[PrefixRun] = []
        self._removed: dict[bytes, None] = {}
        self.on_change: Callable[[], object] = lambda: None
        """Called when a change is added to an empty log."""

    def stored(self, runs: Iterable[PrefixRun]) -> None:
        """Add pages that a worker has cached; runs without tokens are ignored."""
        self._add()
        self._stored += [run for run in runs if run.token_ids]

    def removed(self, digests: Iterable[bytes]) -> None:
        """Add pages that a worker has no longer."""
        self._add()
        self._removed.update(dict.fromkeys(digests))

    def _add(self) -> None:
        if not self._stored and not self._removed:
            self.on_change()

    def take(self) -> list[Event]:
        """Return the events since the last call: removed pages first, then stored ones, each after its parent."""
        stored, self._stored = self._stored, []
        removed, self._removed = self._removed, {}
        gone = [digest for digest in removed if digest in self._published and digest not in self._held]
        self._published.difference_update(gone)
        events: list[Event] = [("BlockRemoved", gone, MEDIUM)] if gone else []
        for run in stored:
            for first, end in self._new(run):
                self._published.update(run.digests[first:end])
                events.append(self._event(run, first, end))
        return events

    def _new(self, run: PrefixRun) -> Iterator[tuple[int, int]]:
        """Yield the ranges of the run's pages that are cached and not yet published."""
        first = None
        for number, digest in enumerate((*run.digests, None)):
            new = digest is not None and digest in self._held and digest not in self._published
            if new and first is None:
                first = number
            elif not new and first is not None:
                yield first, number
                first = None

    def _event(self, run: PrefixRun, first: int, end: int) -> Event:
        size = len(run.token_ids) // len(run.digests)
        parent: bytes | None = run.digests[first - 1] if first else run.parent
        adapter, salt = split_salt(run.salt)
        extra_keys = None
        if parent == root_digest(run.salt):
            parent = None
            extra_keys = [(salt,), *[None] * (end - first - 1)] if salt else None
        tokens = run.token_ids[first * size : end * size]
        name = self._adapter_name(adapter) if adapter else None
        return "BlockStored", run.digests[first:end], parent, tokens, size, None, MEDIUM, name, extra_keys


class KvEventPublisher:
    """The ZeroMQ sockets of KV events. The `WorkerPool` owns it; all calls are on the event loop.

    No call waits for a subscriber: ZeroMQ drops the batches of one that is too slow, which can then request a replay.
    """

    def __init__(self, config: RouterConfig, events: KvEventLog) -> None:
        """Open the sockets. Raises FailedPrecondition if ZeroMQ is missing or an endpoint cannot be used."""
        check_libraries()
        import msgpack
        import zmq
        import zmq.asyncio

        self._events = events
        self._encode = msgpack.Packer().pack
        self._topic = (config.kv_events_topic or f"kv@{config.name}@{config.served.name}").encode()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT_BATCHES)
        self._sequence = 0
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._open(self._publisher, "kv_events_endpoint", config.kv_events_endpoint)
        self._replaying: asyncio.Task[None] | None = None
        self.replay_endpoint = ""
        """The address of the replay socket; "" = there is none."""
        if config.kv_events_replay_endpoint:
            router = zmq.asyncio.Context(self._context).socket(zmq.ROUTER)
            self._open(router, "kv_events_replay_endpoint", config.kv_events_replay_endpoint)
            self.replay_endpoint = _address_of(router)
            self._replaying = asyncio.create_task(self._replay_forever(router), name="kv-events-replay")
        self._publish([("AllBlocksCleared",)])
        events.on_change = lambda: asyncio.get_running_loop().call_soon(self.publish)

    @property
    def endpoint(self) -> str:
        """The address of the PUB socket, with the port that it has got."""
        return _address_of(self._publisher)

    def publish(self) -> None:
        """Publish the events since the last call as one batch, if there are any."""
        if events := self._events.take():
            self._publish(events)

    async def close(self) -> None:
        """Close the sockets."""
        self._events.on_change = lambda: None
        if self._replaying is not None:
            self._replaying.cancel()
            await asyncio.gather(self._replaying, return_exceptions=True)
        self._publisher.close(linger=0)
        self._context.term()

    def _open(self, socket: zmq.Socket[Any], name: str, endpoint: str) -> None:
        import zmq

        # A ROUTER socket drops what exceeds the limit; a replay must not lose its end.
        socket.set_hwm(0 if socket.type == zmq.ROUTER else KEPT_BATCHES)
        try:
            # vLLM's rule: an endpoint without wildcard is one to which the publisher connects.
            listens = "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")
            if listens or socket.type == zmq.ROUTER:
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            self._context.destroy(linger=0)
            raise FailedPrecondition(f"{name}: {endpoint!r} cannot be used: {error}; choose another one") from None

    def _publish(self, events: list[Event]) -> None:
        payload = self._encode((time.time(), events))
        self._publisher.send_multipart((self._topic, self._sequence.to_bytes(8, "big"), payload))
        self._kept.append((self._sequence, payload))
        self._sequence += 1

    async def _replay_forever(self, router: zmq.asyncio.Socket) -> None:
        try:
            while True:
                identity, *request = await router.recv_multipart()
                if len(request) != 2 or len(request[1]) != 8:
                    log.warning("a request for KV events is not an empty frame and a sequence number of 8 bytes")
                    continue
                first = int.from_bytes(request[1], "big")
                for sequence, payload in [batch for batch in self._kept if batch[0] >= first]:
                    await router.send_multipart((identity, b"", sequence.to_bytes(8, "big"), payload))
                await router.send_multipart((identity, b"", _END, b""))
        finally:
            router.close(linger=0)


def _address_of(socket: zmq.Socket[Any]) -> str:
    """Return the endpoint of a socket, with the port that it has got."""
    endpoint = socket.last_endpoint
    assert isinstance(endpoint, bytes)
    return endpoint.decode()


def check_libraries() -> None:
    """Raise FailedPrecondition if ZeroMQ or MessagePack is not installed."""
    try:
        import msgpack  # noqa: F401
        import zmq  # noqa: F401
    except ImportError as error:
        missing = f"--kv-events-endpoint needs ZeroMQ ({error.name} is not installed)"
        raise FailedPrecondition(f"{missing}; {install_command('kv-events')}") from None
