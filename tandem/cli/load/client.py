"""A client process: sends its share of a workload, each request at its due time, and records the answers.

Requests are built and serialized before the start, so that during the load a client only sends, receives and reads the
clock. The clock is `time.monotonic`, which all processes of one host share.
"""

import asyncio
import gc
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from typing import Any, Protocol

import grpc.aio

from tandem.cli.load.record import WRONG_LENGTH, RequestRecord
from tandem.cli.load.workload import Arrival, prompt_ids
from tandem.client import Tls
from tandem.client.connection import Connection
from tandem.protocol.generated.tandem.v1 import inference_pb2
from tandem.protocol.messages import FinishReason

_GENERATE = "/tandem.v1.Inference/Generate"
_GET_MODEL = "/tandem.v1.Inference/GetModelInfo"
_NEAR_S = 0.002
"""Seconds before the due time at which `until` makes its last sleep, which is short enough to end on time."""
_PROGRESS_S = 0.25
"""Interval between two progress reports of a client, in seconds."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a share: the numbers of requests that were sent, have ended, and ended with an error."""

    sent: int = 0
    ended: int = 0
    failed: int = 0
    tokens: int = 0
    """The number of tokens in all answers that have ended."""


@dataclass(frozen=True, slots=True)
class ShareResult:
    """The result of one client process: a record per request, and the CPU use of the process.

    `cpu_share` is a fraction of one core. If the load was stopped, requests that had not ended have no record.
    """

    records: tuple[RequestRecord, ...]
    cpu_share: float


@dataclass(frozen=True, slots=True)
class Ready:
    """A serialized request, with its due time in seconds after the start and the requested length of its answer."""

    index: int
    due_s: float
    asked_tokens: int
    message: bytes


def make_ready(index: int, arrival: Arrival, seed: int, vocab_size: int, slo_class: str = "") -> Ready:
    """Build a greedy request for exactly `arrival.new_tokens` answer tokens."""
    options = inference_pb2.GenerationOptions(
        max_tokens=arrival.new_tokens, temperature=0, ignore_eos=True, slo_class=slo_class
    )
    request = inference_pb2.GenerateRequest(options=options)
    if arrival.messages:
        request.text = arrival.messages[-1][1]
    else:
        request.token_ids.ids.extend(prompt_ids(arrival.prompt, seed, vocab_size).tolist())
    return Ready(index, arrival.due_s, arrival.new_tokens, request.SerializeToString())


class Client(Protocol):
    """A connection to a server: `LoadClient` over gRPC, `HttpClient` over OpenAI's HTTP API."""

    async def connected(self) -> None:
        """Wait until the server can be reached."""

    async def ask(self, ready: Ready, start: float, deadline_s: float) -> RequestRecord:
        """Send `ready` immediately, and return its record when it has ended.

        The record's times are relative to `start`, a time of `time.monotonic`. A request that has not
        ended `deadline_s` seconds after `start` counts as failed.
        """

    async def close(self) -> None:
        """Close the connections."""


class Share(Protocol):
    """The requests and the server of one client process; the object is pickled to start that process."""

    @property
    def deadline_s(self) -> float:
        """Seconds after the common start at which requests that have not ended count as failed."""

    def requests(self) -> list[Ready]:
        """Build the requests, before the start."""

    def connect(self) -> Client:
        """Return a client of the server, for the running event loop."""


@dataclass(frozen=True, slots=True)
class GrpcShare:
    """The share of one client process that sends over gRPC: the router, and the arrivals whose requests it sends.

    Each arrival is paired with its number in the workload. Requests that have not ended `deadline_s` seconds after the
    start count as failed.
    """

    address: str
    api_key: str
    seed: int
    vocab_size: int
    arrivals: tuple[tuple[int, Arrival], ...]
    deadline_s: float
    slo_class: str = ""
    tls: Tls | None = None

    def requests(self) -> list[Ready]:
        """Build the requests; see `Share.requests`."""
        return [make_ready(i, arrival, self.seed, self.vocab_size, self.slo_class) for i, arrival in self.arrivals]

    def connect(self) -> "LoadClient":
        """Return a client of the server; see `Share.connect`."""
        return LoadClient(self.address, self.api_key, self.tls)


