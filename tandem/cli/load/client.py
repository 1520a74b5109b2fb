"""A client process: sends its share of a workload, each request at its due time, and records the answers.

Requests are built before the start, so that during the load a client only sends, receives and reads the clock. The
clock is `time.monotonic`, which all processes of one host share.
"""

import asyncio
import gc
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection as Pipe
from typing import Any, Generic, Protocol, TypeVar

from tandem.cli.load.record import WRONG_LENGTH, RequestRecord
from tandem.cli.load.workload import Arrival, prompt_ids
from tandem.client import Answer, AsyncClient, FinishReason, Request, TandemError, Tls, generate_request

M = TypeVar("M")

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
class Ready(Generic[M]):
    """A request, with its due time in seconds after the start and the requested length of its answer."""

    index: int
    due_s: float
    asked_tokens: int
    message: M


def make_ready(index: int, arrival: Arrival, seed: int, vocab_size: int, slo_class: str = "") -> Ready[Request]:
    """Build a greedy request for exactly `arrival.new_tokens` answer tokens."""
    prompt = arrival.messages[-1][1] if arrival.messages else prompt_ids(arrival.prompt, seed, vocab_size).tolist()
    request = generate_request(
        prompt, max_tokens=arrival.new_tokens, temperature=0, ignore_eos=True, slo_class=slo_class
    )
    return Ready(index, arrival.due_s, arrival.new_tokens, request)


class Client(Protocol):
    """A connection to a server: `LoadClient` over gRPC, `HttpClient` over OpenAI's HTTP API."""

    async def connected(self) -> None:
        """Wait until the server can be reached."""

    async def ask(self, ready: Ready[Any], start: float, deadline_s: float) -> RequestRecord:
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

    def requests(self) -> list[Ready[Any]]:
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

    def requests(self) -> list[Ready[Request]]:
        """Build the requests; see `Share.requests`."""
        return [make_ready(i, arrival, self.seed, self.vocab_size, self.slo_class) for i, arrival in self.arrivals]

    def connect(self) -> "LoadClient":
        """Return a client of the server; see `Share.connect`."""
        return LoadClient(self.address, self.api_key, self.tls)


class LoadClient:
    """A gRPC connection to a router. Tokens arrive when the client receives their message."""

    def __init__(self, address: str, api_key: str = "", tls: Tls | None = None) -> None:
        self._client = AsyncClient(address, api_key=api_key, tls=tls)

    async def connected(self) -> None:
        """Make one call, because a process's first call takes several times as long as later ones."""
        await self._client.model()

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()

    async def ask(self, ready: Ready[Request], start: float, deadline_s: float) -> RequestRecord:
        """Send one request; see `Client.ask`."""
        token_s: list[float] = []
        chunks, error, retry_after_s, answer = 0, "", 0.0, None
        sent_s = time.monotonic() - start
        try:
            async with self._client.stream(ready.message, timeout_s=deadline_s - sent_s) as stream:
                async for chunk in stream:
                    if chunk.token_ids:
                        token_s += [chunk.received_s - start] * len(chunk.token_ids)
                        chunks += 1
                answer = await stream.answer()
        except TandemError as failure:
            error, retry_after_s = failure.code, failure.retry_after_s
        record = RequestRecord(
            ready.index, ready.due_s, sent_s, time.monotonic() - start, tuple(token_s), ready.asked_tokens, chunks
        )
        if answer is None:
            return replace(record, error=error, retry_after_s=retry_after_s)
        return _with_answer(record, answer)


def _with_answer(record: RequestRecord, answer: Answer) -> RequestRecord:
    whole = len(record.token_s) == answer.completion_tokens == record.asked_tokens
    return replace(
        record,
        finish=answer.finish_reason.name,
        error="" if whole and answer.finish_reason is FinishReason.LENGTH else WRONG_LENGTH,
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
        cached_tokens=answer.cached_tokens,
        prefill_worker=answer.timeline.prefill_worker,
        decode_worker=answer.timeline.decode_worker,
    )


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

    def __init__(self, client: Client, everything: list[Ready[Any]], start: float, deadline_s: float) -> None:
        self._client, self._everything, self._start, self._deadline_s = client, everything, start, deadline_s
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

    async def _ask(self, ready: Ready[Any]) -> None:
        self.records.append(await self._client.ask(ready, self._start, self._deadline_s))
