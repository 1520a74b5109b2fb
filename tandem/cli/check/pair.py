"""A prefill server and a decode server of vLLM with a KV connector, between which the check itself is the proxy.

The prefill server gets each request first, with one token and `kv_transfer_params` that announce a remote decode. The
`kv_transfer_params` of its reply go to the decode server together with the request, as in vLLM's example proxies.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import httpx

from tandem.cli.bench.servers import error_reason
from tandem.cli.check.request import CheckRequest
from tandem.cli.check.run import Allowed, CheckRun
from tandem.cli.check.server import BUSY, CheckedServer, retry_after_s
from tandem.protocol.errors import Unavailable

PARAMETERS = "kv_transfer_params"
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class PairServer(CheckedServer):
    """A prefill server at `prefill_url` and a decode server at `url`, both with OpenAI's completions API."""

    def __init__(self, prefill_url: str, decode_url: str, model: str, api_key: str, timeout_s: float) -> None:
        super().__init__(decode_url, model, api_key, timeout_s)
        self.prefill_url = prefill_url.rstrip("/")

    @property
    def option(self) -> str:
        """The option of `tandem check` that names both servers."""
        return f"--pair {self.prefill_url} {self.url}"

    async def body(self, request: CheckRequest) -> dict[str, Any]:
        """Compute the prompt on the prefill server, and return the request for the decode server."""
        handed_over = await self.prefill(request) if request.handed_over is None else request.handed_over
        return await super().body(request) | {PARAMETERS: handed_over}

    async def prefill(self, request: CheckRequest) -> dict[str, Any]:
        """Compute the prompt on the prefill server, and return the `kv_transfer_params` of its reply.

        Raises httpx.HTTPError with the reason of a server that refuses the prompt.
        """
        url, headers = f"{self.prefill_url}/completions", request.headers(self.api_key)
        response = await self.http.post(url, json=self._prefill_body(request), headers=headers)
        while response.status_code in BUSY:
            await asyncio.sleep(retry_after_s(response))
            response = await self.http.post(url, json=self._prefill_body(request), headers=headers)
        if response.status_code != HTTPStatus.OK:
            raise httpx.HTTPError(
                f"the prefill server answers {response.status_code}: {error_reason(response.content)}"
            )
        return dict(response.json().get(PARAMETERS) or {})

    async def probe(self) -> None:
        """Check in addition that the prefill server hands over KV. Raises Unavailable if it does not."""
        try:
            parameters = await self.prefill(CheckRequest("The sea is", 1, stream=False))
        except (httpx.HTTPError, ValueError) as failure:
            raise Unavailable(f"{self.prefill_url} does not answer a completion: {failure}") from None
        if not parameters:
            raise Unavailable(
                f"{self.prefill_url} replies without {PARAMETERS}; start it with a --kv-transfer-config whose kv_role "
                "is kv_producer or kv_both"
            )
        await super().probe()

    def curl(self, request: CheckRequest) -> str:
        """Return the shell commands of the hand-over; they use jq."""
        prefill = replace(request, leave_after_events=None, pauses=False)
        first = prefill.curl(self.prefill_url, self._prefill_body(request), with_key=bool(self.api_key))
        body = shlex.quote(json.dumps(request.body(self.model, self.unsupported)))
        merged = f"$(jq -c --argjson kv \"$kv\" '. + {{{PARAMETERS}: $kv}}' <<< {body})"
        second = request.curl(self.url, {}, with_key=bool(self.api_key)).replace("-d '{}'", f'-d "{merged}"')
        return f"kv=$({first} | jq -c .{PARAMETERS}); {second}"

    def _prefill_body(self, request: CheckRequest) -> dict[str, Any]:
        body = replace(request, stream=False, n=1).body(self.model, self.unsupported)
        return body | {"max_tokens": 1, PARAMETERS: REMOTE_DECODE}


async def hand_overs(run: CheckRun) -> None:
    """Prompts are computed and never fetched, fetched twice, or fetched after other prompts have used the pages.

    The decode server may compute a prompt again or answer with an error; an answer must be right.
    """
    pair = run.server
    assert isinstance(pair, PairServer)
    for _ in range(run.settings.rounds):
        late = [run.request() for _ in range(run.settings.concurrency)]
        abandoned = [run.request() for _ in late]
        others = [run.request() for _ in late]
        for request in late + others:  # before the hand-overs, which the others follow at once
            await run.reference(request)
        try:
            parameters = await asyncio.gather(*(pair.prefill(request) for request in (*late, *abandoned)))
        except (httpx.HTTPError, ValueError) as failure:
            raise Unavailable(
                f"{pair.prefill_url} does not answer a prompt: {type(failure).__name__} {failure}"
            ) from None
        await run.wave(others)
        fetching = [replace(request, handed_over=found) for request, found in zip(late, parameters, strict=False)]
        for _ in ("the first time", "the second time"):
            await run.wave(fetching, Allowed.CUT)
    await run.settle()
