"""A controller and workers that speak the real protocol without a model, with switches for every kind of fault.

A fake worker answers token number i of a prompt with `answer_token(prompt, i)`, so any attempt on any worker gives
the same answer. One fake implements both roles; its role says which calls it gets.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import grpc.aio

from tandem.net.rpc import listen, open_server
from tandem.protocol import conversion
from tandem.protocol.cost_parameters import UNMEASURED
from tandem.protocol.errors import ResourceExhausted, RoleClosed, StaleEpoch, TandemError
from tandem.protocol.generated.tandem.v1 import cluster_pb2, cluster_pb2_grpc, worker_pb2, worker_pb2_grpc
from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent, TransferStats
from tandem.protocol.messages import (
    AdapterFacts,
    ErrorDetail,
    ExpectedWorker,
    FinishReason,
    GrantedLease,
    Lease,
    Membership,
    ModelFacts,
    PeerRef,
    PrefillTask,
    PromptLogprobs,
    RequestEvent,
    RequestRef,
    Reservation,
    Role,
    StepOutput,
    StepTokens,
    TierLoad,
    TokenLogprobs,
    WorkerInfo,
    WorkerLoad,
)
from tandem.protocol.prefixes import KvTier, PrefixChanges, PrefixList, PrefixRun, TierPages
from tests.keyed_channel import keyed_channel

EOS = 2
VOCAB_SIZE = 400


def answer_token(prompt: Sequence[int], index: int) -> int:
    """Returns token `index` of the answer to `prompt`, any of the small vocabulary except the special tokens."""
    return 3 + (sum(prompt) * 31 + index * index * 7) % (VOCAB_SIZE - 3)


def answer_logprobs(token_id: int, top: int | None) -> tuple[TokenLogprobs, ...]:
    """Returns the fakes' log probabilities of a token with `top` alternatives; the token itself is second."""
    if top is None:
        return ()
    others = ((token_id + 1) % VOCAB_SIZE, token_id, *range(3, 3 + top))[:top]
    return (TokenLogprobs(-token_id / 256, others, tuple(-float(place) for place in range(top))),)


def prompt_logprobs(task: PrefillTask) -> PromptLogprobs | None:
    """Returns the fakes' log probabilities of the prompt of a task that asks for them."""
    if not task.scores_prompt:
        return None
    top = task.sampling.prompt_logprobs or 0
    scores = [answer_logprobs(token_id, top)[0] for token_id in task.original_prompt[1:]]
    ids, values = [score.top_ids for score in scores], [score.top for score in scores]
    return PromptLogprobs(tuple(score.chosen for score in scores), top, tuple(chain(*ids)), tuple(chain(*values)))


@dataclass
class Switches:
    """Faults to inject; each applies to every request of the worker until it is reset."""

    closed: frozenset[Role] = frozenset()
    """Reject requests for these roles, whatever is announced."""
    give_up_after: int | None = None
    """Give up each attempt once it has this many tokens, as a role that is closing does."""
    refuse_reserve: int = 0
    """Answer this many Reserve calls with RESOURCE_EXHAUSTED."""
    cached_tokens: int = 0
    """The number of cached tokens of a prompt, plus one for each token that was generated before."""
    reloaded_tokens: int = 0
    """The number of the cached tokens of a prompt that were loaded from a tier."""
    silent_reserve: bool = False
    """Never answer Reserve."""
    held_reserves: int = 0
    """Delay this many Reserve calls until the worker's `go` is set."""
    prefill_error: TandemError | None = None
    """Reject Prefill with this error."""
    fail_transfers: int = 0
    """Let this many transfers fail after the first token was sent."""
    incompatible: frozenset[str] = frozenset()
    """The decode workers that reject a KV transfer from this worker as incompatible."""
    silent_prefill: bool = False
    """Accept prompts and never answer; each is kept until it is aborted."""
    stop_at: int | None = None
    """End with an end-of-sequence token at this index."""
    step_s: float = 0.0
    """Pause in seconds between decode steps."""
    decode_first: bool = False
    """Send the decode worker's tokens before the prefill worker's first one."""
    preempt_after: int | None = None
    """Preempt every request once the decode worker has sent this many tokens of an attempt."""
    silent_aborts: int = 0
    """Neither answer nor execute this many Abort calls."""
    forgotten_attempts: int = 0
    """Answer heartbeats as if no lease of an attempt up to this one existed."""
    lease_s: float = 30.0
    """The lifetime in seconds of a lease without heartbeats."""
    held_at: int | None = None
    """Pause each request at this many tokens until the worker's `go` is set."""
    mute_after: int | None = None
    """Send nothing more for a request once it has this many tokens, as a suspended process."""
    break_after: int | None = None
    """Drop the event stream once a request has this many tokens."""


