"""The server under test: sends requests as their clients behave, and reads its load from its metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tandem.cli.bench.servers import error_reason
from tandem.cli.check.answer import Answer
from tandem.cli.check.request import CheckRequest
from tandem.protocol.errors import Unavailable

OPTIONAL_FIELDS = ("cache_salt", "logprobs", "ignore_eos")
"""Fields of requests that checks omit if the server refuses them."""
REQUEST_GAUGES = ("num_requests_running", "num_requests_waiting", "num_running_reqs", "num_queue_reqs")
"""The ends of the names of metrics that count requests in a server: those of vLLM and Tandem, and those of SGLang."""
BUSY = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
"""The statuses after which a request is sent again."""
_RETRY_S = 1.0
_REASON_CHARACTERS = 300
_RECEIVE_BUFFER_BYTES = 4096
"""The receive buffer of clients that pause, so small that the server soon cannot send more."""
_POLL_S = 0.1


class CheckedServer:
    """A server with OpenAI's completions API at `url`, which ends with /v1."""

    def __init__(
        self, url: str, model: str, api_key: str, timeout_s: float, metrics: tuple[str, str] = ("", "")
    ) -> None:
        """`metrics` are the URL of the metrics and their key; the default is /metrics of the server, with `api_key`."""
        self.url, self.model, self.timeout_s = url.rstrip("/"), model, timeout_s
        self.unsupported: frozenset[str] = frozenset()
        self.api_key = api_key
        address = urlsplit(self.url)
        self._root = f"{address.scheme}://{address.netloc}"
        self._metrics_url, self._metrics_key = metrics if metrics[0] else (f"{self._root}/metrics", api_key)
        # Connections are not kept: after a restart, a request would fail on one that was opened before.
        limits = httpx.Limits(max_keepalive_connections=0)
        tls = ssl.create_default_context() if address.scheme == "https" else False
        self.http = httpx.AsyncClient(timeout=None, limits=limits, verify=tls)
        buffer = (socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        self._pausing = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(verify=tls, socket_options=[buffer]), timeout=None
        )

    async def close(self) -> None:
        """Close the clients."""
        await self.http.aclose()
        await self._pausing.aclose()

    async def probe(self) -> None:
        """Send a small request, and find the optional fields that the server refuses.

        Raises Unavailable with the server's reason if it refuses requests without them.
        """
        fields = frozenset(OPTIONAL_FIELDS)
        self.unsupported = fields
        plain = await self.send(CheckRequest("The sea is", 1, stream=False))
        if plain.error:
            raise Unavailable(f"{self.url} does not answer a completion: {plain.error}")
        for field in OPTIONAL_FIELDS:
            self.unsupported = fields - {field}
            asked = CheckRequest("The sea is", 1, stream=False, cache_salt="check", logprobs=True)
            if not (await self.send(asked)).error:
                fields -= {field}
        self.unsupported = fields

    async def send(self, request: CheckRequest, others_ended: asyncio.Event | None = None) -> Answer:
        """Send one request and return what its client reads of the answer.

        The server may refuse it with 429 or 503; it is then sent again after the time in `Retry-After`.
        """
        answer, began_s = Answer(), time.monotonic()
        leaves = request.leave_after_s is not None
        try:
            async with asyncio.timeout(request.leave_after_s if leaves else self.timeout_s):
                while (wait_s := await self._exchange(request, answer, began_s, others_ended)) is not None:
                    answer.refusals += 1
                    await asyncio.sleep(wait_s)
        except TimeoutError:
            answer.left = leaves
            answer.error = "" if leaves else f"it did not end within {self.timeout_s:g} s"
        except (httpx.HTTPError, ValueError) as failure:
            answer.error = f"{type(failure).__name__}: {failure}"[:_REASON_CHARACTERS]
        answer.duration_s = time.monotonic() - began_s
        return answer

    def script(self, requests: Sequence[CheckRequest]) -> list[str]:
        """Return shell commands that send these requests together with curl and wait for them."""
        curls = [self.curl(request) for request in requests]
        return curls if len(curls) == 1 else [*(f"({curl}) &" for curl in curls), "wait"]

    def curl(self, request: CheckRequest) -> str:
        """Return the shell command that sends the request with curl."""
        return request.curl(self.url, request.body(self.model, self.unsupported), with_key=bool(self.api_key))

    async def prompt_tokens(self, prompt: str) -> int | None:
        """Return the number of tokens of a prompt by the server's /tokenize, or None if it has none."""
        with contextlib.suppress(httpx.HTTPError, ValueError, TypeError, KeyError):
            body = {"model": self.model, "prompt": prompt}
            response = await self.http.post(
                f"{self._root}/tokenize", json=body, headers=_key(self.api_key), timeout=self.timeout_s
            )
            if response.status_code == HTTPStatus.OK:
                return int(response.json()["count"])
        return None

    @property
    def option(self) -> str:
        """The option of `tandem check` that names the server."""
        return f"--url {self.url}"

    async def requests_inside(self) -> int | None:
        """Return the number of running and waiting requests by the server's metrics, or None if they do not say."""
        with contextlib.suppress(httpx.HTTPError, ValueError):
            response = await self.http.get(self._metrics_url, headers=_key(self._metrics_key), timeout=self.timeout_s)
            if response.status_code == HTTPStatus.OK:
                families = text_string_to_metric_families(response.text)
                samples = [sample for family in families for sample in family.samples]
                counts = [sample.value for sample in samples if sample.name.endswith(REQUEST_GAUGES)]
                return int(sum(counts)) if counts else None
        return None

    async def idle_within(self, seconds: float) -> int | None:
        """Wait until the server has no request, and return the number left after `seconds`; None as above."""
        deadline_s = time.monotonic() + seconds
        while True:
            inside = await self.requests_inside()
            if not inside or time.monotonic() > deadline_s:
                return inside
            await asyncio.sleep(_POLL_S)

    async def _exchange(
        self, request: CheckRequest, answer: Answer, began_s: float, others_ended: asyncio.Event | None
    ) -> float | None:
        """Send the request once and read the answer; return the seconds to wait if the server is busy, else None."""
        body = await self.body(request)
        client = self._pausing if request.pauses else self.http
        async with client.stream(
            "POST", f"{self.url}/completions", json=body, headers=request.headers(self.api_key)
        ) as response:
            answer.status = response.status_code
            if response.status_code in BUSY:
                return retry_after_s(response)
            if response.status_code != HTTPStatus.OK:
                answer.error = f"HTTP {response.status_code}: {error_reason(await response.aread())}"
            elif request.stream:
                await self._read(request, answer, response, began_s, others_ended)
            else:
                answer.add(json.loads(await response.aread()))
                answer.complete = True
        return None

    async def body(self, request: CheckRequest) -> dict[str, Any]:
        """Return the JSON of the request, when it can be sent."""
        return request.body(self.model, self.unsupported)

    async def _read(
        self,
        request: CheckRequest,
        answer: Answer,
        response: httpx.Response,
        began_s: float,
        others_ended: asyncio.Event | None,
    ) -> None:
        async with contextlib.aclosing(_events(response)) as events:
            async for data in events:
                if data == "[DONE]":
                    answer.complete = True
                    return
                answer.add(json.loads(data))
                answer.events += 1
                if answer.events == 1:
                    answer.first_token_s = time.monotonic() - began_s
                    if request.pauses and others_ended is not None:
                        await others_ended.wait()
                if answer.events == request.leave_after_events:
                    answer.left = True
                    return
        answer.error = answer.error or "the stream ended without [DONE]"


async def _events(response: httpx.Response) -> AsyncGenerator[str, None]:
    """Yield the data of each server-sent event."""
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            yield line[len("data:") :].strip()


def _key(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def retry_after_s(response: httpx.Response) -> float:
    """Return the seconds in the header Retry-After, or one second."""
    try:
        return max(0.0, float(response.headers.get("retry-after", _RETRY_S)))
    except ValueError:  # a date
        return _RETRY_S
