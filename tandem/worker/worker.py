"""A worker: one engine, the schedulers of both phases, the step loop that runs them, and the event streams to routers.

Routers, other workers and the controller change a worker only through the methods of `Worker` and of its `admission`,
`peers`, `assignment` and `adapters`; they read its state from its `report`. The servicer only translates messages. A
worker is used on the event loop on which it is created; the engine and the transfer have threads of their own.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from decode_worker.admission import DecodeAdmission
from decode_worker.scheduler import DecodeScheduler
from kv_transfer.base import NoticeHandler, Transport
from kv_transfer.checksums import PageChecks
from kv_transfer.handshake import make_handshake
from kv_transfer.layout import KVLayout
from prefill_worker.scheduler import PrefillScheduler
from tandem.engine.cache.prefix_cache import PrefixCache
from tandem.engine.cache.tiers.cache_tiers import CacheTiers
from tandem.engine.speculation.methods import make_proposer
from tandem.engine.steps.sampling_metadata import History
from tandem.protocol.errors import Internal, InvalidArgument, ResourceExhausted, StaleEpoch, Unavailable
from tandem.protocol.messages import (
    Assignment,
    GrantedLease,
    Lease,
    PeerRef,
    PrefillTask,
    PrefixPull,
    RequestEvent,
    RequestRef,
    Reservation,
    WorkerInfo,
    WorkerLoad,
)
from tandem.protocol.prefixes import PrefixRun
from tandem.worker.adapters import WorkerAdapters
from tandem.worker.assignment import WorkerAssignment, check_role, decode_batch, prompt_step_tokens
from tandem.worker.config import WorkerConfig
from tandem.worker.handoffs import Handoffs
from tandem.worker.kv_tiers import KvReloads, make_tiers
from tandem.worker.loaded_engine import LoadedEngine, engine_facts
from tandem.worker.loop import StepLoop, StepMeter
from tandem.worker.output_streams import OutputStream, OutputStreams
from tandem.worker.peers.peers import Peers
from tandem.worker.peers.warm_ups import WarmUps
from tandem.worker.phases import PhaseSchedulers
from tandem.worker.prefix_pulls import PrefixPulls
from tandem.worker.reporting.metrics import Utilization, WorkerMetrics
from tandem.worker.reporting.report import WorkerReport
from tandem.worker.reporting.watchdog import Watchdog
from tandem.worker.validation import check_prefill, check_reservation

log = logging.getLogger(__name__)

_GRAMMAR_THREADS = 2
"""Threads that compile the grammars of new requests. Routers admit only grammars that compile within seconds."""


class Worker:
    """Owns both schedulers, the step loop and the output streams, and ends them in `close`.

    The engine and the transport are used, not owned.
    """

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
        self._begin_answer = engine.begin_answer
        self._grammar_threads = ThreadPoolExecutor(_GRAMMAR_THREADS, thread_name_prefix="grammars")
        self._config = config
        self._events = asyncio.get_running_loop()
        self.died: asyncio.Future[BaseException] = self._events.create_future()
        """Completes with the error of a failed step; the process must then end."""
        used = Utilization(engine.roofline, config.ceilings, config.engine.ranks_of_device)
        self.metrics = WorkerMetrics(engine.facts.name, me.worker_id, used)
        """The metrics of this worker; `worker_facts` must be exported together with them."""
        self._cache = PrefixCache(
            engine.pool, engine.kv_pages, enabled=config.prefix_cache, reports_tokens=config.reports_tokens
        )
        self._streams = OutputStreams(
            self._events, self._load, self._router_gone, config.attach_grace_s, self._cache.changes
        )
        self._checks = PageChecks(engine.page_sums, config.kv_checksum_rate, engine.kv_pages)
        self.admission = self._make_admission()
        self.transport = open_transport(self.admission.notice)
        self.peers = self._make_peers(engine, layout)
        self._handoffs = self._make_handoffs(engine)
        self._schedulers = self._make_schedulers(engine)
        self._meter = StepMeter(engine.cost_guess, on_step=self.metrics.step)
        self._make_tiers = partial(make_tiers, config, self._cache, engine)
        self.tiers: CacheTiers | None = None
        """The tiers of the prefix cache; None without the settings, and until the worker's role computes prompts."""
        self._reloads: KvReloads | None = None
        self._pulls = PrefixPulls(
            me,
            self._cache,
            self.admission,
            self.peers,
            cost=self._meter.cost,
            chunk=prompt_step_tokens(config.assignment, config.engine),
            most_s=config.rpc_timeout_s,
            wake=self._wake,
            # Another worker writes to the first rank only, and ranks that divide tokens each need the whole KV.
            enabled=config.prefix_cache and config.engine.context_parallel_size == 1,
        )
        self._loop = self._make_loop(engine)
        schedulers, loop, post = self._schedulers, self._loop, self._streams.post
        self.assignment = WorkerAssignment(
            me,
            config.assignment,
            schedulers.phase_controls(),
            resize=schedulers.resize,
            set_steps=loop.set_assignment,
            emit=post,
        )
        """The assignment of this worker: its open phases and the settings of its steps."""
        self.adapters = WorkerAdapters(me, engine.adapters, schedulers.adapters)
        self._warm_ups = WarmUps(
            self.peers, lambda: self.assignment.assignment.role.prefills and not self.assignment.draining
        )
        self._watchdog = Watchdog(
            config, loop=loop, schedulers=schedulers, cache=self._cache, checks=self._checks, on_stuck=self._die
        )
        self.report = WorkerReport(
            me,
            cache=self._cache,
            schedulers=schedulers,
            loop=loop,
            meter=self._meter,
            assignment=self.assignment,
            watchdog=self._watchdog,
            tiers=lambda: self.tiers,
            pulls=self._pulls,
        )
        self._open_tiers()

    def start(self, address: str) -> None:
        """Start the step loop and the watchdog; `address` is host:port of the worker's gRPC server."""
        self._pulls.address = address
        self._loop.start()
        self._watchdog.start()
        self._start_tiers()

    # ---- routers ----

    def attach(self, router_id: str, *, prefixes: bool = False) -> OutputStream:
        """Attach a router to its event stream, and return the stream.

        With `prefixes` the stream includes the changes of the prefix cache. The caller passes the stream to `detach`
        when it ends.
        """
        return self._streams.attach(router_id, prefixes=prefixes)

    def detach(self, stream: OutputStream) -> None:
        """Abort the requests of a router whose stream has ended, unless another stream has replaced it."""
        self._streams.detach(stream)

    async def begin_answer(self, work: Reservation | PrefillTask) -> History | None:
        """Return the token history of an answer, or None if neither penalties nor a grammar need it.

        A grammar is compiled and advanced to the newest token of the answer, before a step needs it. Raises
        InvalidArgument if that fails.
        """
        if not work.sampling.needs_history:
            return None
        history, grammar = History(work.original_prompt, work.answer), work.sampling.grammar
        if grammar:
            await self._events.run_in_executor(self._grammar_threads, self._begin_answer, history, grammar)
        return history

    async def reload(self, work: Reservation | PrefillTask) -> None:
        """Load the KV pages of a prompt that are in tiers or on another worker, if that pays.

        The tiers are those of `KvReloads.load`, the other worker is the request's source (`PrefixPulls.load`). Raises
        the errors of `reserve` and `prefill` that can be found before: a request that is rejected loads nothing.
        """
        if self._reloads is None and work.source is None:
            return
        self._check_accepts(work)
        # The router names a source if that is predicted to be faster than tiers, which may have what does not come.
        await self._pulls.load(work)
        if self._reloads is not None:
            await self._reloads.load(work)

    async def read_ahead(self, run: PrefixRun) -> None:
        """Begin to load pages of a prompt that is still in a router's queue, if that pays (`KvReloads.read_ahead`)."""
        if self._reloads is not None:
            await self._reloads.read_ahead(run)

    def _check_accepts(self, work: Reservation | PrefillTask) -> None:
        if isinstance(work, PrefillTask):
            check_prefill(work, self.facts)
            self.adapters.number(work.adapter)
            self._schedulers.prefill.check_accepts(work)
        else:
            check_reservation(work, self.facts)
            self.adapters.number(work.adapter)
            with self._count_refusals():
                self.admission.check_accepts(work)

    def reserve(self, reservation: Reservation) -> GrantedLease:
        """Reserve pages for a request and return the granted lease (`DecodeAdmission.reserve`).

        Raises InvalidArgument if no worker would accept the request, NotFound if its adapter is not loaded, and the
        errors of `DecodeAdmission.reserve`.
        """
        check_reservation(reservation, self.facts)
        adapter = self.adapters.number(reservation.adapter)
        with self._count_refusals():
            granted = self.admission.reserve(reservation, adapter)
        self._streams.expect(reservation.router_id)
        return granted

    def prefill(self, task: PrefillTask, history: History | None = None) -> None:
        """Queue a prompt for prefill (`PrefillScheduler.submit`).

        `history` is the result of `begin_answer` for the task. Raises InvalidArgument if no worker would accept the
        request, NotFound if its adapter is not loaded, and the errors of `PrefillScheduler.submit`.
        """
        check_prefill(task, self.facts)
        self._schedulers.prefill.submit(task, self.adapters.number(task.adapter), history)
        self._streams.expect(task.router_id)

    def abort(self, router_id: str, refs: Sequence[RequestRef]) -> None:
        """Abort these requests in both phases. Unknown ones are ignored."""
        self._schedulers.abort(router_id, refs)

    # ---- other workers ----

    async def send_prefix(self, pull: PrefixPull) -> int:
        """Begin to send cached pages of a prefix to another worker (`Handoffs.send_prefix`).

        Pages that are in tiers are loaded first, if they then still come in time. Returns the number of digests of
        which the other worker will have pages.
        """
        if self._reloads is not None:
            await self._reloads.load_for(pull)
        return self._handoffs.send_prefix(pull)

    def peer_joined(self, info: WorkerInfo) -> None:
        """Record that another worker serves, or has opened a further phase.

        A worker that was assumed dead is accepted again. If this worker may hand prompts over to the other one, the
        connection is warmed up now, so that no prompt waits for it.
        """
        self.admission.peer_back(info.peer)
        self.peers.restore_peer(info.peer)
        self._warm_ups.add(info)

    def peer_gone(self, peer: PeerRef) -> None:
        """Treat this incarnation of another worker, and its earlier ones, as dead."""
        log.info("%s is gone up to incarnation %d", peer.worker_id, peer.incarnation)
        self.admission.peer_gone(peer)
        self.peers.forget(peer)
        self._warm_ups.forget(peer)

    def delivered(self, leases: Sequence[Lease], prefill: PeerRef) -> None:
        """Process a report of leases whose notices were sent a while ago (`DecodeAdmission.delivered`).

        Raises Unavailable while another rank is silent, because it may have notices that it has not read: the report
        comes again.
        """
        if self.transport.silent_s():
            raise Unavailable(f"a rank of {self.me.worker_id} does not respond; report again")
        self.admission.delivered(leases, prefill)

    # ---- the controller ----

    def assume(self, meant: PeerRef, assignment: Assignment, grace_s: float) -> None:
        """Change the assignment (`WorkerAssignment.assume`).

        Raises StaleEpoch if another incarnation of the worker is meant, and the errors of `check_role`.
        """
        if meant != self.me:
            raise StaleEpoch(f"{meant.worker_id}, incarnation {meant.incarnation}, is not here; look who serves now")
        check_role(assignment.role, self._config.engine)
        self.assignment.assume(assignment, grace_s)
        self._warm_ups.start_due()
        try:
            self._open_tiers()
        except InvalidArgument as error:
            log.error("%s has no tiers of the prefix cache: %s", self.me.worker_id, error.message)
        self._start_tiers()
        self._wake()

    def look_for_stuck(self) -> None:
        """End the worker if its device hangs (`Watchdog.check_device`)."""
        self._watchdog.check_device()

    # ---- the end ----

    async def drain(self, grace_s: float) -> int:
        """Reject new requests and wait for running requests (`WorkerAssignment.drain`)."""
        return await self.assignment.drain(grace_s)

    async def close(self) -> None:
        """Abort all requests, end the loop, the hand-overs and the connections, and close the transport. Idempotent."""
        self._watchdog.stop()
        self.assignment.stop()
        await self._warm_ups.close()
        self._schedulers.abort_all()
        await asyncio.to_thread(self._loop.stop)
        self._schedulers.abandon()
        if self.tiers is not None:
            await asyncio.to_thread(self.tiers.close)
        await asyncio.to_thread(self.transport.close)
        self._checks.close()
        await self._handoffs.wait_until_ended()
        self._streams.close()
        await self.peers.close()
        self._grammar_threads.shutdown(wait=False, cancel_futures=True)

    # ---- inside ----

    def _make_admission(self) -> DecodeAdmission:
        return DecodeAdmission(
            config=self._config,
            me=self.me,
            cache=self._cache,
            model=self.facts,
            clock=time.monotonic,
            expect=self._expect,
            emit=lambda routed: self._post_threadsafe(self._streams.post, routed),
            wake=self._wake,
            transport_poll_s=self._transport_poll_s,
            same_host=self._same_host,
            process_alive=self._process_alive,
            checks=self._checks,
        )

    @contextmanager
    def _count_refusals(self) -> Iterator[None]:
        try:
            yield
        except ResourceExhausted:
            self.metrics.refused()
            raise

    def _open_tiers(self) -> None:
        # A worker that only decodes gets its pages from prefill workers, and would load none.
        if self.tiers is None and self.assignment.assignment.role.prefills:
            self.tiers = self._make_tiers()
            self._reloads = None if self.tiers is None else self._make_reloads(self.tiers)

    def _start_tiers(self) -> None:
        if self.tiers is not None:
            self.tiers.start(self._tiers_changed)

    def _make_reloads(self, tiers: CacheTiers) -> KvReloads:
        config = self._config
        chunk = prompt_step_tokens(self.assignment.assignment, config.engine)
        return KvReloads(
            self.me,
            self._cache,
            tiers,
            cost=self._meter.cost,
            chunk=chunk,
            most_s=config.rpc_timeout_s,
            wake=self._tiers_changed,
        )

    def _make_peers(self, engine: LoadedEngine, layout: KVLayout) -> Peers:
        facts = (*engine_facts(engine, layout), *self._checks.facts(), *self.transport.facts())
        handshake = make_handshake(self.transport.describe(), facts, layout)
        return Peers(handshake, self.transport, self._config.secrets.token, self._config.rpc_timeout_s)

    def _make_handoffs(self, engine: LoadedEngine) -> Handoffs:
        return Handoffs(
            self.me,
            self._cache,
            self.transport,
            self.peers,
            self.admission,
            self._checks,
            self.metrics.hearing(self._streams.post),
            self._config.kv_transfer_deadline_s,
            self.metrics.writing,
        )

    def _make_schedulers(self, engine: LoadedEngine) -> PhaseSchedulers:
        config, cache, model, admission = self._config, self._cache, self.facts, self.admission
        prefill = PrefillScheduler(
            config=config,
            me=self.me,
            cache=cache,
            model=model,
            local=admission,
            begin_handoff=self._handoffs.begin,
            wake=self._wake,
            events=self._events,
        )
        decode = DecodeScheduler(
            requests=admission.requests,
            lock=admission.lock,
            model=model,
            kv=cache.kv,
            max_batch_requests=decode_batch(config.role, config.engine),
            proposer=make_proposer(
                config.speculate,
                asynchronous=engine.asynchronous,
                trained=engine.draft_proposer,
            ),
            allowed_drafts=engine.allowed_drafts,
        )
        if decode.speculation is not None and config.engine.draft_graphs and engine.asynchronous:
            decode.speculation.read_kv_once()
        return PhaseSchedulers(config, cache, model, prefill=prefill, decode=decode, admission=admission)

    def _make_loop(self, engine: LoadedEngine) -> StepLoop:
        config = self._config
        return StepLoop(
            engine,
            decode=self._schedulers.decode,
            prefill=self._schedulers.prefill,
            max_step_tokens=config.engine.max_step_tokens,
            assignment=config.assignment,
            meter=self._meter,
            deadline_s=config.step_deadline,
            batch_wait_s=config.batch_wait_s,
            publish=self._streams.publish,
            on_death=lambda error: self._post_threadsafe(self._die, error),
        )

    # The parts have circular references: a part that is created later is called through these methods.

    def _expect(self, leases: int) -> None:
        self.transport.expect(leases)

    def _transport_poll_s(self) -> float:
        return self.transport.transport_poll_s()

    def _same_host(self, peer: PeerRef) -> bool:
        return self.peers.same_host(peer)

    def _process_alive(self, peer: PeerRef) -> bool | None:
        return self.peers.process_alive(peer)

    def _load(self) -> WorkerLoad:
        return self.report.load()

    def _router_gone(self, router_id: str) -> list[RequestEvent]:
        return self._schedulers.router_gone(router_id)

    def _wake(self) -> None:
        self._loop.wake()

    def _tiers_changed(self) -> None:
        """Wake the step loop and send the places of pages to routers, because tiers are open or a reload has ended."""
        self._wake()
        if not self._events.is_closed():
            self._events.call_soon_threadsafe(self._streams.send_changes)

    def _post_threadsafe(self, call: Callable[[Any], None], value: object) -> None:
        self._events.call_soon_threadsafe(call, value)

    def _die(self, error: BaseException) -> None:
        """Fail the requests that the lost engine was computing, and end all streams.

        The requests of launched steps fail with Internal, because they may be the cause, unless the cause is that
        another rank has ended (Unavailable). The routers of all other requests notice the end of their streams, and
        know which of the requests still need this worker.
        """
        if self.died.done():
            return
        log.critical("a step failed; this worker ends", exc_info=error)
        reason = Internal(
            f"worker {self.me.worker_id} failed in a step ({first_line(error)}) and restarts; send it again"
        )
        if not isinstance(error, Unavailable):
            for event in self._schedulers.engine_gone(reason):
                self._streams.post(event)
        self._streams.close()
        self.died.set_result(error)


def first_line(error: BaseException) -> str:
    """Return an error's type and the first line of its message: CUDA's messages are a page long."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
