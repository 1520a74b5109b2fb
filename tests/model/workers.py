"""The processes of the model: real workers without a thread of their own, and the controller that knows of them."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode_worker.request import DecodeRequest
from kv_transfer.in_memory import InMemoryTransport
from kv_transfer.in_memory_fabric import InMemoryFabric
from tandem.cost_model.answer_length import SEEN_MIN
from tandem.engine.config import EngineConfig
from tandem.protocol import conversion
from tandem.protocol.generated.tandem.v1 import cluster_pb2
from tandem.protocol.kv_pages import held_pages
from tandem.protocol.messages import (
    ExpectedWorker,
    Lease,
    Membership,
    PeerRef,
    RequestRef,
    Role,
    RoutedEvent,
    WorkerInfo,
)
from tandem.worker.config import WorkerConfig
from tandem.worker.loop import StepLoop
from tandem.worker.servicer import WorkerServicer
from tandem.worker.worker import Worker
from tests.fake_engine import answer_to
from tests.model.checks import STEP_TOKENS, Broken, WatchedEngine
from tests.model.processes import Process, ProcessLoop

PAGES = 14
BATCH = 4
LEASE_S = QUARANTINE_S = 1.0
WINDOW_S = 3.0
SHORT_WINDOW_S = 0.6
"""A write window in seconds, so short that every kind of hand-over has to renew it."""
RPC_TIMEOUT_S = 1.0
TRANSFER_DEADLINE_S = 2.0
DRAFTS = 2
"""The number of draft tokens per request on one of the decode workers; some are wrong."""


def whole_answer(key: Hashable) -> Sequence[int]:
    """Return the prompt and the whole answer of a request."""
    assert isinstance(key, DecodeRequest)
    original_prompt = list(key.reservation.original_prompt)
    return [*original_prompt, *answer_to(original_prompt, key.reservation.sampling)]


def pool_pages() -> int:
    """Return the number of pages of a worker: `PAGES` for each group of layers."""
    return PAGES * len(WatchedEngine.windows)


class ManualStepLoop(StepLoop):
    """A step loop whose thread never starts; each call of `turn` runs one iteration."""

    def start(self) -> None:
        """Do nothing, because the test runs the steps."""

    def wake(self) -> None:
        """Do nothing, because `turn` looks for work itself."""

    def turn(self) -> bool:
        """Launch a step and process finished ones; return False if there was nothing to do."""
        return self._step()


class IdleThread:
    """Replaces the checksum thread and never runs; `sum_pages` runs its jobs."""

    def __init__(self, **_: object) -> None: ...

    def start(self) -> None: ...


@dataclass(frozen=True)
class Parts:
    """The parts that all workers of a world share.

    `asynchronous` = engines run one step behind. `window_s` is the length of a write window in seconds.
    """

    loop: ProcessLoop
    fabric: InMemoryFabric
    asynchronous: bool
    window_s: float


class WorkerProcess:
    """One incarnation of a worker."""

    def __init__(self, made_of: Parts, me: PeerRef, role: Role, address: str) -> None:
        self.me = me
        self.role = role
        self.address = address
        self.process = Process(f"{me.worker_id}/{me.incarnation}", made_of.loop)
        self.engine = WatchedEngine(pool_pages(), asynchronous=made_of.asynchronous)
        self._fabric = made_of.fabric
        self._window_s = made_of.window_s
        self._aborted: dict[str, int] = {}
        self.process.run(self._start)

    def _start(self) -> None:
        engine = EngineConfig.of(Path("fake"), max_step_tokens=STEP_TOKENS, max_batch_requests=BATCH)
        self.config = WorkerConfig(
            self.me.worker_id,
            self.role,
            engine,
            kv_lease_s=LEASE_S,
            quarantine_s=QUARANTINE_S,
            quarantine_far_s=QUARANTINE_S,
            write_window_s=self._window_s,
            kv_transfer_deadline_s=TRANSFER_DEADLINE_S,
            rpc_timeout_s=RPC_TIMEOUT_S,
            attach_grace_s=1.0,
            kv_checksum_rate=1.0,
        )
        layout = self.engine.layout
        self.worker = Worker(
            self.config,
            self.me,
            self.engine,
            layout,
            lambda notice: InMemoryTransport(self._fabric, layout, self.me, notice),
        )
        self._prolong = self.worker.admission.prolong
        self.worker.admission.prolong = self._watch_renewals  # type: ignore[method-assign]
        self._expect_short_answers()
        self._abort = self.worker.admission.abort
        self.worker.admission.abort = self._watch_abort  # type: ignore[method-assign]
        handoffs = self.worker._handoffs
        self._emit = handoffs.emit
        handoffs.emit = self._watch_transfers
        self._draft()
        self.servicer = WorkerServicer(self.worker, self.worker.drain)
        self.worker.start(self.address)

    def _draft(self) -> None:
        """Make decode-1 propose draft tokens in every step in which it may.

        The other decode worker runs plain steps.
        """
        speculation = self.worker._schedulers.decode.speculation
        assert speculation is not None
        speculation.fixed_drafts = DRAFTS if self.me.worker_id == "decode-1" else 0

    def _expect_short_answers(self) -> None:
        """Make the worker expect short answers.

        Most requests then grow beyond the forecast, and some are preempted.
        """
        for limit in (1, 2, 4, 8):
            for _ in range(SEEN_MIN):
                self.worker.admission._budget._lengths.learn(limit, 1)

    def _watch_transfers(self, routed: RoutedEvent) -> None:
        """Check that a hand-over has sent only pages that the next token can see, and only whole pages."""
        event, kv = routed.event, self.engine.kv_pages
        if (stats := event.transfer) is not None:
            if stats.bytes != stats.pages * self.engine.layout.page_bytes:
                raise Broken(f"{event.ref} was sent as {stats.bytes} bytes in {stats.pages} pages")
            for _, request in self.worker._schedulers.prefill.registry:
                most = kv.sent_pages(request.prompt_tokens)
                if request.task.ref == event.ref and stats.pages > most:
                    raise Broken(f"{event.ref} was sent as {stats.pages} pages, and the next token sees {most}")
        self._emit(routed)

    @property
    def loop(self) -> ManualStepLoop:
        loop = self.worker._loop
        assert isinstance(loop, ManualStepLoop)
        return loop

    def turn(self) -> bool:
        """Run one iteration of the engine's loop."""
        return self.process.run(self.loop.turn)

    def sum_pages(self) -> bool:
        """Run the next job of the checksum thread; return False if there is none."""
        work = self.worker._checks._work
        if work.empty() or (sums := work.get_nowait()) is None:
            return False
        self.process.run(sums)
        return True

    def info(self) -> WorkerInfo:
        assignment = self.worker.assignment
        return WorkerInfo(
            self.me, assignment.role, self.address, self.engine.facts, pool_pages(), self.engine.page_tokens,
            BATCH, STEP_TOKENS, "cpu", "in-memory", assignment=assignment.assignment, closing=assignment.closing,
        )  # fmt: skip

    def check(self) -> None:
        """Check that every page is in one state, reservations are consistent and no aborted request runs.

        No request may hold more pages than its forecast number of tokens needs.
        """
        self.worker._cache.check_integrity()
        self._check_forecasts()
        admission = self.worker.admission
        running = self.worker._schedulers.decode._batch.requests
        alive = [*admission.requests.ready, *(r for r in running if not (r.cancelled or r.ended))]
        for request in alive:
            ref = request.reservation.ref
            if ref.attempt <= self._aborted.get(ref.request_id, 0):
                raise Broken(f"{ref} decodes at {self.process.name} after it was aborted there")
        if self.worker.died.done():
            raise Broken(f"{self.process.name} died by itself: {self.worker.died.result()!r}")

    def _check_forecasts(self) -> None:
        kv, schedulers = self.engine.kv_pages, self.worker._schedulers
        for _, request in schedulers.prefill.registry:
            held, forecast = len(held_pages(request.pages)), kv.held(request.prompt_tokens)
            if not request.local and held > forecast:
                raise Broken(f"{request.task.ref} holds {held} pages of a forecast of {forecast}")
        for decoding in schedulers.decode._batch.requests:
            held, tokens = len(held_pages(decoding.pages)), kv.tokens_of(decoding.pages)
            forecast = kv.held(tokens, decoding=True)
            if held != decoding.held or held > forecast:
                raise Broken(f"{decoding.reservation.ref} holds {held} pages, counts {decoding.held} of {forecast}")

    def left(self) -> str:
        """Return the pages and requests that are still held; "" = none."""
        state = self.worker.report.inspect()
        held = state.pages_total - state.pages_free - state.pages_cached
        busy = held + state.pages_reserved + state.requests + state.leases
        committed = self.worker.admission._budget.committed
        return f"{state}, {committed} pages committed" if busy or committed else ""

    def _watch_renewals(self, leases: Iterable[Lease], prefill: PeerRef) -> tuple[Lease, ...]:
        named = list(leases)
        over = self._prolong(named, prefill)
        self.engine.seen["renewed"] += len(named) - len(over)
        self.engine.seen["not renewed"] += len(over)
        return over

    def _watch_abort(self, router_id: str, refs: Iterable[RequestRef]) -> None:
        refs = list(refs)
        for ref in refs:
            self._aborted[ref.request_id] = max(ref.attempt, self._aborted.get(ref.request_id, 0))
        self._abort(router_id, refs)


