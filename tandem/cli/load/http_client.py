"""A client process for OpenAI's HTTP API: one connection per request; answers arrive as server-sent events."""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tandem.cli.load.client import Ready
from tandem.cli.load.record import WRONG_LENGTH, RequestRecord
from tandem.cli.load.words import prompt_words
from tandem.cli.load.workload import Arrival, prompt_ids
from tandem.protocol.errors import InvalidArgument

_LINE_BYTES = 1 << 22
_READ_BYTES = 1 << 16
_DATA, _DONE = b"data: ", b"[DONE]"
_KIND_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class HttpShare:
    """The share of one client process that sends over HTTP: the server, and the arrivals whose requests it sends.

    Each arrival is paired with its number in the workload. Requests that have not ended `deadline_s` seconds after the
    start count as failed.
    """

    url: str
    model: str
    api_key: str
    seed: int
    vocab_size: int
    arrivals: tuple[tuple[int, Arrival], ...]
    deadline_s: float
    chat: bool = False
    """True if requests go to /chat/completions, with words in place of token ids; False for /completions."""
    ignore_eos: bool = True
    """True if requests set `ignore_eos`, and an answer without exactly the workload's number of tokens is an error."""

    def requests(self) -> list[Ready[bytes]]:
        """Build the requests; see `Share.requests`."""
        return [make_request(self, index, arrival) for index, arrival in self.arrivals]

    def connect(self) -> "HttpClient":
        """Return a client of the server; see `Share.connect`."""
        return HttpClient(self.url, self.ignore_eos)


def make_request(share: HttpShare, index: int, arrival: Arrival) -> Ready[bytes]:
    """Build the bytes of an HTTP request for a greedy answer with `arrival.new_tokens` tokens."""
    body = request_body(share, arrival) | {"stream": True, "stream_options": {"include_usage": True}}
    content = json.dumps(body).encode()
    address = address_of(share.url)
    head = [
        f"POST {address.path}/{route(share.chat)} HTTP/1.1",
        f"Host: {address.host}",
        "Content-Type: application/json",
        "Connection: close",
        f"Content-Length: {len(content)}",
        *([f"Authorization: Bearer {share.api_key}"] if share.api_key else []),
    ]
    return Ready(index, arrival.due_s, arrival.new_tokens, "\r\n".join([*head, "", ""]).encode() + content)


def route(chat: bool) -> str:
    """Return the path of the endpoint below /v1."""
    return "chat/completions" if chat else "completions"


def request_body(share: HttpShare, arrival: Arrival) -> dict[str, Any]:
    """Return the JSON fields of one request, except those for streaming."""
    body: dict[str, Any] = {"model": share.model, "max_tokens": arrival.new_tokens, "temperature": 0}
    if share.chat:
        messages = arrival.messages or (("user", prompt_words(arrival.prompt, share.seed)),)
        body["messages"] = [{"role": role, "content": content} for role, content in messages]
    elif arrival.messages:
        body["prompt"] = arrival.messages[-1][1]
    else:
        body["prompt"] = prompt_ids(arrival.prompt, share.seed, share.vocab_size).tolist()
    return body | ({"ignore_eos": True} if share.ignore_eos else {})


@dataclass(frozen=True, slots=True)
class HttpAddress:
    """The parts of a server's URL."""

    host: str
    port: int
    path: str
    tls: bool


