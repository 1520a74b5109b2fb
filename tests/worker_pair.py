"""Two workers with fake engines and an in-memory transfer in the test's event loop; the test acts as the router.

The test calls the workers' methods directly; the workers call each other over gRPC, as in production.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kv_transfer.in_memory import InMemoryTransport
from kv_transfer.in_memory_fabric import InMemoryFabric
from kv_transfer.layout import KVLayout
from tandem.cost_model.answer_length import SEEN_MIN
from tandem.engine.config import EngineConfig
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.net import rpc
from tandem.protocol.errors import ResourceExhausted
from tandem.protocol.generated.tandem.v1 import worker_pb2_grpc
from tandem.protocol.lifecycle.events import LifecycleEvent
from tandem.protocol.messages import (
    Destination,
    FinishReason,
    Lease,
    PeerRef,
    PrefillTask,
    PromptLogprobs,
    RequestEvent,
    RequestRef,
    Reservation,
    Role,
    SamplingParams,
    StepOutput,
    TokenLogprobs,
)
from tandem.worker.config import WorkerConfig
from tandem.worker.output_streams import OutputStream
from tandem.worker.servicer import WorkerServicer
from tandem.worker.transfer import layout_of
from tandem.worker.worker import Worker
from tests.factories import tiny_engine_config, write_tiny_model
from tests.fake_engine import FakeEngine

ROUTER = "router-1"


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for a condition that other threads bring about."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@dataclass
class RequestOutput:
    """The events that the router received for one request, in order."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    event_times: list[LifecycleEvent] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str = ""
    message: str = ""
    pages: int = 0
    cached_tokens: int = 0
    reloaded_tokens: int = 0
    preempted_at: int = -1
    """The number of tokens at which the request was preempted; -1 = never."""

    def take(self, event: RequestEvent) -> None:
        if event.token_ids:
            assert event.first_index == len(self.tokens)
        self.tokens += event.token_ids
        self.logprobs += event.logprobs
        self.prompt_logprobs = event.prompt_logprobs or self.prompt_logprobs
        self.event_times += [stamp.event for stamp in event.event_times]
        if event.transfer is not None:
            self.pages = event.transfer.pages
        self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
        self.reloaded_tokens = max(self.reloaded_tokens, event.reloaded_tokens)
        if event.preempted:
            self.preempted_at = event.first_index
        if event.finish_reason is not None:
            # Each scheduler reports its own failure, but only one of the two reports success.
            assert self.finish in (None, FinishReason.ERROR)
            assert self.finish in (None, event.finish_reason)
            self.finish = event.finish_reason
            self.error = event.error.code if event.error else ""
            self.message = event.error.message if event.error else ""


class PairedRunner(ModelRunner):
    """The engine of a worker of a `WorkerPair`."""

    @property
    def layout(self) -> KVLayout:
        return layout_of(self.cache)

    def resume(self) -> None:
        """Does nothing: only fake engines can be held."""


def tiny_engines(folder: Path, kind: str, **changes: Any) -> Callable[[int], PairedRunner]:
    """Return the function that makes real engines with a tiny model of this kind, which is written to `folder`."""
    config = tiny_engine_config(write_tiny_model(folder, kind), kv_cache_bytes=2 << 20, **changes)

    def make(_pages: int) -> PairedRunner:
        engine = PairedRunner.load(config, kernels=ReferenceKernels())
        assert isinstance(engine, PairedRunner)
        return engine

    return make


