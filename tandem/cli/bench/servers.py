"""The server under load: its model, its warm-up, and the distribution of a workload to client processes."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Protocol
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from tandem.cli.load.client import Progress, ShareResult
from tandem.cli.load.http_client import HttpShare, address_of, request_body, route
from tandem.cli.load.run import LoadSettings, deal, run_clients, shares_of
from tandem.cli.load.target import WARM_SEED, Target, find_model, touch
from tandem.cli.load.words import WordLengths
from tandem.cli.load.workload import Arrival, Block, Workload
from tandem.client import Tls
from tandem.protocol.errors import InvalidArgument, Unauthenticated, Unavailable

GRPC = "grpc"
_ANSWER_S = 120.0
_LIST_S = 10.0
_WARM_TOKENS = 8
_PROBE_WORDS = 256
"""Number of words in the longer of the two prompts with which the tokens per word are measured.

The prompt has fewer words if this is more than an eighth of the context.
"""
_REASON_CHARACTERS = 300


class Server(Protocol):
    """A server under load, reached over gRPC or HTTP."""

    @property
    def model(self) -> str:
        """The name of the served model."""

    def warm_up(self, requests: int) -> None:
        """Send `requests` concurrent requests, which are not counted in the results, and wait for their answers.

        Raises a TandemError with the server's reason.
        """

    def send(
        self, workload: Workload, settings: LoadSettings, on_progress: Callable[[Progress], None] | None
    ) -> list[ShareResult]:
        """Send each request at its due time, and return one result per client process."""

    def fitted(self, workload: Workload) -> Workload:
        """Return the workload with its requests cut to the model's context, or unchanged if the context is unknown."""


@dataclass(frozen=True, slots=True)
class GrpcServer:
    """A router of Tandem, reached over gRPC."""

    target: Target

    @property
    def model(self) -> str:
        """The name of the served model."""
        return str(self.target.view.model.model)

    def warm_up(self, requests: int) -> None:
        """Send a fixed number of concurrent requests; if `requests` is 0, send none."""
        if requests:
            touch(self.target)

    def send(
        self, workload: Workload, settings: LoadSettings, on_progress: Callable[[Progress], None] | None
    ) -> list[ShareResult]:
        """Send each request at its due time; see `Server.send`."""
        if any(len(arrival.messages) > 1 for arrival in workload.arrivals):
            raise InvalidArgument("--dataset", "has conversations; give an http:// --url, with --api chat")
        return run_clients(shares_of(self.target, workload, settings), on_progress=on_progress)

    def fitted(self, workload: Workload) -> Workload:
        """Return the workload cut to the model's context; see `Server.fitted`."""
        return workload.fitted(self.target.context)


