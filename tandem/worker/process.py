"""A worker process from start to end: engine, transfer, gRPC server and registration with the controller.

The caller's thread starts and stops the process; the event loop, the engine and the transfer have their own threads.
"""

import asyncio
import contextlib
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import grpc.aio

from tandem.engine.energy import open_energy_counter
from tandem.engine.model_runner import ModelRunner
from tandem.logging.logs import LogConfig
from tandem.metrics.exposition import Exposition
from tandem.metrics.metrics_server import METRICS_PATH, MetricsServer, metrics_page
from tandem.net import rpc
from tandem.net.address import address_of, is_loopback
from tandem.net.security.credentials import reading_keys
from tandem.net.turns import set_switch_interval
from tandem.protocol.errors import Internal, TandemError, Unavailable
from tandem.protocol.generated.tandem.v1 import worker_pb2_grpc
from tandem.protocol.messages import Assignment, PeerRef, WorkerInfo
from tandem.worker.assignment import check_role, decode_batch, prompt_step_tokens
from tandem.worker.config import WorkerConfig
from tandem.worker.controller_link import ControllerLink
from tandem.worker.rank_group import RankGroup
from tandem.worker.reporting.metrics import energy_facts, engine_facts, rank_facts, tier_facts, worker_facts
from tandem.worker.servicer import WorkerServicer
from tandem.worker.transfer import RankTransfer, whole_layout
from tandem.worker.worker import Worker, first_line

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""Called with the stage of the start in words, and the fraction of the stage that is done."""

Result = TypeVar("Result")

STOP_S = 30.0
RANK_LOOK_S = 0.2
"""Interval in seconds at which a worker checks that its other ranks run."""
RANK_GRACE_S = 5.0
"""Time in seconds in which the first rank may report why it cannot start, after another rank has ended."""


class WorkerProcess:
    """One incarnation of a worker: `start` once, `stop` once. After `stop`, no thread, port or memory is left."""

    def __init__(self, config: WorkerConfig, incarnation: int, log_config: LogConfig | None = None) -> None:
        """`log_config` is that of this process, for its other ranks."""
        self._config, self._log_config = config, log_config
        self._me = PeerRef(config.worker_id, incarnation)
        stages = config.engine.pipeline_parallel_size
        self._transfer = RankTransfer(config.transfer_backend, self._me, config.trusted_network, stages)
        self._started_unix_nanos = time.time_ns()
        self._ended: Future[None] = Future()
        self._events = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._events.run_forever, name="events", daemon=True)
        self._engine: ModelRunner | None = None
        self._group: RankGroup | None = None
        """The other ranks; None if this process holds the whole model."""
        self._watching: Future[None] | None = None
        self._worker: Worker | None = None
        self._server: grpc.aio.Server | None = None
        self._controller: ControllerLink | None = None
        self._metrics: MetricsServer | None = None
        self._registered = False
        self.metrics_address = ""
        """host:port of the metrics' HTTP server, once it serves."""
        self._stopping = threading.Lock()

    def start(self, progress: Progress | None = None) -> WorkerInfo:
        """Load the model, listen, start the step loop, and register; return once the worker takes requests.

        Raises ModelError, InvalidArgument, FailedPrecondition or Unavailable, whose message says what to change. If the
        start fails, nothing is left behind.
        """
        set_switch_interval()
        report = progress or (lambda _stage, _fraction: None)
        self._thread.start()
        try:
            self._engine = self._load(progress)
            report("measuring the device", 0.0)
            if self._config.ceilings is None:
                self._engine.measure_ceilings(self._config.engine.threads)
            report("opening the transfer", 0.0)
            info = self._call(self._open(self._engine))
        except BaseException as error:
            # Before `stop`: a caller of `wait` must get the reason too.
            self._end(self._why_not(error))
            self.stop()
            raise
        report("serving", 1.0)
        log.info("%s (incarnation %d) serves on %s", self._me.worker_id, self._me.incarnation, info.address)
        return info

    def _load(self, progress: Progress | None) -> ModelRunner:
        engine = self._config.engine
        check_role(self._config.role, engine)
        if engine.ranks == 1:
            return ModelRunner.load(engine, progress)
        tensor_ranks, stages = engine.tensor_parallel_size, engine.pipeline_parallel_size
        if engine.context_parallel_size > 1:
            # The first rank has the KV of all tokens, so the others hand nothing over.
            self._group = RankGroup(
                engine, engine.context_parallel_size, divides_tokens=True, log_config=self._log_config
            )
        else:
            self._group = RankGroup(engine, tensor_ranks, self._transfer, stages=stages, log_config=self._log_config)
        self._watching = asyncio.run_coroutine_threadsafe(self._watch(self._group), self._events)
        return self._group.load(progress)

    def wait(self) -> None:
        """Wait until the process was stopped or drained.

        Raises the error of `start`, or Internal or StaleEpoch if the process had to end.
        """
        self._ended.result()

    @property
    def serves(self) -> bool:
        """True if the worker takes requests: it has started, does not drain and has not ended."""
        worker = self._worker
        return worker is not None and self._registered and not worker.assignment.draining and not self._ended.done()

    @property
    def assignment(self) -> Assignment:
        """The worker's current assignment."""
        return self._config.assignment if self._worker is None else self._worker.assignment.assignment

    @property
    def silent_s(self) -> float:
        """Seconds since a controller was last connected; infinite before the first connection."""
        return math.inf if self._controller is None else self._controller.silent_s

    async def works(self) -> None:
        """Return once the worker's event loop has checked that the device makes progress.

        The check ends a worker whose device hangs. Returns immediately if the worker has ended. May be called from any
        event loop except the worker's own.
        """
        if not self._ended.done():
            with contextlib.suppress(RuntimeError):  # it is closing its event loop at this moment
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._check_device(), self._events))

    def change_controller(self, controller_address: str) -> None:
        """Register with another controller (`ControllerLink.change_controller`).

        Raises Unavailable if the worker does not serve.
        """
        if self._controller is None or not self.serves:
            raise Unavailable(f"worker {self._me.worker_id} does not serve; start it again")
        self._call(self._controller.change_controller(controller_address))

    def drain(self, grace_s: float) -> int:
        """Reject new requests, wait for running requests, and leave the cluster.

        Returns the number of requests that have not ended after `grace_s` seconds; other workers continue them. Then
        `wait` returns: a drained worker does not serve again, and its owner stops it.
        """
        return self._call(self._drain(grace_s))

    def stop(self) -> None:
        """Stop now and abort running requests. Idempotent; may be called from any thread except the event loop's."""
        with self._stopping:
            if self._thread.is_alive():
                self._call(self._close(), STOP_S)
                self._events.call_soon_threadsafe(self._events.stop)
                self._thread.join()
                self._events.close()
        self._end(None)

    # ---- on the event loop ----

    async def _open(self, engine: ModelRunner) -> WorkerInfo:
        others = () if self._group is None else self._group.open_transports
        open_transport = self._transfer.group_opener(engine.cache, engine.page_parts, others)
        layout = whole_layout(engine.cache, engine.page_parts)
        self._worker = Worker(self._config, self._me, engine, layout, open_transport)
        self._worker.died.add_done_callback(lambda died: self._die(died.result()))
        self._server = rpc.open_server()
        worker_pb2_grpc.add_WorkerServicer_to_server(WorkerServicer(self._worker, self._drain), self._server)
        port = self._listen(self._server)
        await self._server.start()
        address = address_of(self._config.host, port)
        self._worker.start(address)
        await self._open_metrics(self._worker, engine)
        describe = partial(self._info, engine, self._worker, address)
        if self._config.controller_address is not None:
            self._controller = ControllerLink(
                self._config.controller_address,
                self._config.secrets.token,
                describe,
                self._config.rpc_timeout_s,
                on_peer_joined=self._worker.peer_joined,
                on_peer_gone=self._worker.peer_gone,
                on_superseded=self._end,
            )
            self._worker.assignment.on_change = self._worker.adapters.on_change = self._controller.refresh
            await self._controller.register()
        self._registered = True
        return describe()

    async def _open_metrics(self, worker: Worker, engine: ModelRunner) -> None:
        config, registry = self._config, worker.metrics.registry
        registry.read(partial(worker_facts, worker.report, worker.transport))
        registry.read(partial(engine_facts, engine, lambda: worker.assignment.role.value))
        registry.read(lambda: tier_facts(worker.tiers, worker.admission.pull_counts))
        ranks = config.engine.ranks
        registry.read(partial(rank_facts, worker.metrics, engine.roofline.collectives, ranks))
        registry.read(partial(energy_facts, open_energy_counter(engine.cache.device, ranks)))
        keys = reading_keys(
            config.secrets.metrics_key, config.secrets.token, guarded=False, loopback=is_loopback(config.host)
        )
        self._metrics = MetricsServer({METRICS_PATH: metrics_page(Exposition(registry))}, keys)
        self.metrics_address = await self._metrics.open(config.host)

    def _listen(self, server: grpc.aio.Server) -> int:
        address = address_of(self._config.host, self._config.port)
        try:
            return rpc.listen(server, address, self._config.secrets.token)
        except RuntimeError as error:
            raise Unavailable(
                f"worker {self._me.worker_id} cannot listen on {address}; free it or use port 0"
            ) from error

    def _info(self, engine: ModelRunner, worker: Worker, address: str) -> WorkerInfo:
        assignment, sizes = worker.assignment, self._config.engine
        return WorkerInfo(
            peer=self._me,
            role=assignment.role,
            address=address,
            model=replace(engine.facts, adapters=worker.adapters.facts),
            pages_total=engine.cache.pages,
            page_tokens=engine.page_tokens,
            max_batch_requests=decode_batch(assignment.role, sizes),
            max_step_tokens=prompt_step_tokens(assignment.assignment, sizes),
            device=engine.device_name,
            transport=worker.transport.transport_name(),
            not_ready=worker.report.not_ready,
            warnings=worker.transport.warnings() + worker.peers.warnings(),
            assignment=assignment.assignment,
            closing=assignment.closing,
            started_unix_nanos=self._started_unix_nanos,
            kv_ports=worker.transport.open_ports(),
            kv_tiers=() if worker.tiers is None else worker.tiers.summary,
            kv_tier_pages=0 if worker.tiers is None else worker.tiers.capacity,
        )

    async def _watch(self, group: RankGroup) -> None:
        """Kill this process once another rank has ended or hangs: the ranks live and die together.

        A step that waits for the other rank on a GPU could not be ended in any other way.
        """
        while (failed := group.ended_rank() or group.silent_rank()) is None:  # noqa: ASYNC110
            await asyncio.sleep(RANK_LOOK_S)
        if not self._registered:
            await asyncio.sleep(RANK_GRACE_S)
        log.critical("rank %d of %s has ended or hangs; this worker ends with it", failed, self._me.worker_id)
        group.kill()
        os.kill(os.getpid(), signal.SIGKILL)

    async def _check_device(self) -> None:
        if self._worker is not None:
            self._worker.look_for_stuck()

    async def _drain(self, grace_s: float) -> int:
        left = await self._worker.drain(grace_s) if self._worker is not None else 0
        if self._controller is not None:
            await self._controller.unregister()
        self._end(None)
        return left

    async def _close(self) -> None:
        if self._watching is not None:
            # Ranks are silent once their transports are closed.
            self._watching.cancel()
        if self._controller is not None:
            await self._controller.unregister()
            await self._controller.close()
        if self._worker is not None:
            await self._worker.close()
        if self._server is not None:
            await self._server.stop(None)
        if self._metrics is not None:
            await self._metrics.close()
        if self._group is not None:
            await asyncio.to_thread(self._group.close)
        self._controller = self._worker = self._server = self._engine = self._group = None
        await self._events.shutdown_default_executor()

    def _why_not(self, error: BaseException) -> TandemError:
        """Return the error with which the start failed, as a TandemError."""
        if isinstance(error, TandemError):
            return error
        return Internal(f"worker {self._me.worker_id} failed to start: {first_line(error)}")

    def _die(self, error: BaseException) -> None:
        self._end(Internal(f"worker {self._me.worker_id} failed in a step: {first_line(error)}"))

    def _end(self, error: TandemError | None) -> None:
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    def _call(self, work: Coroutine[Any, Any, Result], timeout_s: float | None = None) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._events).result(timeout_s)