@dataclass
class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """One worker. `start` it, register it with the controller, then `stop` or `kill` it."""

    worker_id: str
    role: Role
    incarnation: int = 1
    pages_total: int = 512
    page_tokens: int = 16
    max_context: int = 2048
    max_step_tokens: int = 512
    max_batch_requests: int = 64
    token: str = ""
    not_ready: str = ""
    ending: bool = False
    """True if it refuses event streams, as after a failed step."""
    closing: Role | None = None
    """The roles that it announces as closing; requests for them are rejected."""
    adapters: tuple[AdapterFacts, ...] = ()
    answer: Callable[[Sequence[int], int], int] = answer_token
    switches: Switches = field(default_factory=Switches)
    peers: dict[str, "FakeWorker"] = field(default_factory=dict)
    """Workers by id, the destinations of transfers."""

    def __post_init__(self) -> None:
        self.streams: dict[str, asyncio.Queue[StepOutput | None]] = {}
        self.leases: dict[str, Lease] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.aborted: list[RequestRef] = []
        self.go = asyncio.Event()
        self.runs = asyncio.Event()
        """Unset: the process is suspended, as after SIGSTOP."""
        self.runs.set()
        self.heartbeats: list[list[Lease]] = []
        self.reservations: list[Reservation] = []
        self.prefills: list[PrefillTask] = []
        self.epoch = 0
        self.step = 0
        self.cost = UNMEASURED
        """The step cost in its load reports."""
        self.batches = 0
        self.pages: dict[bytes, PrefixRun] = {}
        """The pages in its prefix cache, each as a run of one page."""
        self.tiers: tuple[TierLoad, ...] = ()
        """The tiers in its load reports."""
        self.read_aheads: list[PrefixRun] = []
        self.kept: list[TierPages] = []
        """The pages that it has in tiers only."""
        self.listed = 0

    async def start(self) -> "FakeWorker":
        self.server = open_server()
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self.server)
        self.address = f"127.0.0.1:{listen(self.server, '127.0.0.1:0', self.token)}"
        await self.server.start()
        return self

    async def kill(self) -> None:
        """Disappears at once, as after SIGKILL: its streams end without a status."""
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        await self.server.stop(0)

    def forget(self) -> None:
        """Forgets every lease and request, as a worker does that has ended them."""
        self.leases.clear()
        for task in self.tasks.values():
            task.cancel()

    @property
    def info(self) -> WorkerInfo:
        summary = ("1 B parameters",)
        facts = ModelFacts("fake", VOCAB_SIZE, self.max_context, (EOS,), "float32", summary, adapters=self.adapters)
        return WorkerInfo(
            PeerRef(self.worker_id, self.incarnation), self.role, self.address, facts, self.pages_total,
            self.page_tokens, self.max_batch_requests, self.max_step_tokens, "cpu", "in-memory", self.not_ready,
            closing=self.closing, kv_tier_pages=64,
        )  # fmt: skip

    @property
    def idle(self) -> bool:
        """True if the worker has no request and no lease."""
        return not self.leases and not self.tasks

    # ---- gRPC service ----

    async def Attach(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.StepOutput]:
        if self.ending:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this worker is ending")
        queue: asyncio.Queue[StepOutput | None] = asyncio.Queue()
        self.streams[request.router_id] = queue
        await context.send_initial_metadata(())
        try:
            while (events := await queue.get()) is not None:
                await self.runs.wait()
                yield conversion.step_output_to_proto(events)
        finally:
            if self.streams.get(request.router_id) is queue:
                del self.streams[request.router_id]
            self.forget()

    async def ListPrefixes(self, _request: Any, _context: Any) -> Any:
        self.listed += 1
        return conversion.to_proto(
            PrefixList(self.batches, tuple(self.pages.values()), tuple(self.kept)), worker_pb2.ListPrefixesResponse
        )

    def cache(self, digests: Sequence[bytes], *, reported: bool = True) -> None:
        """Adds pages to its prefix cache; unless `reported`, the report of the change is lost."""
        self.report(stored=[PrefixRun(b"", (digest,)) for digest in digests], reported=reported)

    def report(self, *, stored: Sequence[PrefixRun] = (), removed: Sequence[bytes] = (), reported: bool = True) -> None:
        """Changes its prefix cache; unless `reported`, the report of the change is lost."""
        self.batches += 1
        self.pages.update((run.digests[-1], run) for run in stored)
        for digest in removed:
            self.pages.pop(digest, None)
        changes = PrefixChanges(self.batches, tuple(stored), tuple(removed))
        for queue in self.streams.values() if reported else ():
            queue.put_nowait(StepOutput(self.step, (), self.load, (changes,)))

    def keep(self, digests: Sequence[bytes], tier: KvTier) -> None:
        """Reports pages that it has in a tier only."""
        self.batches += 1
        self.kept.append(TierPages(tier, tuple(digests)))
        changes = PrefixChanges(self.batches, tiers=(self.kept[-1],))
        for queue in self.streams.values():
            queue.put_nowait(StepOutput(self.step, (), self.load, (changes,)))

    async def ReadAhead(self, request: Any, _context: Any) -> worker_pb2.ReadAheadResponse:
        self.read_aheads.append(conversion.from_proto(request.prefix, PrefixRun))
        return worker_pb2.ReadAheadResponse()

    @property
    def load(self) -> WorkerLoad:
        return WorkerLoad(0, 0, len(self.tasks), 0, self.pages_total, cost=self.cost, tiers=self.tiers)

    async def Reserve(self, request: Any, _context: Any) -> Any:
        reservation = conversion.from_proto(request, Reservation)
        await self.runs.wait()
        self.reservations.append(reservation)
        self._check_open(Role.DECODE)
        if self.switches.silent_reserve:
            await asyncio.sleep(60)
        if self.switches.refuse_reserve > 0:
            self.switches.refuse_reserve -= 1
            raise ResourceExhausted("no pages", retry_after_s=0.01)
        if self.switches.held_reserves > 0:
            self.switches.held_reserves -= 1
            await self.go.wait()
        self.epoch += 1
        lease = Lease(reservation.ref.request_id, reservation.ref.attempt, self.epoch)
        self.leases[lease.request_id] = lease
        return conversion.to_proto(GrantedLease(lease, self.switches.lease_s), worker_pb2.ReserveResponse)

    async def Prefill(self, request: Any, _context: Any) -> worker_pb2.PrefillResponse:
        task = conversion.from_proto(request, PrefillTask)
        await self.runs.wait()
        self.prefills.append(task)
        self._check_open(Role.PREFILL)
        if self.switches.prefill_error is not None:
            raise self.switches.prefill_error
        self._start(task.ref, asyncio.Event().wait() if self.switches.silent_prefill else self._prefill(task))
        return worker_pb2.PrefillResponse()

    def _check_open(self, half: Role) -> None:
        if half in self.switches.closed:
            raise RoleClosed(f"the {half} half is closed")

    async def Abort(self, request: Any, _context: Any) -> worker_pb2.AbortWorkResponse:
        await self.runs.wait()
        if self.switches.silent_aborts > 0:
            self.switches.silent_aborts -= 1
            await asyncio.sleep(60)
        for message in request.requests:
            ref = conversion.from_proto(message, RequestRef)
            self.aborted.append(ref)
            lease = self.leases.get(ref.request_id)
            if lease is not None and lease.attempt <= ref.attempt:
                del self.leases[ref.request_id]
            for key, work in self.tasks.items():
                if key.rstrip("'") == ref.request_id and int(work.get_name()) <= ref.attempt:
                    work.cancel()
        return worker_pb2.AbortWorkResponse()

    async def Heartbeat(self, request: Any, _context: Any) -> worker_pb2.HeartbeatResponse:
        await self.runs.wait()
        leases = [conversion.from_proto(lease, Lease) for lease in request.leases]
        if leases:
            self.heartbeats.append(leases)
        forgotten = self.switches.forgotten_attempts
        unknown = [x for x in leases if x.attempt <= forgotten or self.leases.get(x.request_id) != x]
        return worker_pb2.HeartbeatResponse(unknown=[conversion.to_proto(lease, worker_pb2.Lease) for lease in unknown])

    # ---- request execution ----

    async def _prefill(self, task: PrefillTask) -> None:
        prompt, destination, index = task.original_prompt, task.destination, task.prior_output_tokens
        only = task.sampling.max_tokens == index + 1 or self.switches.stop_at == index
        reason = (FinishReason.STOP if self.switches.stop_at == index else FinishReason.LENGTH) if only else None
        first = RequestEvent(
            task.ref, index, (self._token(prompt, index),), reason,
            event_times=(EventTime.now(LifecycleEvent.PREFILL_STARTED), EventTime.now(LifecycleEvent.PREFILL_FINISHED)),
            logprobs=answer_logprobs(self._token(prompt, index), task.sampling.logprobs),
            cached_tokens=self.switches.cached_tokens + index, prompt_logprobs=prompt_logprobs(task),
            reloaded_tokens=self.switches.reloaded_tokens,
        )  # fmt: skip
        if only or not self.switches.decode_first:
            self.send(task.router_id, first)
        if only or destination is None:
            if destination is not None:
                self.peers[destination.peer.worker_id].leases.pop(task.ref.request_id, None)
            return
        if destination.peer.worker_id in self.switches.incompatible:
            words = f"transfer protocol: {destination.peer.worker_id} speaks another"
            detail = ErrorDetail("FAILED_PRECONDITION", words)
            self.send(task.router_id, RequestEvent(task.ref, finish_reason=FinishReason.ERROR, error=detail))
            return
        if self.switches.fail_transfers > 0:
            self.switches.fail_transfers -= 1
            detail = ErrorDetail("TRANSFER_FAILED", "the pages did not arrive")
            self.send(task.router_id, RequestEvent(task.ref, finish_reason=FinishReason.ERROR, error=detail))
            return
        began = EventTime.now(LifecycleEvent.TRANSFER_STARTED)
        self.peers[destination.peer.worker_id].arrive(task)
        if self.switches.decode_first:
            await asyncio.sleep(0.05)
            self.send(task.router_id, first)
        stats = TransferStats(4096, 1, "fake", 1000)
        event_times = (began, EventTime.now(LifecycleEvent.TRANSFER_FINISHED))
        self.send(task.router_id, RequestEvent(task.ref, event_times=event_times, transfer=stats))

    def arrive(self, task: PrefillTask) -> None:
        """Starts decoding `task`, whose KV has arrived, if the lease is still valid."""
        assert task.destination is not None
        if self.leases.get(task.ref.request_id) != task.destination.lease:
            error = StaleEpoch("the lease is over")
            detail = ErrorDetail(error.code, error.message)
            self.send(task.router_id, RequestEvent(task.ref, finish_reason=FinishReason.ERROR, error=detail))
            return
        del self.leases[task.ref.request_id]
        self._start(task.ref, self._decode(task))

    async def _decode(self, task: PrefillTask) -> None:
        event_times: tuple[EventTime, ...] = (
            EventTime.now(LifecycleEvent.DECODE_ADMITTED),
            EventTime.now(LifecycleEvent.DECODE_STARTED),
        )
        for index in range(task.prior_output_tokens + 1, task.sampling.max_tokens):
            if index - task.prior_output_tokens - 1 == self.switches.preempt_after:
                event_times = (*event_times, EventTime.now(LifecycleEvent.PREEMPTED))
                self.send(task.router_id, RequestEvent(task.ref, index, event_times=event_times, preempted=True))
                return
            if index == self.switches.mute_after:
                await asyncio.Event().wait()
            if index == self.switches.held_at:
                await self.go.wait()
            await asyncio.sleep(self.switches.step_s)
            await self.runs.wait()
            ids = (self._token(task.original_prompt, index),)
            reason = FinishReason.LENGTH if index == task.sampling.max_tokens - 1 else None
            if self.switches.stop_at == index:
                reason = FinishReason.STOP
            logprobs = answer_logprobs(ids[0], task.sampling.logprobs)
            self.send(
                task.router_id, RequestEvent(task.ref, index, ids, reason, event_times=event_times, logprobs=logprobs)
            )
            event_times = ()
            if self.switches.give_up_after == index + 1 - task.prior_output_tokens and reason is None:
                detail = ErrorDetail(RoleClosed.code, "others go on with it")
                self.send(task.router_id, RequestEvent(task.ref, finish_reason=FinishReason.ERROR, error=detail))
                return
            if self.switches.break_after == index + 1:
                await self.drop_streams()
            if reason is not None:
                return

    def send(self, router_id: str, *events: RequestEvent, tokens: tuple[StepTokens, ...] = ()) -> None:
        self.step += 1
        if (queue := self.streams.get(router_id)) is not None:
            queue.put_nowait(StepOutput(self.step, events, self.load, tokens=tokens))

    async def drop_streams(self) -> None:
        """Breaks every event stream, as a network failure would."""
        for queue in self.streams.values():
            queue.put_nowait(None)
        await asyncio.sleep(0)

    def _token(self, prompt: Sequence[int], index: int) -> int:
        return EOS if self.switches.stop_at == index else self.answer(prompt, index)

    def _start(self, ref: RequestRef, work: Any) -> None:
        key = ref.request_id
        while key in self.tasks:  # prefill and decode of one request on the same worker
            key += "'"
        task = asyncio.create_task(work, name=str(ref.attempt))
        self.tasks[key] = task
        task.add_done_callback(lambda _: self.tasks.pop(key, None))


