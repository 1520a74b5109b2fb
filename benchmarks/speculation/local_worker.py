"""A worker in this process that prefills and decodes, with the benchmark in place of its router."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from kv_transfer.in_memory import InMemoryTransport
from kv_transfer.in_memory_fabric import InMemoryFabric
from tandem.engine.config import EngineConfig
from tandem.engine.model_runner import ModelRunner
from tandem.protocol.messages import (
    Destination,
    FinishReason,
    PeerRef,
    PrefillTask,
    RequestEvent,
    RequestRef,
    Reservation,
    Role,
    SamplingParams,
    TokenLogprobs,
)
from tandem.protocol.speculation_method import SpeculationMethod
from tandem.worker.config import WorkerConfig
from tandem.worker.transfer import layout_of
from tandem.worker.worker import Worker

ROUTER = "benchmark"
ME = PeerRef("worker-0", 1)


@dataclass(slots=True)
class Answer:
    """The answer to one request, with the arrival times of its tokens."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    first_s: float = 0.0
    """The arrival time of the first token, by `time.perf_counter`."""
    last_s: float = 0.0
    finished: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def decode_s(self) -> float:
        """Seconds from the first to the last token."""
        return self.last_s - self.first_s

    def take(self, event: RequestEvent) -> None:
        """Append the tokens of an event. Raises RuntimeError for a failed request."""
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        if event.token_ids:
            self.last_s = time.perf_counter()
            self.first_s = self.first_s or self.last_s
        if event.finish_reason is FinishReason.ERROR:
            raise RuntimeError(str(event.error))
        if event.finish_reason is not None:
            self.finished.set()


class LocalWorker:
    """One worker with a real engine; `open` starts and stops it."""

    def __init__(self, runner: ModelRunner, engine: EngineConfig, method: SpeculationMethod) -> None:
        config = WorkerConfig(ME.worker_id, Role.BOTH, engine, kv_lease_s=600.0, speculate=method, prefix_cache=False)
        layout, fabric = layout_of(runner.cache), InMemoryFabric()
        self._fabric = fabric
        self.worker = Worker(config, ME, runner, layout, lambda notice: InMemoryTransport(fabric, layout, ME, notice))
        self._answers: dict[str, Answer] = {}
        self._sent = 0

    @classmethod
    @asynccontextmanager
    async def open(cls, runner: ModelRunner, engine: EngineConfig, method: SpeculationMethod) -> AsyncIterator[Self]:
        """Run a worker that proposes draft tokens by `method`, until the context ends."""
        local_worker = cls(runner, engine, method)
        local_worker.worker.start("")
        reader = asyncio.create_task(local_worker._read())
        try:
            yield local_worker
        finally:
            await local_worker.worker.close()
            await reader
            local_worker._fabric.close()

    @property
    def speculation(self) -> Any:
        """The worker's `Speculation`; None = it has none."""
        return self.worker._schedulers.decode.speculation

    def send(self, prompt: Sequence[int], sampling: SamplingParams, adapter: str = "") -> Answer:
        """Send a request, and return its answer, which fills as tokens arrive; `adapter` is an adapter's hash."""
        self._sent += 1
        answer, ref = Answer(), RequestRef(f"q{self._sent}", 1)
        self._answers[ref.request_id] = answer
        lease = self.worker.reserve(Reservation(ROUTER, ref, tuple(prompt), sampling, ME, adapter=adapter)).lease
        self.worker.prefill(
            PrefillTask(ROUTER, ref, tuple(prompt), sampling, Destination(ME, "", lease), adapter=adapter)
        )
        return answer

    def refs(self) -> list[RequestRef]:
        """Return the references of all requests that were sent."""
        return [RequestRef(request_id, 1) for request_id in self._answers]

    def answer_of(self, event: RequestEvent) -> Answer:
        """Return the answer of the request that an event belongs to."""
        return self._answers[event.ref.request_id]

    async def _read(self) -> None:
        async for step in self.worker.attach(ROUTER).messages():
            for event in step.each():
                self.answer_of(event).take(event)