def address_of(url: str) -> HttpAddress:
    """Parse "http://HOST:PORT/v1" or "https://…". Raises InvalidArgument for any other text."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidArgument("--url", f"{url!r} is no address like http://127.0.0.1:8000/v1")
    tls = parts.scheme == "https"
    return HttpAddress(parts.hostname, port or (443 if tls else 80), parts.path.rstrip("/"), tls)


class HttpClient:
    """A client with one connection per request. The time of a token is the time at which its event arrives."""

    def __init__(self, url: str, ignore_eos: bool = True) -> None:
        self._address = address_of(url)
        self._tls = ssl.create_default_context() if self._address.tls else None
        self._ignore_eos = ignore_eos

    async def connected(self) -> None:
        """Open and close a connection, so that an unreachable server is reported before the load begins."""
        _, writer = await self._open()
        writer.close()

    async def close(self) -> None:
        """Do nothing, because no connection stays open between requests."""

    async def ask(self, ready: Ready[bytes], start: float, deadline_s: float) -> RequestRecord:
        """Send one request; see `Client.ask`."""
        sent_s = time.monotonic() - start
        answer = _Answer()
        try:
            async with asyncio.timeout(deadline_s - sent_s):
                await self._read(ready, start, answer)
        except (OSError, asyncio.IncompleteReadError) as failure:  # TimeoutError included
            answer.error = type(failure).__name__
        whole = answer.tokens == ready.asked_tokens if self._ignore_eos else bool(answer.moments)
        return RequestRecord(
            ready.index,
            ready.due_s,
            sent_s,
            time.monotonic() - start,
            tuple(answer.moments),
            ready.asked_tokens,
            len(answer.moments),
            error=answer.error or ("" if whole else WRONG_LENGTH),
            retry_after_s=answer.retry_after_s,
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.tokens,
            cached_tokens=answer.cached_tokens,
        )

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        address = self._address
        return await asyncio.open_connection(address.host, address.port, ssl=self._tls, limit=_LINE_BYTES)

    async def _read(self, ready: Ready[bytes], start: float, answer: "_Answer") -> None:
        reader, writer = await self._open()
        try:
            writer.write(ready.message)
            await writer.drain()
            status = (await reader.readline()).split()[1:2]
            headers = await _headers(reader)
            body = _lines(_body(reader, headers))
            if status != [b"200"]:
                code = status[0].decode("latin-1") if status else "that is none"
                answer.error = f"HTTP {code}"
                answer.retry_after_s = _seconds(headers.get(b"retry-after", b""))
                return
            async for line in body:
                if line.startswith(_DATA) and not answer.take(line[len(_DATA) :], time.monotonic() - start):
                    return
        except ValueError as failure:
            answer.error = str(failure)[:_KIND_CHARACTERS]
        finally:
            writer.close()


async def _headers(reader: asyncio.StreamReader) -> Mapping[bytes, bytes]:
    headers = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.partition(b":")
        headers[name.lower()] = value.strip().lower()
    return headers


async def _body(reader: asyncio.StreamReader, headers: Mapping[bytes, bytes]) -> AsyncIterator[bytes]:
    """Yield the parts of the response body as they arrive, with HTTP's chunked encoding removed."""
    if headers.get(b"transfer-encoding") != b"chunked":
        while piece := await reader.read(_READ_BYTES):
            yield piece
        return
    while size := int((await reader.readline()).partition(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    left = b""
    async for piece in pieces:
        *lines, left = (left + piece).split(b"\n")
        for line in lines:
            yield line
    if left:
        yield left


class _Answer:
    """The part of an answer that has arrived, and the times of its events."""

    def __init__(self) -> None:
        self.moments: list[float] = []
        self.prompt_tokens = self.completion_tokens = self.cached_tokens = 0
        self.error = ""
        self.retry_after_s = 0.0

    @property
    def tokens(self) -> int:
        """The answer's length in tokens as the server reports it, or the number of events if it does not."""
        return self.completion_tokens or len(self.moments)

    def take(self, data: bytes, moment: float) -> bool:
        """Process the data of one event; return False if it ends the stream. Raises ValueError for invalid JSON."""
        if data.startswith(_DONE):
            return False
        event = json.loads(data)
        if event.get("error"):
            self.error = _kind(event["error"])
        if usage := event.get("usage"):
            self.prompt_tokens = usage.get("prompt_tokens") or 0
            self.completion_tokens = usage.get("completion_tokens") or 0
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if event.get("choices") and _has_token(event["choices"][0]):
            self.moments.append(moment)
        return True


def _seconds(header: bytes) -> float:
    """Return the value of a Retry-After header in seconds; 0 if it has none, or a date."""
    return float(header) if header.isdigit() else 0.0


def _has_token(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    fields = ("content", "reasoning_content", "reasoning", "tool_calls")
    return bool(choice.get("text")) or any(delta.get(field) for field in fields)


def _kind(error: object) -> str:
    """Return the code or type of an error that the server sent in the stream, or its text if it has neither."""
    if isinstance(error, Mapping):
        error = error.get("code") or error.get("type") or error.get("message")
    return str(error)[:_KIND_CHARACTERS]
