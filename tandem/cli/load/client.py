"""A client process: sends its share of a workload, each request when it is due, and records the answers.

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
"""Seconds before the due time from which one last sleep is exact enough."""
_PROGRESS_S = 0.25
"""Seconds between two reports of a client's progress."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The numbers of a share's requests that were sent, have ended, and have ended with an error."""

    sent: int = 0
    ended: int = 0
    failed: int = 0
    tokens: int = 0
    """Tokens of the answers that have ended."""


@dataclass(frozen=True, slots=True)
class ShareResult:
    """A record for each request of the share, and the share of one core that the client used.

    After a stop the requests that had not ended have no record.
    """

    records: tuple[RequestRecord, ...]
    cpu_share: float


@dataclass(frozen=True, slots=True)
class Ready:
    """A serialized request, with its due time and the expected length of its answer."""

    index: int
    due_s: float
    asked_tokens: int
    message: bytes


def make_ready(index: int, arrival: Arrival, seed: int, vocab_size: int, slo_class: str = "") -> Ready:
    """Returns a greedy request for exactly the workload's number of tokens."""
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
    """A connection to a server: `LoadClient` by gRPC, `HttpClient` by OpenAI's HTTP API."""

    async def connected(self) -> None:
        """Waits until the server can be reached."""

    async def ask(self, ready: Ready, start: float, give_up_s: float) -> RequestRecord:
        """Sends `ready` now; the record's times count from `start`, a time of `time.monotonic`."""

    async def close(self) -> None:
        """Closes the connections."""


class Share(Protocol):
    """The requests of one client process, and the server; it can be sent to that process."""

    @property
    def give_up_s(self) -> float:
        """Seconds after the common start from which on no answer is awaited."""

    def requests(self) -> list[Ready]:
        """Returns the requests, built before the start."""

    def connect(self) -> Client:
        """Returns a client of the server, for the running event loop."""


@dataclass(frozen=True, slots=True)
class GrpcShare:
    """The requests of one client by number in the workload, and the router. No answer is awaited after `give_up_s`."""

    address: str
    api_key: str
    seed: int
    vocab_size: int
    arrivals: tuple[tuple[int, Arrival], ...]
    give_up_s: float
    slo_class: str = ""
    tls: Tls | None = None

    def requests(self) -> list[Ready]:
        """Returns the serialized requests."""
        return [make_ready(i, arrival, self.seed, self.vocab_size, self.slo_class) for i, arrival in self.arrivals]

    def connect(self) -> "LoadClient":
        """Returns a client of the router."""
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
        """Waits for the connection and makes one call, since a process's first call takes several times as long."""
        await self._channel.channel_ready()
        call: Any = self._channel.unary_unary(_GET_MODEL)
        await call(inference_pb2.GetModelInfoRequest().SerializeToString(), metadata=self._connection.metadata)

    async def close(self) -> None:
        """Closes the connection."""
        await self._channel.close()

    async def ask(self, ready: Ready, start: float, give_up_s: float) -> RequestRecord:
        """Sends `ready` now; the record's times count from `start`, a time of `time.monotonic`."""
        token_s: list[float] = []
        chunks, error, complete = 0, "", inference_pb2.Complete()
        sent_s = time.monotonic() - start
        try:
            async for reply in self._replies(ready.message, give_up_s - sent_s):
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
    """Runs the client process: says "ready", takes the common start, and sends its `ShareResult` at the end."""
    asyncio.run(_run_share(pipe, share))


async def _run_share(pipe: Pipe, share: Share) -> None:
    """Sends each request when it is due after the start received by `pipe`; sends a `ShareResult` back.

    Until then it sends its `Progress` regularly. Another message stops it, and so does the end of the pipe.
    """
    everything, client = share.requests(), share.connect()
    # The process that started this one is interrupted by the same Ctrl-C, and stops it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    await client.connected()
    # The requests are never garbage; a collection that traverses them would stop the process for tens of ms.
    gc.collect()
    gc.freeze()
    pipe.send("ready")
    start: float = await asyncio.to_thread(pipe.recv)
    busy = time.process_time()
    sending = _Sending(client, everything, start, share.give_up_s)
    await _until_done_or_stopped(pipe, sending.run(), sending)
    share_of_core = (time.process_time() - busy) / max(time.monotonic() - start, _NEAR_S)
    pipe.send(ShareResult(tuple(sending.records), share_of_core))
    await client.close()


async def _until_done_or_stopped(pipe: Pipe, work: Coroutine[Any, Any, None], sending: "_Sending") -> None:
    loop, task = asyncio.get_running_loop(), asyncio.create_task(work)
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
    """Sleeps until `moment` of `clock`; returns at once if that has passed.

    It sleeps half of the remaining time repeatedly: on some hosts a process wakes up to 15 ms late from a long sleep,
    but not from a short one.
    """
    while (left_s := moment - clock()) > _NEAR_S:
        await sleep(left_s / 2)
    await sleep(max(0.0, left_s))


class _Sending:
    """Sends each request when it is due, without waiting for others; `records` are of those that have ended."""

    def __init__(self, client: Client, everything: list[Ready], start: float, give_up_s: float) -> None:
        self._client, self._everything, self._start, self._give_up_s = client, everything, start, give_up_s
        self._sent = 0
        self.records: list[RequestRecord] = []

    @property
    def progress(self) -> Progress:
        """The progress so far."""
        failed = sum(bool(record.error) for record in self.records)
        return Progress(self._sent, len(self.records), failed, sum(record.tokens for record in self.records))

    async def run(self) -> None:
        """Ends with the last answer; a cancellation ends all requests."""
        async with asyncio.TaskGroup() as calls:
            for ready in self._everything:
                await until(self._start + ready.due_s)
                self._sent += 1
                calls.create_task(self._ask(ready))

    async def _ask(self, ready: Ready) -> None:
        self.records.append(await self._client.ask(ready, self._start, self._give_up_s))
