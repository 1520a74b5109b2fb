"""Replaces the product's threads, clocks, sockets and random numbers by those of a world."""

import itertools
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import NoReturn

import pytest

import kv_transfer.checksums
import kv_transfer.in_memory_fabric
import prefill_worker.write_window
import router.requests.dispatch
import router.requests.live_requests
import router.requests.request
import router.requests.stream
import router.workers.lease_keeper
import router.workers.worker_link
import router.workers.worker_pool
import tandem.net.rpc
import tandem.protocol.lifecycle.events
import tandem.worker.loop
import tandem.worker.peers.peers
import tandem.worker.worker
from benchmarks.speculation.oracle import OracleProposer
from tandem.protocol.messages import PeerRef
from tandem.worker.loop import StepMeter
from tests.model.calls import Channel
from tests.model.network import Network
from tests.model.processes import this_process
from tests.model.router import CountedAnswer, InlineText
from tests.model.workers import IdleThread, ManualStepLoop, whole_answer

_TIMED = (
    router.requests.dispatch,
    router.requests.request,
    router.requests.stream,
    router.workers.lease_keeper,
    router.workers.worker_link,
    tandem.worker.loop,
    tandem.worker.worker,
    prefill_worker.write_window,
    kv_transfer.in_memory_fabric,
    tandem.protocol.lifecycle.events,
)
"""The modules whose behaviour depends on `time`."""


def patch_product(network: Network, process_alive: Callable[[PeerRef], bool | None]) -> pytest.MonkeyPatch:
    """Patch the product to use the network's clock and channels, and return the patches for undoing.

    `process_alive` tells a worker whether the process of a peer is alive; None = the worker cannot know.
    """
    patches, now = pytest.MonkeyPatch(), network.loop.time
    clock = SimpleNamespace(monotonic=now, time_ns=lambda: int(now() * 1e9), sleep=_no_sleep)
    for module in _TIMED:
        patches.setattr(module, "time", clock)
    # Placement depends on the measured costs of steps and transfers, so the meter must use the virtual clock.
    patches.setattr(tandem.worker.worker, "StepMeter", partial(StepMeter, clock=now))
    numbers = itertools.count(1)
    uuid = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=f"{next(numbers):012d}"))
    patches.setattr(router.requests.live_requests, "uuid", uuid)
    patches.setattr(router.requests.live_requests, "Answer", CountedAnswer)
    patches.setattr(router.requests.stream, "TextThread", InlineText)
    patches.setattr(tandem.worker.worker, "StepLoop", ManualStepLoop)
    patches.setattr(tandem.worker.worker, "make_proposer", lambda *_, **__: OracleProposer(whole_answer, 0.7))
    patches.setattr(kv_transfer.checksums, "threading", SimpleNamespace(Thread=IdleThread, Lock=threading.Lock))

    def open_channel(address: str, _token: str = "") -> Channel:
        return Channel(network, this_process(), address)

    for module in (router.workers.worker_link, router.workers.worker_pool, tandem.net.rpc):
        patches.setattr(module, "open_channel", open_channel)
    patches.setattr(tandem.worker.peers.peers.SameHostPeers, "process_alive", lambda _, peer: process_alive(peer))
    return patches


def _no_sleep(_seconds: float) -> NoReturn:
    raise AssertionError("nothing sleeps here")