class LoadClient:
    """A gRPC connection to a router."""

    def __init__(self, address: str, api_key: str = "", tls: Tls | None = None) -> None:
        self._connection = Connection(address, api_key, tls)
        self._channel = self._connection.open_async()
        self._generate: Any = self._channel.unary_stream(
            _GENERATE, response_deserializer=inference_pb2.GenerateResponse.FromString
        )

    async def connected(self) -> None:
        """Wait for the connection and make one call.

        A process's first call takes several times as long as later ones.
        """
        await self._channel.channel_ready()
        call: Any = self._channel.unary_unary(_GET_MODEL)
        await call(inference_pb2.GetModelInfoRequest().SerializeToString(), metadata=self._connection.metadata)

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def ask(self, ready: Ready, start: float, deadline_s: float) -> RequestRecord:
        """Send one request; see `Client.ask`."""
        token_s: list[float] = []
        chunks, error, complete = 0, "", inference_pb2.Complete()
        sent_s = time.monotonic() - start
        try:
            async for reply in self._replies(ready.message, deadline_s - sent_s):
                moment = time.monotonic() - start
                if reply.HasField("complete"):
                    complete = reply.complete
                elif reply.chunk.token_ids:
                    token_s += [moment] * len(reply.chunk.token_ids)
                    chunks += 1
        except grpc.aio.AioRpcError as failure:
            error = self._connection.error(failure).code
        ended_s = time.monotonic() - start
        finish = "" if error else _finish(complete)
        whole = len(token_s) == complete.completion_tokens == ready.asked_tokens
        return RequestRecord(
            ready.index,
            ready.due_s,
            sent_s,
            ended_s,
            tuple(token_s),
            ready.asked_tokens,
            chunks,
            finish,
            error or ("" if whole and finish == FinishReason.LENGTH.name else WRONG_LENGTH),
            complete.prompt_tokens,
            complete.completion_tokens,
            complete.cached_tokens,
            complete.timeline.prefill_worker,
            complete.timeline.decode_worker,
        )

    def _replies(self, message: bytes, timeout_s: float) -> AsyncIterator[inference_pb2.GenerateResponse]:
        replies: AsyncIterator[inference_pb2.GenerateResponse] = self._generate(
            message, timeout=timeout_s, metadata=self._connection.metadata
        )
        return replies


def _finish(complete: inference_pb2.Complete) -> str:
    return FinishReason(complete.finish_reason).name if complete.finish_reason else ""


def run_share(pipe: Pipe, share: Share) -> None:
    """Run a client process.

    The process sends "ready" through the pipe, receives the common start time, and finally sends a `ShareResult`.
    """
    asyncio.run(_run_share(pipe, share))


async def _run_share(pipe: Pipe, share: Share) -> None:
    """Receive the start time from `pipe`, send each request at its due time, and send back a `ShareResult`.

    During the load the process regularly sends its `Progress`. A further message from `pipe`, or its end, stops the
    load.
    """
    everything, client = share.requests(), share.connect()
    # Ctrl-C also interrupts the parent process, which then stops this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    await client.connected()
    # The requests are never garbage. A collection that traverses them would stop the process for tens of milliseconds.
    gc.collect()
    gc.freeze()
    pipe.send("ready")
    start: float = await asyncio.to_thread(pipe.recv)
    busy = time.process_time()
    sending = _Sending(client, everything, start, share.deadline_s)
    await _until_done_or_stopped(pipe, sending.run(), sending)
    share_of_core = (time.process_time() - busy) / max(time.monotonic() - start, _NEAR_S)
    pipe.send(ShareResult(tuple(sending.records), share_of_core))
    await client.close()


async def _until_done_or_stopped(pipe: Pipe, work: Coroutine[Any, Any, None], sending: "_Sending") -> None:
    loop, task = asyncio.get_running_loop(), asyncio.create_task(work)
    # The pipe becomes readable by a message or by its end, and either stops the load.
    loop.add_reader(pipe.fileno(), task.cancel)
    try:
        while not task.done():
            await asyncio.wait((task,), timeout=_PROGRESS_S)
            pipe.send(sending.progress)
    finally:
        loop.remove_reader(pipe.fileno())
    if not task.cancelled():
        task.result()


async def until(
    moment: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Sleep until `clock` reaches `moment`; return at once if it already has.

    The function repeatedly sleeps for half of the remaining time: on some hosts a process wakes up to 15 ms late from a
    long sleep, but not from a short one.
    """
    while (left_s := moment - clock()) > _NEAR_S:
        await sleep(left_s / 2)
    await sleep(max(0.0, left_s))


class _Sending:
    """Sends each request of a share at its due time without waiting for others.

    `records` are the records of the requests that have ended.
    """

    def __init__(self, client: Client, everything: list[Ready], start: float, deadline_s: float) -> None:
        self._client, self._everything, self._start, self._give_up_s = client, everything, start, deadline_s
        self._sent = 0
        self.records: list[RequestRecord] = []

    @property
    def progress(self) -> Progress:
        failed = sum(bool(record.error) for record in self.records)
        return Progress(self._sent, len(self.records), failed, sum(record.tokens for record in self.records))

    async def run(self) -> None:
        """Send all requests, and return after the last answer. A cancellation cancels all requests."""
        async with asyncio.TaskGroup() as calls:
            for ready in self._everything:
                await until(self._start + ready.due_s)
                self._sent += 1
                calls.create_task(self._ask(ready))

    async def _ask(self, ready: Ready) -> None:
        self.records.append(await self._client.ask(ready, self._start, self._give_up_s))