@dataclass(slots=True)
class HttpServer:
    """Any server with OpenAI's HTTP API."""

    share: HttpShare
    """The server's address and the settings of all requests; `send` replaces its arrivals by those of the workload."""
    context: int | None = None
    words: WordLengths = WordLengths()  # noqa: RUF009  # frozen

    @property
    def model(self) -> str:
        """The name of the served model."""
        return self.share.model

    def warm_up(self, requests: int) -> None:
        """Send `requests` concurrent requests.

        For chat, two other requests are sent first, to measure how many tokens the server counts per word of a prompt.
        """
        long = _PROBE_WORDS if self.context is None else min(_PROBE_WORDS, self.context // 8)
        short = max(1, long // 4)
        if self.share.chat and short < long:
            counted = [(words, self._probe(0, words)) for words in (short, long)]
            if all(tokens for _, tokens in counted):
                self.words = WordLengths.of(counted[0], counted[1])
        with ThreadPoolExecutor(max_workers=max(1, requests)) as pool:
            list(pool.map(lambda number: self._probe(1 + number, short), range(requests)))

    def send(
        self, workload: Workload, settings: LoadSettings, on_progress: Callable[[Progress], None] | None
    ) -> list[ShareResult]:
        """Send each request at its due time; see `Server.send`."""
        if not self.share.chat and any(len(arrival.messages) > 1 for arrival in workload.arrivals):
            raise InvalidArgument("--dataset", "has conversations; give --api chat")
        asked = self.words.in_words(workload) if self.share.chat else workload
        deadline_s = workload.seconds + settings.drain_s
        shares = [
            replace(self.share, seed=workload.seed, arrivals=arrivals, deadline_s=deadline_s)
            for arrivals in deal(asked, settings.clients)
        ]
        return run_clients(shares, on_progress=on_progress)

    def fitted(self, workload: Workload) -> Workload:
        """Return the workload cut to the model's context; see `Server.fitted`."""
        return workload if self.context is None else workload.fitted(self.context)

    def _probe(self, number: int, length: int) -> int:
        """Send one request without streaming, and return its number of prompt tokens, or 0 if the server reports none.

        `length` is the length of the prompt in tokens, or in words for chat. Another `number` gives another prompt.
        """
        share = replace(self.share, seed=WARM_SEED)
        body = request_body(share, Arrival(0.0, (Block(number, length),), _WARM_TOKENS))
        answer = _call(f"{share.url}/{route(share.chat)}", share.api_key, body, _ANSWER_S)
        return int((answer.get("usage") or {}).get("prompt_tokens") or 0)


def find_server(
    url: str, api_key: str, model: str, api: str, vocab_size: int, *, ignore_eos: bool, tls: Tls | None = None
) -> Server:
    """Return the server at `grpc://HOST:PORT`, `http://…` or `https://…`, with its first model if `model` is empty.

    `tls` applies to gRPC. Raises Unavailable if the server does not respond.
    """
    if url.startswith(f"{GRPC}://"):
        if model:
            raise InvalidArgument("--model", "is of HTTP; a router has one model by gRPC")
        if not (address := urlsplit(url).netloc):
            raise InvalidArgument("--url", f"{url!r} is no address like grpc://127.0.0.1:50051")
        return GrpcServer(find_model(address, api_key, tls))
    url = with_version(url)
    listed = list_models(url, api_key)
    card = next((entry for entry in listed if entry["id"] == model), None) if model else listed[0]
    if card is None:
        names = ", ".join(str(entry["id"]) for entry in listed)
        raise InvalidArgument("--model", f"{model!r} is not one of the server's models: {names}")
    share = HttpShare(url, str(card["id"]), api_key, 0, vocab_size, (), 0.0, chat=api == "chat", ignore_eos=ignore_eos)
    context = card.get("max_model_len")
    return HttpServer(share, context if isinstance(context, int) else None)


def list_models(url: str, api_key: str = "") -> Sequence[dict[str, Any]]:
    """Return the entries of the server's model list, each with an `id`. Raises Unavailable if the list is empty."""
    address_of(url)
    try:
        listed = _call(f"{url.rstrip('/')}/models", api_key, None, _LIST_S)["data"]
        if listed and all(entry["id"] for entry in listed):
            return list(listed)
    except (LookupError, TypeError):
        pass
    raise Unavailable(f"{url} lists no models; is it an OpenAI server's address, with /v1?")


def with_version(url: str) -> str:
    """Return the URL with the path /v1 if it has no path. Raises InvalidArgument as `address_of` does."""
    address = address_of(url)
    return url.rstrip("/") if address.path else f"{url.rstrip('/')}/v1"


def _call(url: str, api_key: str, body: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
    """Send one HTTP request, and return the JSON of its response. Raises a TandemError with the server's reason."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    content = None if body is None else json.dumps(body).encode()
    try:
        with urlopen(Request(url, content, headers), timeout=timeout_s) as answer:
            response = json.load(answer)
    except HTTPError as error:
        reason = f"{url} answered {error.code}: {error_reason(error.read())}"
        if error.code == HTTPStatus.UNAUTHORIZED:
            reason += "; give --api-key or --api-key-file (TANDEM_API_KEY)"
        raise _KINDS.get(error.code, Unavailable)(reason) from None
    except (OSError, ValueError) as error:
        raise Unavailable(f"{url} does not answer: {error}") from None
    if not isinstance(response, dict):
        raise Unavailable(f"{url} is no OpenAI server: it answers {type(response).__name__}, not an object")
    return response


def _refused(reason: str) -> InvalidArgument:
    return InvalidArgument("request", reason)


_KINDS: dict[int, Callable[[str], Exception]] = {400: _refused, 422: _refused, 401: Unauthenticated}


def error_reason(content: bytes) -> str:
    """Return the message in the body of an error response, or the body's text."""
    try:
        return str(json.loads(content)["error"]["message"])[:_REASON_CHARACTERS]
    except (ValueError, LookupError, TypeError):
        return content.decode("utf-8", errors="replace")[:_REASON_CHARACTERS]