class FakeController(cluster_pb2_grpc.ClusterServicer):
    """Notifies routers of the workers that are registered."""

    def __init__(self, token: str = "") -> None:
        self.token = token
        self.workers: dict[str, WorkerInfo] = {}
        self.expected: tuple[ExpectedWorker, ...] = ()
        """The workers that are being started, unless they are registered."""
        self.revision = 0
        self.mode = ""
        self.adapters: tuple[AdapterFacts, ...] | None = None
        """The adapters of the membership; None = those that the workers report."""
        self.adapter_changes: cluster_pb2_grpc.ClusterServicer | None = None
        """What executes changes of the adapters."""
        self.changed = asyncio.Condition()
        self.metrics_text = ""
        """The metrics of all processes of the cluster."""
        self.metrics_error: TandemError | None = None
        """Answer scrapes with this error."""
        self.scrapes = 0

    async def start(self) -> "FakeController":
        self.server = open_server()
        cluster_pb2_grpc.add_ClusterServicer_to_server(self, self.server)
        self.address = f"127.0.0.1:{listen(self.server, '127.0.0.1:0', self.token)}"
        await self.server.start()
        return self

    async def stop(self) -> None:
        await self.server.stop(0)

    async def set(self, *workers: FakeWorker) -> None:
        """Registers exactly these workers."""
        self.workers = {worker.worker_id: worker.info for worker in workers}
        for worker in workers:
            worker.peers = {other.worker_id: other for other in workers}
        async with self.changed:
            self.revision += 1
            self.changed.notify_all()

    async def GetMetrics(self, _request: Any, _context: Any) -> cluster_pb2.GetMetricsResponse:
        self.scrapes += 1
        if self.metrics_error is not None:
            raise self.metrics_error
        return cluster_pb2.GetMetricsResponse(text=self.metrics_text)

    async def Watch(self, _request: Any, _context: Any) -> AsyncIterator[cluster_pb2.Membership]:
        seen = -1
        while True:
            async with self.changed:
                while self.revision <= seen:
                    await self.changed.wait()
                seen = self.revision
                coming = tuple(worker for worker in self.expected if worker.worker_id not in self.workers)
                membership = Membership(seen, tuple(self.workers.values()), self.mode, self.adapters, coming)
            yield conversion.to_proto(membership, cluster_pb2.Membership)

    async def LoadAdapter(self, request: Any, context: Any) -> Any:
        assert self.adapter_changes is not None
        return await self.adapter_changes.LoadAdapter(request, context)

    async def UnloadAdapter(self, request: Any, context: Any) -> Any:
        assert self.adapter_changes is not None
        return await self.adapter_changes.UnloadAdapter(request, context)


async def until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Waits for `condition`; AssertionError that names `what` after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"never came true: {what}"
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def channel_to(address: str, key: str = "") -> AsyncIterator[grpc.aio.Channel]:
    channel = keyed_channel(address, key)
    try:
        yield channel
    finally:
        await channel.close()
