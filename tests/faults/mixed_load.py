"""Requests of every form over HTTP, and an oracle that has the right answer to each from the undisturbed cluster."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.faults.streams import DEADLINE_S

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
SENTENCES = "The sea is wide. The old ship sails at night. A lamp is lit on the pier. Rain falls on the roof. "
RETRY_S = 0.5


def forms(rng: random.Random) -> dict[str, tuple[str, dict[str, Any]]]:
    """Returns the path and the body of one request of each form."""
    words = SENTENCES.split()

    def text(count: int) -> str:
        return " ".join(rng.choice(words) for _ in range(count))

    def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
        messages = [{"role": "user", "content": text(12)}]
        return "chat/completions", {"messages": messages, "max_tokens": 24, "temperature": 0} | fields

    def completion(words: int, **fields: Any) -> tuple[str, dict[str, Any]]:
        body = {"prompt": text(words), "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        return "completions", body | fields

    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    return {
        "greedy": completion(20),
        "long prompt": completion(400),
        "sampled with a seed": completion(20, temperature=0.8, seed=rng.randrange(1 << 30)),
        "two answers": completion(20, n=2, temperature=0.8, seed=rng.randrange(1 << 30)),
        "log probabilities": completion(20, logprobs=2),
        "stop string": completion(20, stop=[" the"], ignore_eos=False),
        "no drafts": completion(20, speculate=False),
        "priority": completion(20, priority=-5),
        "JSON schema": chat(response_format=schema),
        "required tool": chat(tools=[TOOL], tool_choice="required"),
    }


def essence(reply: dict[str, Any]) -> list[Any]:
    """Returns what must be equal in every reply to a request: texts, calls without their ids, and reasons."""
    found: list[Any] = []
    for choice in reply["choices"]:
        message = choice.get("message") or {}
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        tokens = (choice.get("logprobs") or {}).get("tokens")
        found.append([choice.get("text"), message.get("content"), calls, tokens, choice["finish_reason"]])
    return found


@dataclass(slots=True)
class Outcome:
    """The answers to requests that ran during one try of a fault, or that were sent until all clients had recovered."""

    counts: Counter[str] = field(default_factory=Counter)
    """Answers that were right, wrong or without an end, and errors by their status or kind."""
    details: list[str] = field(default_factory=list)
    """The wrong answers, and those without an end."""
    recovery_s: float = 0.0
    """Seconds from the fault to the last client's first right answer to a request that was sent after it."""


class MixedLoad:
    """One client for each form of request, which sends it over and over."""

    def __init__(self, url: str, seed: int, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """`transport` replaces the network in unit tests."""
        # Connections are not kept: after a fault, a request would fail on one that was opened before.
        transport = transport or httpx.AsyncHTTPTransport(limits=httpx.Limits(max_keepalive_connections=0))
        self._http = httpx.AsyncClient(base_url=url, timeout=DEADLINE_S, transport=transport)
        self._forms = forms(random.Random(seed))
        self._right: dict[str, list[Any]] = {}
        self._struck_s = 0.0
        self._stopping = False
        self._recovered: set[str] = set()
        self._all_recovered = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.outcome = Outcome()

    @property
    def clients(self) -> int:
        """The number of clients: one for each form of request."""
        return len(self._forms)

    async def start(self) -> None:
        """Asks the undisturbed cluster once for each form, and starts the clients."""
        for name, (path, body) in self._forms.items():
            reply = await self._http.post(path, json=body)
            assert reply.status_code == 200, (name, reply.text)
            self._right[name] = essence(reply.json())
        self._tasks = [asyncio.ensure_future(self._client(name)) for name in self._forms]

    def struck(self) -> None:
        """Begins another outcome at the moment of a fault."""
        self.outcome, self._struck_s = Outcome(), time.monotonic()
        self._recovered.clear()
        self._all_recovered.clear()

    async def recovered(self) -> Outcome:
        """Waits until each client has a right answer to a request sent after the fault; returns the outcome."""
        async with asyncio.timeout(2 * DEADLINE_S):
            await self._all_recovered.wait()
        return self.outcome

    async def stop(self) -> None:
        """Lets the clients end their requests."""
        self._stopping = True
        await asyncio.gather(*self._tasks)
        await self._http.aclose()

    async def _client(self, name: str) -> None:
        path, body = self._forms[name]
        while not self._stopping:
            sent_s = time.monotonic()
            kind = await self._ask(name, path, body)
            self.outcome.counts[kind] += 1
            if kind == "right":
                if sent_s > self._struck_s and name not in self._recovered:
                    self._recovered.add(name)
                    self.outcome.recovery_s = time.monotonic() - self._struck_s
                if len(self._recovered) == len(self._forms):
                    self._all_recovered.set()
            else:
                await asyncio.sleep(RETRY_S)

    async def _ask(self, name: str, path: str, body: dict[str, Any]) -> str:
        """Sends one request; returns "right", "wrong", "no end", or the kind of its error."""
        try:
            reply = await self._http.post(path, json=body)
        except httpx.TimeoutException:
            self.outcome.details.append(f"{name}: no end within {DEADLINE_S:g} s")
            return "no end"
        except httpx.HTTPError as error:
            return type(error).__name__
        if reply.status_code != 200:
            return f"HTTP {reply.status_code}"
        if (got := essence(reply.json())) != self._right[name]:
            self.outcome.details.append(f"{name}: {got} instead of {self._right[name]}")
            return "wrong"
        return "right"
