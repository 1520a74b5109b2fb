"""A worker: one engine, its two halves, the step loop between them and the way out, tied together.

Everything a router or another worker can ask of this process is a method here; the servicer only translates. Lives on
the event loop that runs while it is made; the engine has its own thread, the transfer another.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from decode_worker.admission import DecodeAdmission
from decode_worker.config import DecodeConfig
from decode_worker.half import DecodeHalf
from engine.cache.prefix_cache import PrefixCache
from kv_transfer.base import NoticeHandler, Transport
from kv_transfer.checksums import PageChecks
from kv_transfer.handshake import make_handshake
from kv_transfer.layout import KVLayout
from prefill_worker.config import PrefillConfig
from prefill_worker.half import PrefillHalf
from wire.ending import failure_event, pages_for
from wire.errors import Internal, ResourceExhausted, StaleEpoch, Unavailable
from wire.messages import (
    Duty,
    GrantedLease,
    PeerRef,
    PrefillTask,
    RequestEvent,
    RequestRef,
    Reservation,
    RoutedEvent,
    WorkerInfo,
    WorkerInspection,
    WorkerLoad,
)
from wire.prefixes import PrefixList
from worker.batch_growth import BatchGrowth
from worker.caretaker import Caretaker
from worker.config import WorkerConfig
from worker.duty import WorkerDuty, decode_batch, decode_pages
from worker.halves import Halves
from worker.handovers import Handovers
from worker.loaded_engine import LoadedEngine, engine_facts
from worker.loop import StepLoop
from worker.metrics import Utilization, WorkerMetrics
from worker.outbox import Outbox, RouterStream
from worker.peers import Peers
from worker.report import WorkerReport
from worker.step_meter import StepMeter
from worker.step_policy import StepPolicy, make_policy
from worker.validation import check_prefill, check_reservation
from worker.warm_ups import WarmUps

log = logging.getLogger(__name__)

DIES = "has lost its engine"


class Worker:
    """Owns both halves, the loop and the outbox; `close` ends them. Engine and transport are used, not owned."""

    def __init__(
        self,
        config: WorkerConfig,
        me: PeerRef,
        engine: LoadedEngine,
        layout: KVLayout,
        open_transport: Callable[[NoticeHandler], Transport],
    ) -> None:
        self.me = me
        self.facts = engine.facts
        self.died: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        """Set when a step failed: the process must end."""
        self._config = config
        self.metrics = WorkerMetrics(
            engine.facts.name, me.worker_id, Utilization(engine.roofline, given=config.ceilings)
        )
        """What is counted here; export `worker_facts` beside it."""
        self._cache = PrefixCache(engine.pool, engine.page_tokens, enabled=config.prefix_cache)
        self._events = asyncio.get_running_loop()
        self._outbox = Outbox(self._events, self.load, self._router_gone, config.attach_grace_s, self._cache.changes)
        self._checks = PageChecks(engine.page_sums, config.kv_checksum_rate, engine.page_tokens)
        pages, longest = engine.pool.counts().total, pages_for(engine.facts.max_context, engine.page_tokens)
        self.admission = self._make_admission(engine, decode_pages(config.role, pages, longest))
        self.transport = open_transport(self.admission.notice)
        facts = (*engine_facts(engine, layout), *self._checks.facts(), *self.transport.facts())
        mine = make_handshake(self.transport.describe(), facts, layout)
        self.peers = Peers(mine, self.transport, config.token, config.rpc_timeout_s)
        self._decode = DecodeHalf(
            admission=self.admission,
            model=engine.facts,
            page_tokens=engine.page_tokens,
            max_batch_requests=decode_batch(config.role, config.engine),
        )
        self._handovers = Handovers(
            me,
            engine.page_tokens,
            self.transport,
            self.peers,
            self.admission,
            self._checks,
            self.metrics.hearing(self._outbox.post),
            config.transfer_deadline_s,
        )
        self._prefill = self._make_prefill(engine)
        self._halves = Halves(
            self._prefill, self._decode, self.admission, engine=config.engine, pages=pages, longest=longest
        )
        self._meter = StepMeter(engine.cost_guess, tell=self.metrics.step)
        self._loop = self._make_loop(engine)
        self.duty = WorkerDuty(
            me,
            config.duty,
            self._halves.doors(),
            resize=self._halves.resize,
            steer=self._steer,
            emit=self._outbox.post,
        )
        """What this worker does now."""
        self._warm_ups = WarmUps(self.peers, lambda: self.duty.duty.role.prefills and not self.duty.draining)
        self._caretaker = Caretaker(
            config,
            loop=self._loop,
            admission=self.admission,
            cache=self._cache,
            checks=self._checks,
            open_requests=self.open_requests,
            on_stuck=self._die,
        )
        self._report = WorkerReport(
            me,
            cache=self._cache,
            halves=self._halves,
            loop=self._loop,
            meter=self._meter,
            caretaker=self._caretaker,
        )

    def start(self) -> None:
        """Begin to step, and to end what is due."""
        self._loop.start()
        self._caretaker.start()

    # ---- routers ----

    def attach(self, router_id: str, *, prefixes: bool = False) -> RouterStream:
        """The stream of a router's events, with the prefix cache's if it wants them; give it back to `detach`."""
        return self._outbox.attach(router_id, prefixes=prefixes)

    def detach(self, stream: RouterStream) -> None:
        """The stream ended: its router's requests are over."""
        self._outbox.detach(stream)

    def reserve(self, reservation: Reservation) -> GrantedLease:
        """See `DecodeAdmission.reserve`; InvalidArgument for what no worker would take."""
        check_reservation(reservation, self.facts)
        try:
            granted = self.admission.reserve(reservation)
        except ResourceExhausted:
            self.metrics.refused()
            raise
        self._outbox.expect(reservation.router_id)
        return granted

    def prefill(self, task: PrefillTask) -> None:
        """See `PrefillHalf.submit`; InvalidArgument for what no worker would take."""
        check_prefill(task, self.facts)
        self._prefill.submit(task)
        self._outbox.expect(task.router_id)

    def abort(self, router_id: str, refs: Sequence[RequestRef]) -> None:
        """Forget these requests in both halves; unknown ones are ignored."""
        self._halves.abort(router_id, refs)

    # ---- other workers ----

    def peer_joined(self, info: WorkerInfo) -> None:
        """Another worker serves, perhaps one that was believed dead, or has opened other halves. Who will hand prompts
        over to it gets ready for that now, not with a user's prompt.
        """
        self.admission.peer_back(info.peer)
        self.peers.welcome(info.peer)
        self._warm_ups.see(info)

    def peer_gone(self, peer: PeerRef) -> None:
        """That run of another worker, and so its earlier ones, is believed dead."""
        log.info("%s is gone up to incarnation %d", peer.worker_id, peer.incarnation)
        self.admission.peer_gone(peer)
        self.peers.forget(peer)
        self._warm_ups.forget(peer)

    # ---- the controller ----

    def assume(self, meant: PeerRef, duty: Duty, grace_s: float) -> None:
        """See `WorkerDuty.assume`; StaleEpoch if another run of a worker is meant."""
        if meant != self.me:
            raise StaleEpoch(f"{meant.worker_id}, incarnation {meant.incarnation}, is not here; look who serves now")
        self.duty.assume(duty, grace_s)
        self._warm_ups.look()
        self._wake()

    # ---- facts ----

    def known_prefixes(self) -> PrefixList:
        """The names of all pages that can be used again."""
        return self._cache.known()

    @property
    def batch_limit(self) -> int:
        """Most requests that decode in one step, in its present role."""
        return self._halves.batch_limit(self.duty.role)

    def load(self) -> WorkerLoad:
        """See `WorkerReport.load`."""
        return self._report.load()

    @property
    def not_ready(self) -> str:
        """Why it takes nothing for now, in words; empty = it does."""
        return self._halves.not_ready

    @property
    def restless_pages(self) -> int:
        """KV pages of prompts that are over, which writes still read."""
        return self._halves.prefill.restless_pages()

    @property
    def prefix_events(self) -> tuple[int, int]:
        """Pages that ever became known to the prefix cache, and that were forgotten."""
        return self._cache.events

    def open_requests(self) -> int:
        """Requests either half knows."""
        return self._halves.open_requests()

    def inspect(self) -> WorkerInspection:
        """See `WorkerReport.inspect`."""
        return self._report.inspect()

    # ---- the end ----

    async def drain(self, grace_s: float) -> int:
        """See `WorkerDuty.drain`."""
        return await self.duty.drain(grace_s)

    async def close(self) -> None:
        """Abort everything, end the loop, the handoffs and the connections, close the transport. Idempotent."""
        self._caretaker.stop()
        self.duty.stop()
        await self._warm_ups.close()
        for router_id in {router_id for router_id, _ in self._halves.refs()}:
            self._router_gone(router_id)
        await asyncio.to_thread(self._loop.stop)
        self._halves.abandon()
        await asyncio.to_thread(self.transport.close)
        self._checks.close()
        await self._handovers.settle()
        self._outbox.close()
        await self.peers.close()

    # ---- inside ----

    def _make_admission(self, engine: LoadedEngine, max_pages: int | None) -> DecodeAdmission:
        config = DecodeConfig(
            max_pages=max_pages,
            lease_s=self._config.lease_s,
            quarantine_s=self._config.quarantine_s,
            quarantine_far_s=self._config.quarantine_far_s,
            write_window_s=self._config.write_window_s,
            check_deadline_s=self._config.transfer_deadline_s,
            quarantine_share_max=self._config.quarantine_share_max,
        )
        return DecodeAdmission(
            config=config,
            me=self.me,
            cache=self._cache,
            model=engine.facts,
            clock=time.monotonic,
            expect=self._expect,
            emit=lambda routed: self._post_threadsafe(self._outbox.post, routed),
            wake=self._wake,
            listened_s=self._listened_s,
            is_near=self._is_near,
            lives=self._lives,
            checks=self._checks,
        )

    def _steer(self, duty: Duty) -> None:
        self._loop.steer(self._policy(duty), BatchGrowth(self._meter.cost, duty.itl_target_s))

    def _policy(self, duty: Duty) -> StepPolicy:
        return make_policy(
            duty.step_policy,
            self._meter.cost,
            budget=duty.step_budget,
            itl_target_s=duty.itl_target_s,
            max_step_tokens=self._config.engine.max_step_tokens,
        )

    def _make_loop(self, engine: LoadedEngine) -> StepLoop:
        config = self._config
        return StepLoop(
            engine,
            decode=self._decode,
            prefill=self._prefill,
            max_step_tokens=config.engine.max_step_tokens,
            policy=self._policy(config.duty),
            growth=BatchGrowth(self._meter.cost, config.itl_target_s),
            meter=self._meter,
            deadline_s=config.step_deadline,
            gather_s=config.gather_s,
            publish=self._outbox.publish,
            on_death=lambda error: self._post_threadsafe(self._die, error),
        )

    def _make_prefill(self, engine: LoadedEngine) -> PrefillHalf:
        config = PrefillConfig(
            max_requests=self._config.max_prefill_requests,
            quarantine_share_max=self._config.quarantine_share_max,
        )
        return PrefillHalf(
            config=config,
            me=self.me,
            cache=self._cache,
            model=engine.facts,
            local=self.admission,
            hand_over=self._handovers.begin,
            wake=self._wake,
            events=self._events,
        )

    def _expect(self, leases: int) -> None:
        self.transport.expect(leases)

    def _listened_s(self) -> float:
        return self.transport.listened_s()

    def _is_near(self, peer: PeerRef) -> bool:
        return self.peers.is_near(peer)

    def _lives(self, peer: PeerRef) -> bool | None:
        return self.peers.lives(peer)

    def _wake(self) -> None:
        self._loop.wake()

    def _post_threadsafe(self, call: Callable[[Any], None], value: object) -> None:
        self._events.call_soon_threadsafe(call, value)

    def _router_gone(self, router_id: str) -> list[RequestEvent]:
        refs = self._halves.abort_router(router_id)
        if refs:
            log.info("router %s is gone: %d requests aborted", router_id, len(refs))
        reason = Unavailable("the event stream was replaced; send the request again")
        return [failure_event(ref, reason) for ref in refs]

    def _die(self, error: BaseException) -> None:
        """The engine is lost: nothing that runs here can end well, and nothing new may come.

        Requests that it was computing fail with Internal. Of the others routers hear by the end of their streams: they
        know which of them need this worker still.
        """
        if self.died.done():
            return
        log.critical("a step failed; this worker ends", exc_info=error)
        self._halves.close(DIES)
        reason = Internal(
            f"worker {self.me.worker_id} failed in a step ({first_line(error)}) and restarts; send it again"
        )
        known = set(self._halves.refs())
        for router_id, ref in known.intersection(self._halves.abandon()):
            self._outbox.post(RoutedEvent(router_id, failure_event(ref, reason)))
        self._outbox.close()
        self.died.set_result(error)


def first_line(error: BaseException) -> str:
    """An error's type and the first line of its words: CUDA's are a page."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