class End:
    """One worker, its engine and its server."""

    def __init__(
        self,
        worker_id: str,
        role: Role,
        fabric: InMemoryFabric,
        pages: int,
        changes: dict[str, Any],
        *,
        incarnation: int = 1,
    ) -> None:
        self.engine = changes.pop("make_engine", FakeEngine)(pages)
        step_tokens = changes.pop("max_step_tokens", 16)
        batch = changes.pop("max_batch_requests", 8)
        engine = EngineConfig.of(Path("fake"), max_step_tokens=step_tokens, max_batch_requests=batch)
        self.config = replace(
            WorkerConfig(
                worker_id, role, engine, kv_lease_s=30.0, quarantine_s=0.05, rpc_timeout_s=60.0, kv_checksum_rate=1.0
            ),
            **changes,
        )
        self.me = PeerRef(worker_id, incarnation)
        layout = self.engine.layout
        self.worker = Worker(
            self.config, self.me, self.engine, layout, lambda notice: InMemoryTransport(fabric, layout, self.me, notice)
        )

    async def start(self) -> None:
        self.server = rpc.open_server()
        worker_pb2_grpc.add_WorkerServicer_to_server(WorkerServicer(self.worker, self.worker.drain), self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        await self.server.start()
        self.worker.start(self.address)

    async def stop(self) -> None:
        self.engine.resume()
        await self.worker.close()
        await self.server.stop(None)

    def age(self, seconds: float) -> None:
        """Make all leases `seconds` older, and expire those that have reached their deadline."""
        leases = self.worker.admission._leases
        clock = leases._clock
        leases._clock = lambda: clock() + seconds
        self.worker.admission.expire()

    async def empty(self) -> None:
        """Wait until all pages are free or cached and no request or lease is left, then check pool and cache."""
        await until(lambda: not self.left())
        counts = self.engine.pool.counts()
        assert counts.free + counts.cached == counts.total
        self.worker._cache.check_integrity()

    def left(self) -> str:
        state = self.worker.report.inspect()
        assert not state.integrity_error
        held = state.pages_total - state.pages_free - state.pages_cached
        busy = held + state.pages_reserved + state.requests + state.leases
        return str(state) if busy else ""


class WorkerPair:
    """The ends `prefill` and `decode`; with `both=True` they are the same. Use it as an async context manager."""

    def __init__(
        self, *, pages: int = 64, prefill_pages: int | None = None, both: bool = False, **changes: Any
    ) -> None:
        self.fabric = InMemoryFabric()
        self._decode = lambda worker_id: End(worker_id, Role.DECODE, self.fabric, pages, dict(changes))
        if both:
            self.prefill = self.decode = End("both-0", Role.BOTH, self.fabric, pages, dict(changes))
        else:
            self.prefill = End("prefill-0", Role.PREFILL, self.fabric, prefill_pages or pages, dict(changes))
            self.decode = self._decode("decode-0")
        self.ends = [self.prefill] if both else [self.prefill, self.decode]
        self._replaced = 0
        self.outputs: dict[str, RequestOutput] = {}
        self.late: list[RequestEvent] = []
        self.steps: list[StepOutput] = []

    async def __aenter__(self) -> "WorkerPair":
        self.streams: list[OutputStream] = []
        self.readers = []
        for end in self.ends:
            await end.start()
            self.attach(end)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.fabric.release()
        for end in self.ends:
            await end.stop()
        await asyncio.gather(*self.readers)
        self.fabric.close()

    def attach(self, end: End) -> OutputStream:
        stream = end.worker.attach(ROUTER)
        self.streams.append(stream)
        self.readers.append(asyncio.create_task(self._read(stream)))
        return stream

    async def _read(self, stream: OutputStream) -> None:
        async for step in stream.messages():
            self.steps.append(step)
            for event in step.each():
                output = self.outputs.get(event.ref.request_id)
                if output is None:
                    self.late.append(event)
                else:
                    output.take(event)

    async def replace_decode(self) -> None:
        """Ends the decode worker while it has requests, and starts another one with an empty pool.

        The prefill worker is not notified, and events that the router has not received are lost.
        """
        reader = self.readers.pop()
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        await self.decode.stop()
        self._replaced += 1
        self.decode = self._decode(f"decode-{self._replaced}")
        self.ends = [self.prefill, self.decode]
        await self.decode.start()
        self.attach(self.decode)

    def reservation(
        self, name: str, prompt: list[int], sampling: SamplingParams, attempt: int = 1, prior_output_tokens: int = 0
    ) -> Reservation:
        ref = RequestRef(name, attempt)
        return Reservation(
            ROUTER, ref, tuple(prompt), sampling, self.prefill.me, prior_output_tokens=prior_output_tokens
        )

    def reserve(
        self,
        name: str,
        prompt: list[int],
        sampling: SamplingParams,
        attempt: int = 1,
        prior_output_tokens: int = 0,
        *,
        salt: str = "",
        **work: Any,
    ) -> Lease:
        reservation = self.reservation(name, prompt, sampling, attempt, prior_output_tokens)
        return self.decode.worker.reserve(replace(reservation, cache_salt=salt, **work)).lease

    def task(
        self,
        name: str,
        prompt: list[int],
        sampling: SamplingParams,
        lease: Lease | None,
        attempt: int = 1,
        *,
        prior_output_tokens: int = 0,
    ) -> PrefillTask:
        there = None if lease is None else Destination(self.decode.me, self.decode.address, lease)
        return PrefillTask(
            ROUTER, RequestRef(name, attempt), tuple(prompt), sampling, there, prior_output_tokens=prior_output_tokens
        )

    def send(
        self,
        name: str,
        prompt: list[int],
        sampling: SamplingParams,
        attempt: int = 1,
        answer: Sequence[int] = (),
        *,
        salt: str = "",
        **work: Any,
    ) -> RequestOutput:
        """Reserve pages and prefill, as the router does, and return the events that it receives.

        `answer` has the output tokens of an earlier attempt, which are computed again after the prompt; `work` are
        further fields of both messages.
        """
        output = self.outputs[name] = RequestOutput(list(answer))
        asked, prior_output_tokens = [*prompt, *answer], len(answer)
        lease = None
        if sampling.max_tokens > prior_output_tokens + 1:
            lease = self.reserve(name, asked, sampling, attempt, prior_output_tokens, salt=salt, **work)
        task = self.task(name, asked, sampling, lease, attempt, prior_output_tokens=prior_output_tokens)
        self.prefill.worker.prefill(replace(task, cache_salt=salt, **work))
        return output

    async def send_all(self, prompts: Sequence[list[int]], sampling: SamplingParams) -> list[RequestOutput]:
        """Send requests q0, q1, …, each as soon as it is admitted, and wait until they have ended or are preempted."""
        outputs = []
        for number, prompt in enumerate(prompts):
            while True:
                try:
                    outputs.append(self.send(f"q{number}", prompt, sampling))
                    break
                except ResourceExhausted:
                    await asyncio.sleep(0.01)
        await until(lambda: all(output.finish or output.preempted_at >= 0 for output in outputs))
        return outputs

    def abort(self, *names: str, attempt: int = 1) -> None:
        refs = [RequestRef(name, attempt) for name in names]
        for end in self.ends:
            end.worker.abort(ROUTER, refs)

    async def empty(self) -> None:
        for end in self.ends:
            await end.empty()


class Sender:
    """The router of a pair: sends each request, and sends it again with its tokens so far after each preemption.

    The decode worker expects answers of one token, so that it admits more requests than its pool can complete.
    """

    def __init__(self, pair: WorkerPair, max_tokens: int = 60) -> None:
        self.pair = pair
        self.attempts: dict[str, int] = {}
        self.recomputed: list[int] = []
        """The number of tokens that each attempt after a preemption computed again."""
        lengths = pair.decode.worker.admission._budget._lengths
        for _ in range(SEEN_MIN):
            lengths.learn(max_tokens, 1)

    async def run(self, name: str, prompt: list[int], sampling: SamplingParams) -> RequestOutput:
        so_far = RequestOutput()
        for attempt in range(1, 100):
            output = await self._placed(name, prompt, sampling, attempt, so_far)
            await until(lambda output=output: output.finish or 0 <= output.preempted_at <= len(output.tokens))
            if attempt > 1:
                self.recomputed.append(len(prompt) + len(so_far.tokens) - 1 - output.cached_tokens)
            output.logprobs[:0] = so_far.logprobs
            so_far, self.attempts[name] = output, attempt
            if output.finish:
                break
        return so_far

    async def _placed(
        self, name: str, prompt: list[int], sampling: SamplingParams, attempt: int, so_far: RequestOutput
    ) -> RequestOutput:
        async with asyncio.timeout(60):
            while True:
                try:
                    return self.pair.send(name, prompt, sampling, attempt, so_far.tokens)
                except ResourceExhausted:
                    await asyncio.sleep(0.002)
