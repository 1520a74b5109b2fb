"""One request of a check, and what its client does: it reads the whole answer, leaves early, or pauses reading."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LINES_PER_EVENT = 2
"""Lines of a server-sent event: its data and an empty line."""
SLOW_BYTES_PER_S = 256
API_KEY_VARIABLE = "TANDEM_API_KEY"


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """A greedy completion of `max_tokens` tokens, and the behaviour of its client."""

    prompt: str
    max_tokens: int
    stream: bool = True
    request_id: str = ""
    """Sent as X-Request-Id, unless empty."""
    cache_salt: str = ""
    """Sent as `cache_salt`, unless empty: the server then reuses KV only of requests with the same salt."""
    logprobs: bool = False
    """True to ask for the log probabilities of each token and of the second most likely one."""
    n: int = 1
    leave_after_s: float | None = None
    """The client closes the connection this many seconds after it has sent the request; None = it does not."""
    leave_after_events: int | None = None
    """The client closes the connection after this many events of the stream; None = it does not."""
    handed_over: Mapping[str, Any] | None = None
    """The parameters of a hand-over with which a decode server finds the KV of the prompt; None = not yet computed."""
    pauses: bool = False
    """True if the client reads nothing after the first event until the other requests of its wave have ended."""

    def body(self, model: str, unsupported: frozenset[str] = frozenset()) -> dict[str, Any]:
        """Return the JSON of the request, without the fields in `unsupported`."""
        body: dict[str, Any] = {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.cache_salt:
            body["cache_salt"] = self.cache_salt
        if self.logprobs:
            body["logprobs"] = 2
        if self.n > 1:
            body["n"] = self.n
        return {field: value for field, value in body.items() if field not in unsupported}

    def headers(self, api_key: str) -> dict[str, str]:
        """Return the HTTP headers of the request."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        return headers | ({"X-Request-Id": self.request_id} if self.request_id else {})

    def curl(self, url: str, body: dict[str, Any], *, with_key: bool) -> str:
        """Return the shell command that does the same with curl."""
        words = ["curl", "-sN", shlex.quote(f"{url}/completions"), "-H", "'Content-Type: application/json'"]
        if with_key:
            words += ["-H", f'"Authorization: Bearer ${API_KEY_VARIABLE}"']
        if self.request_id:
            words += ["-H", shlex.quote(f"X-Request-Id: {self.request_id}")]
        if self.leave_after_s is not None:
            words += ["--max-time", f"{max(0.001, self.leave_after_s):.3f}"]
        if self.pauses:
            words += ["--limit-rate", str(SLOW_BYTES_PER_S)]
        words += ["-d", shlex.quote(json.dumps(body))]
        if self.leave_after_events is not None:
            words += ["|", "head", "-n", str(LINES_PER_EVENT * self.leave_after_events)]
        return " ".join(words)