class Controller:
    """The controller, which publishes the membership. Its streams never break, but updates may be late."""

    ADDRESS = "controller"

    def __init__(self, loop: ProcessLoop, roles: Mapping[str, Role]) -> None:
        """Store the role of each worker, including dead ones, which are restarted."""
        self.process = Process("controller", loop)
        self._roles = roles
        self.members: dict[str, WorkerInfo] = {}
        self._revision = 0
        self._watchers: list[asyncio.Queue[Membership]] = []

    def admit(self, info: WorkerInfo) -> None:
        self.members[info.peer.worker_id] = info
        self._notify()

    def expel(self, peer: PeerRef) -> None:
        """Remove the worker from the membership, unless a later incarnation has replaced it."""
        known = self.members.get(peer.worker_id)
        if known is not None and known.peer == peer:
            del self.members[peer.worker_id]
            self._notify()

    async def Watch(self, _request: Any, _context: Any) -> AsyncIterator[cluster_pb2.Membership]:
        queue: asyncio.Queue[Membership] = asyncio.Queue()
        queue.put_nowait(self._membership())
        self._watchers.append(queue)
        while True:
            yield conversion.to_proto(await queue.get(), cluster_pb2.Membership)

    def _notify(self) -> None:
        self._revision += 1
        for queue in self._watchers:
            queue.put_nowait(self._membership())

    def _membership(self) -> Membership:
        expected = (ExpectedWorker(*item) for item in self._roles.items() if item[0] not in self.members)
        return Membership(self._revision, tuple(self.members.values()), expected=tuple(expected))


class Addresses:
    """Ports: each process gets a new one, or one that a dead process had."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._used: list[str] = []

    def take(self, *, again: Callable[[str], bool]) -> str:
        """Return the most recently used address that `again` accepts, or else a new one."""
        for address in reversed(self._used):
            if again(address):
                return address
        self._used.append(f"host:{next(self._numbers)}")
        return self._used[-1]
