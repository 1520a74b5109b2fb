"""A client process for OpenAI's HTTP API: one connection per request, answers streamed as server-sent events."""

import asyncio
import json
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

from benchmarks.load.client import Ready, send_share
from benchmarks.load.record import WRONG_LENGTH, RequestRecord
from benchmarks.load.workload import Arrival, prompt_ids
from wire.errors import InvalidArgument

_LINE_BYTES = 1 << 22
_DATA, _DONE = b"data: ", b"[DONE]"


@dataclass(frozen=True, slots=True)
class HttpShare:
    """The requests of one client by number in the workload, and the server. No answer is awaited after `give_up_s`."""

    url: str
    model: str
    api_key: str
    seed: int
    vocab_size: int
    arrivals: tuple[tuple[int, Arrival], ...]
    give_up_s: float


def run_http_share(pipe: Connection, share: HttpShare) -> None:
    """Runs the client process: says "ready", takes the common start, and sends its `ShareResult` at the end."""
    everything = [make_request(share, index, arrival) for index, arrival in share.arrivals]
    asyncio.run(send_share(pipe, HttpClient(share.url), everything, share.give_up_s))


def make_request(share: HttpShare, index: int, arrival: Arrival) -> Ready:
    """Returns the bytes of an HTTP request for a greedy completion of exactly the workload's number of tokens."""
    body = {
        "model": share.model,
        "prompt": prompt_ids(arrival.prompt, share.seed, share.vocab_size).tolist(),
        "max_tokens": arrival.new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    content = json.dumps(body).encode()
    host, _, path = address_of(share.url)
    head = [
        f"POST {path}/completions HTTP/1.1",
        f"Host: {host}",
        "Content-Type: application/json",
        "Connection: close",
        f"Content-Length: {len(content)}",
        *([f"Authorization: Bearer {share.api_key}"] if share.api_key else []),
    ]
    return Ready(index, arrival.due_s, arrival.new_tokens, "\r\n".join([*head, "", ""]).encode() + content)


def address_of(url: str) -> tuple[str, int, str]:
    """Splits "http://HOST:PORT/v1" into host, port and path. InvalidArgument for any other text."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise InvalidArgument("--url", f"{url!r} is no address like http://127.0.0.1:8000/v1")
    return parts.hostname, parts.port or 80, parts.path.rstrip("/")


class HttpClient:
    """A client with one connection per request. A token's time is that of the event with its text."""

    def __init__(self, url: str) -> None:
        self._host, self._port, _ = address_of(url)

    async def connected(self) -> None:
        """Opens and closes a connection, so that a missing server is found before the load begins."""
        _, writer = await asyncio.open_connection(self._host, self._port)
        writer.close()

    async def close(self) -> None:
        """Does nothing: no connection stays open."""

    async def ask(self, ready: Ready, start: float, give_up_s: float) -> RequestRecord:
        """Sends `ready` now; the record's times count from `start`, a time of `time.monotonic`."""
        sent_s = time.monotonic() - start
        answer = _Answer()
        try:
            async with asyncio.timeout(give_up_s - sent_s):
                await self._read(ready, start, answer)
        except OSError as failure:  # TimeoutError included
            answer.error = type(failure).__name__
        whole = answer.completion_tokens == ready.asked_tokens
        return RequestRecord(
            ready.index,
            ready.due_s,
            sent_s,
            time.monotonic() - start,
            tuple(answer.moments),
            ready.asked_tokens,
            len(answer.moments),
            error=answer.error or ("" if whole else WRONG_LENGTH),
            completion_tokens=answer.completion_tokens,
        )

    async def _read(self, ready: Ready, start: float, answer: "_Answer") -> None:
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=_LINE_BYTES)
        try:
            writer.write(ready.message)
            await writer.drain()
            status = (await reader.readline()).split()
            if status[1:2] != [b"200"]:
                raise ValueError(f"the server answered {status!r}")
            while line := await reader.readline():
                if line.startswith(_DATA) and not answer.take(line[len(_DATA) :], time.monotonic() - start):
                    return
        except ValueError as refusal:
            answer.error = str(refusal)
        finally:
            writer.close()


class _Answer:
    """The received part of one answer."""

    def __init__(self) -> None:
        self.moments: list[float] = []
        self.completion_tokens = 0
        self.error = ""

    def take(self, data: bytes, moment: float) -> bool:
        """Takes one event's data; returns False after the last. ValueError for invalid JSON."""
        if data.startswith(_DONE):
            return False
        event = json.loads(data)
        if event.get("error"):
            self.error = str(event["error"])
        if event.get("usage"):
            self.completion_tokens = event["usage"]["completion_tokens"]
        if event.get("choices") and event["choices"][0].get("text"):
            self.moments.append(moment)
        return True
